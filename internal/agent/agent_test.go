package agent_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agent"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/test/slow"
)

func python(t testing.TB) string {
	t.Helper()
	for _, p := range []string{"/usr/bin/python3", "python3"} {
		if found, err := exec.LookPath(p); err == nil {
			return found
		}
	}
	t.Skip("no python here")
	return ""
}

// home is an agent in this process, reached over a channel as a driver would.
type home struct {
	*agentapi.Client
	agent   *agent.Agent
	channel *net.UnixConn
	dir     string
}

func newHome(t testing.TB, boot agentapi.Boot) *home {
	t.Helper()
	dir := t.TempDir()
	if boot.Env == nil {
		boot.Env = map[string]string{"PATH": os.Getenv("PATH")}
	}
	a, err := agent.New(agent.Config{Boot: boot, Home: dir})
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := seqpacket(t)
	served := make(chan error, 1)
	go func() { served <- a.ServeChannel(theirs) }()
	h := &home{agent: a, channel: ours, dir: dir}
	h.Client = agentapi.NewClient(h.dialer(ours))
	t.Cleanup(func() {
		a.Close()
		ours.Close()
		<-served
	})
	return h
}

func (h *home) dialer(ch *net.UnixConn) agentapi.Dialer {
	return func(context.Context) (net.Conn, error) {
		fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		defer syscall.Close(fds[1])
		if err := agentapi.SendMessage(ch, agentapi.Message{Type: agentapi.MessageConn}, fds[1]); err != nil {
			syscall.Close(fds[0])
			return nil, err
		}
		return agentapi.DescriptorConn(fds[0])
	}
}

func seqpacket(t testing.TB) (*net.UnixConn, *net.UnixConn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	a, err := agentapi.Channel(fds[0])
	if err != nil {
		t.Fatal(err)
	}
	b, err := agentapi.Channel(fds[1])
	if err != nil {
		t.Fatal(err)
	}
	return a, b
}

// fork starts the test kernel outside the agent and hands it over, as a zygote's owner would.
func (h *home) fork(t *testing.T, name, token string) *exec.Cmd {
	t.Helper()
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out, errs [2]int
	for _, p := range []*[2]int{&out, &errs} {
		if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
	}
	theirs := []*os.File{os.NewFile(uintptr(pair[1]), "socket"), os.NewFile(uintptr(out[1]), "out"), os.NewFile(uintptr(errs[1]), "err")}
	cmd := exec.Command(python(t), "-I", "testdata/kernel.py")
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = theirs[1], theirs[2], theirs[:1]
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, f := range theirs {
		f.Close()
	}
	// One of its own: the agent makes it non-blocking, and Wait, which uses another, must not become that too.
	const sysPidfdOpen = 434
	pidfd, _, errno := syscall.Syscall(sysPidfdOpen, uintptr(cmd.Process.Pid), 0, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	fds := []int{pair[0], out[0], errs[0], int(pidfd)}
	adoption := agentapi.Adoption{Name: name, Token: token}
	if err := agentapi.SendMessage(h.channel, agentapi.Message{Type: agentapi.MessageKernel, Kernel: &adoption}, fds...); err != nil {
		t.Fatal(err)
	}
	agentapi.CloseDescriptors(fds)
	k, err := h.KernelWait(t.Context(), agentapi.KernelParams{Kernel: name})
	if err != nil || k.State != agentapi.KernelIdle || !k.Warm {
		t.Fatalf("%+v, %v", k, err)
	}
	return cmd
}

func (h *home) cell(t *testing.T, p agentapi.RunParams) (string, agentapi.End) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	s, err := h.Run(ctx, p)
	if err != nil {
		t.Fatalf("run %q: %v", p.Code, err)
	}
	return collect(t, s)
}

// patience is how long tests wait for what comes at once, unless the machine is busy.
const patience = 2 * time.Minute

// await fails unless a condition comes true.
func await(t *testing.T, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			t.Fatalf("waited in vain\n%s", buf[:runtime.Stack(buf, true)])
		}
	}
}

func (h *home) state(t *testing.T, name string) agentapi.KernelState {
	t.Helper()
	list, err := h.Kernels(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range list {
		if k.Name == name {
			return k.State
		}
	}
	return ""
}

func TestAdoptedKernel(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	tell := func(e agentapi.KernelExit) {
		if err := agentapi.SendMessage(h.channel, agentapi.Message{Type: agentapi.MessageExit, Exit: &e}); err != nil {
			t.Error(err)
		}
	}
	t.Run("it takes cells", func(t *testing.T) {
		cmd := h.fork(t, "k", "t1")
		out, end := h.cell(t, agentapi.RunParams{Kernel: "k", Code: "echo hi"})
		if out != "hi" || end.Outcome != agentapi.OutcomeOK {
			t.Errorf("%q %+v", out, end)
		}
		t.Run("another of its name takes its place", func(t *testing.T) {
			next := h.fork(t, "k", "t2")
			if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
				t.Error(err)
			}
			defer next.Wait()
			if out, _ := h.cell(t, agentapi.RunParams{Kernel: "k", Code: "echo again"}); out != "again" {
				t.Errorf("%q", out)
			}
			if err := h.KernelStop(t.Context(), agentapi.KernelParams{Kernel: "k"}); err != nil {
				t.Error(err)
			}
		})
	})
	for name, c := range map[string]struct {
		exit    agentapi.KernelExit
		outcome agentapi.Outcome
		message string
	}{
		"its exit is told as its parent saw it":     {agentapi.KernelExit{Token: "x", Code: 3}, agentapi.OutcomeKernelDied, "status 3"},
		"its crash is told as its parent saw it":    {agentapi.KernelExit{Token: "x", Code: -1, Signal: "SIGSEGV"}, agentapi.OutcomeKernelDied, "SIGSEGV"},
		"lack of memory is told as its parent knew": {agentapi.KernelExit{Token: "x", Code: -1, Signal: "SIGKILL", OOM: true}, agentapi.OutcomeOOM, "out of memory"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := h.fork(t, "d", "x")
			go func() {
				cmd.Wait()
				tell(c.exit)
			}()
			_, end := h.cell(t, agentapi.RunParams{Kernel: "d", Code: "exit 3"})
			if end.Outcome != c.outcome || !end.Lost || !strings.Contains(end.Message, c.message) {
				t.Errorf("%+v", end)
			}
			_, err := h.Run(t.Context(), agentapi.RunParams{Kernel: "d", Code: "echo x"})
			if !fault.Is(err, fault.Gone) {
				t.Error(err)
			}
		})
	}
	t.Run("its exit is told although its parent was slow to say", func(t *testing.T) {
		cmd := h.fork(t, "slow", "s")
		go func() {
			cmd.Wait()
			time.Sleep(400 * time.Millisecond)
			tell(agentapi.KernelExit{Token: "s", Code: 3})
		}()
		_, end := h.cell(t, agentapi.RunParams{Kernel: "slow", Code: "exit 3"})
		if !strings.Contains(end.Message, "status 3") {
			t.Errorf("%+v", end)
		}
	})
	t.Run("its death between cells is noticed before its parent tells", func(t *testing.T) {
		cmd := h.fork(t, "i", "y")
		cmd.Process.Kill()
		cmd.Wait()
		await(t, func() bool { return h.state(t, "i") == agentapi.KernelDead })
		refused := make(chan error, 1)
		go func() {
			_, err := h.Run(t.Context(), agentapi.RunParams{Kernel: "i", Code: "echo x"})
			refused <- err
		}()
		tell(agentapi.KernelExit{Token: "y", Code: -1, Signal: "SIGSEGV"})
		if err := <-refused; !fault.Is(err, fault.Gone) || !strings.Contains(err.Error(), "SIGSEGV") {
			t.Errorf("a cell that came before its parent told: %v", err)
		}
	})
	t.Run("an end without a word is told bare when the kernel is stopped", func(t *testing.T) {
		cmd := h.fork(t, "mute", "z")
		s, err := h.Run(t.Context(), agentapi.RunParams{Kernel: "mute", Code: "exit 3"})
		if err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		await(t, func() bool { return h.state(t, "mute") == agentapi.KernelDead })
		if err := h.KernelStop(t.Context(), agentapi.KernelParams{Kernel: "mute"}); err != nil {
			t.Fatal(err)
		}
		if _, end := collect(t, s); end.Outcome != agentapi.OutcomeKernelDied || !end.Lost || !strings.HasPrefix(end.Message, "the kernel ended;") {
			t.Errorf("%+v", end)
		}
	})
	t.Run("an end without a word does not hold up the end of its agent", func(t *testing.T) {
		h := newHome(t, agentapi.Boot{ID: "b"})
		cmd := h.fork(t, "mute", "z")
		cmd.Process.Kill()
		cmd.Wait()
		await(t, func() bool { return h.state(t, "mute") == agentapi.KernelDead })
		next := h.fork(t, "mute", "new")
		defer next.Wait()
		began := time.Now()
		h.agent.Close()
		if took := time.Since(began); took > 40*time.Second {
			t.Errorf("the agent took %v to end", took)
		}
	})
	t.Run("it is awaited while others arrive", func(t *testing.T) {
		awaited := make(chan error, 1)
		go func() {
			k, err := h.KernelWait(t.Context(), agentapi.KernelParams{Kernel: "last", Token: "last"})
			if err == nil && k.State != agentapi.KernelIdle {
				err = fmt.Errorf("it is %s", k.State)
			}
			awaited <- err
		}()
		for _, name := range []string{"first", "second", "last"} {
			cmd := h.fork(t, name, name)
			t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		}
		if err := <-awaited; err != nil {
			t.Error(err)
		}
	})
}

func TestHostileKernel(t *testing.T) {
	slow.Test(t)
	h := newHome(t, agentapi.Boot{ID: "a", Python: python(t), Kernel: absolute(t, "testdata/kernel.py")})
	start := func(t *testing.T) {
		t.Helper()
		if _, err := h.KernelStart(t.Context(), agentapi.KernelStartParams{}); err != nil {
			t.Fatal(err)
		}
	}
	for name, code := range map[string]string{
		"one that sends no frame":                "raw ffffffffffffffff",
		"one that claims a frame of 4 GiB":       "raw 02000000ffffffff",
		"one that sends a frame of another kind": "raw 0300000000000001ff",
		"one that sends broken JSON":             "send {",
		"one that sends an unknown event":        `send {"type":"reboot"}`,
		"one that ends with an outcome of ours":  `send {"type":"end","end":{"outcome":"oom"}}`,
		"one that ends without an end":           `send {"type":"end"}`,
		"one that is ready twice":                `send {"type":"ready"}`,
		"one that displays without end":          "flood 200000",
		"one that sends a frame over the limit":  "huge",
		"one that closes its socket and stays":   "close",
	} {
		t.Run(name+" is killed", func(t *testing.T) {
			start(t)
			_, end := h.cell(t, agentapi.RunParams{Code: code})
			if end.Outcome != agentapi.OutcomeKernelDied || !end.Lost || !strings.Contains(end.Message, "was killed") {
				t.Errorf("%+v", end)
			}
		})
	}
	t.Run("one that floods between cells is killed", func(t *testing.T) {
		start(t)
		h.cell(t, agentapi.RunParams{Code: "after 2000"})
		await(t, func() bool { return h.state(t, agentapi.DefaultKernel) == agentapi.KernelDead })
	})
	t.Run("output between cells is kept up to a limit", func(t *testing.T) {
		start(t)
		late := func(n string) {
			after, done := filepath.Join(h.dir, "after"+n), filepath.Join(h.dir, "done"+n)
			h.cell(t, agentapi.RunParams{Code: "late " + n + " " + after + " " + done})
			if err := os.WriteFile(after, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			await(t, func() bool { _, err := os.Stat(done); return err == nil })
		}
		late("1000")
		if out, _ := h.cell(t, agentapi.RunParams{Code: "echo x"}); len(out) != 1001 {
			t.Errorf("%d bytes", len(out))
		}
		late("1000000")
		if out, _ := h.cell(t, agentapi.RunParams{Code: "echo x"}); len(out) > 65<<10 || !strings.HasSuffix(out, "x") {
			t.Errorf("%d bytes", len(out))
		}
	})
	t.Run("one that does not read and whose child holds its socket is mourned", func(t *testing.T) {
		if err := h.KernelStop(t.Context(), agentapi.KernelParams{}); err != nil {
			t.Fatal(err)
		}
		start(t)
		marker := filepath.Join(h.dir, "second")
		first, err := h.Run(t.Context(), agentapi.RunParams{Code: "orphan " + marker})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		second := make(chan error, 1)
		go func() {
			_, err := h.Run(ctx, agentapi.RunParams{Code: strings.Repeat("x", 4<<20)})
			second <- err
		}()
		if err := os.WriteFile(marker, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		collect(t, first)
		if err := <-second; !fault.Is(err, fault.Gone) {
			t.Errorf("the cell that waited: %v", err)
		}
		start(t)
	})
	t.Run("a kernel that lives is not started twice", func(t *testing.T) {
		if _, err := h.KernelStart(t.Context(), agentapi.KernelStartParams{}); !fault.Is(err, fault.Conflict) {
			t.Error(err)
		}
	})
}

func TestTimeout_KernelKept(t *testing.T) {
	slow.Test(t)
	h := newHome(t, agentapi.Boot{ID: "a", Python: python(t), Kernel: absolute(t, "testdata/kernel.py")})
	for _, c := range []struct {
		name, code string
		limit      time.Duration
		lost       bool
	}{
		{"a cell that takes three seconds to stop", "reluctant 3", time.Second, false},
		{"a cell that computes on", "deaf", 10 * time.Second, true}, // it ignores the interrupt by then
	} {
		t.Run(c.name, func(t *testing.T) {
			if h.state(t, agentapi.DefaultKernel) == "" {
				if _, err := h.KernelStart(t.Context(), agentapi.KernelStartParams{}); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := h.KernelWait(t.Context(), agentapi.KernelParams{}); err != nil {
				t.Fatal(err)
			}
			_, end := h.cell(t, agentapi.RunParams{Code: c.code, TimeoutMS: c.limit.Milliseconds()})
			if end.Outcome != agentapi.OutcomeTimeout || end.Lost != c.lost {
				t.Errorf("%+v", end)
			}
		})
	}
}

func absolute(t testing.TB, p string) string {
	t.Helper()
	abs, err := filepath.Abs(p)
	if err != nil {
		t.Fatal(err)
	}
	return abs
}

func TestKernelThatCannotStart(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a", Python: python(t), Kernel: "/no/such/kernel.py"})
	if _, err := h.KernelStart(t.Context(), agentapi.KernelStartParams{}); err != nil {
		t.Fatal(err)
	}
	k, err := h.KernelWait(t.Context(), agentapi.KernelParams{})
	if err != nil || k.State != agentapi.KernelDead || !strings.Contains(k.Message, "status 2") {
		t.Errorf("%+v, %v", k, err)
	}
	if _, err := newHome(t, agentapi.Boot{}).KernelStart(t.Context(), agentapi.KernelStartParams{}); !fault.Is(err, fault.Unsupported) {
		t.Error(err)
	}
}

func TestFurtherChannelOnlyBringsConnections(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	ours, theirs := seqpacket(t)
	raw, err := theirs.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) {
		err = agentapi.SendMessage(h.channel, agentapi.Message{Type: agentapi.MessageChannel}, int(fd))
	})
	theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	c := agentapi.NewClient(h.dialer(ours))
	if _, err := c.Hello(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := fds(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	four := []int{int(r.Fd()), int(r.Fd()), int(r.Fd()), int(r.Fd())}
	if err := agentapi.SendMessage(ours, agentapi.Message{Type: agentapi.MessageKernel, Kernel: &agentapi.Adoption{Name: "x"}}, four...); err != nil {
		t.Fatal(err)
	}
	r.Close()
	w.Close()
	if list, err := c.Kernels(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("%+v, %v", list, err)
	}
	await(t, func() bool { return fds(t) <= before })
	ours.Close()
	if _, err := h.Hello(t.Context()); err != nil {
		t.Errorf("the agent went with a further channel: %v", err)
	}
}

func fds(t testing.TB) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

func TestUnknownOperationIsUnsupported(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	conn, err := h.dialer(h.channel)(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	agentapi.WriteJSON(conn, agentapi.FrameRequest, agentapi.Request{Op: "reboot"})
	f, err := agentapi.NewReader(conn).Read()
	if err != nil {
		t.Fatal(err)
	}
	var end agentapi.End
	if err := json.Unmarshal(f.Payload, &end); err != nil || f.Kind != agentapi.FrameEnd || end.Fault == nil || end.Fault.Kind != fault.Unsupported {
		t.Errorf("%d %s", f.Kind, f.Payload)
	}
}

func TestNothingIsLeftBehind(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a", Python: python(t), Kernel: absolute(t, "testdata/kernel.py")})
	ctx := t.Context()
	cycle := func() {
		output(t, h.Client, sh("echo hi; exit 3"))
		p := sh("sleep 100")
		p.TimeoutMS = 5
		output(t, h.Client, p)
		p = sh("cat")
		p.PTY = &agentapi.PTYSize{}
		s, err := h.Exec(ctx, p)
		if err != nil {
			t.Fatal(err)
		}
		s.Close()
		h.Exec(ctx, agentapi.ExecParams{Argv: []string{"no-such-command"}, Stdin: true})
		h.Write(ctx, agentapi.WriteParams{Path: "f"}, strings.NewReader("x"))
		if _, r, err := h.Read(ctx, agentapi.ReadParams{Path: "f"}); err == nil {
			r.Close()
		}
		h.List(ctx, agentapi.ListParams{Path: ".", Depth: 3})
		h.Write(ctx, agentapi.WriteParams{Path: "f/no"}, strings.NewReader("x"))
		if w, err := h.Watch(ctx, agentapi.WatchParams{Path: ".", Recursive: true}); err == nil {
			w.Close()
		}
		h.DialPort(ctx, agentapi.DialParams{Port: 1})
		if _, err := h.KernelStart(ctx, agentapi.KernelStartParams{Kernel: "k"}); err != nil {
			t.Fatal(err)
		}
		h.cell(t, agentapi.RunParams{Kernel: "k", Code: "echo x"})
		if err := h.KernelStop(ctx, agentapi.KernelParams{Kernel: "k"}); err != nil {
			t.Fatal(err)
		}
	}
	goroutines, descriptors := runtime.NumGoroutine(), fds(t)
	for range 10 {
		cycle()
	}
	await(t, func() bool { return runtime.NumGoroutine() <= goroutines && fds(t) <= descriptors })
}

func TestOneWhoJoinedAndDoesNotReadHoldsUpNobody(t *testing.T) {
	slow.Test(t)
	h := newHome(t, agentapi.Boot{ID: "a"})
	const size = 4 << 20 // more than sockets hold
	begin := filepath.Join(h.dir, "go")
	p := sh(fmt.Sprintf("until [ -e %s ]; do sleep 0.01; done; head -c %d /dev/zero", begin, size))
	p.Tag = "talker"
	owner, err := h.Exec(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	joined, err := h.Attach(t.Context(), agentapi.AttachParams{Target: agentapi.Target{Name: "talker"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(begin, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, end := collect(t, owner); len(out) != size || end.Outcome != agentapi.OutcomeOK {
		t.Errorf("the owner heard %d bytes, %+v", len(out), end)
	}
	var last error
	for _, err := range joined.Events() {
		last = err
	}
	if !fault.Is(last, fault.Unavailable) {
		t.Errorf("the one who joined heard an end: %v", last)
	}
}

func TestAProcessIsFoundByAnyOfItsNames(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	for _, name := range []func(agentapi.Event) string{
		func(e agentapi.Event) string { return e.ID },
		func(e agentapi.Event) string { return strconv.Itoa(e.PID) },
		func(agentapi.Event) string { return "nap" },
	} {
		p := sh("exec sleep 100")
		p.Tag = "nap"
		s, err := h.Exec(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		for e, err := range s.Events() {
			if err != nil {
				t.Fatal(err)
			}
			switch e.Type {
			case agentapi.EventStarted:
				if err := h.Signal(t.Context(), agentapi.SignalParams{Target: agentapi.Target{Name: name(e)}, Signal: "SIGTERM"}); err != nil {
					t.Fatalf("%q: %v", name(e), err)
				}
			case agentapi.EventEnd:
				if e.End.Signal != "SIGTERM" {
					t.Errorf("%+v", e.End)
				}
			}
		}
	}
	if err := h.Signal(t.Context(), agentapi.SignalParams{Target: agentapi.Target{Name: "nap"}, Signal: "SIGTERM"}); !fault.Is(err, fault.NotFound) {
		t.Error(err)
	}
}

func TestAMessageOverTheLimitIsDropped(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	before := fds(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := h.channel.WriteMsgUnix(make([]byte, 2*agentapi.MaxMessage), syscall.UnixRights(int(r.Fd())), nil); err != nil {
		t.Fatal(err)
	}
	r.Close()
	w.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if _, err := h.Hello(ctx); err != nil {
		t.Fatalf("after it: %v", err)
	}
	await(t, func() bool { return fds(t) <= before })
}

func TestParseSudo(t *testing.T) {
	for line, want := range map[string]string{
		"apt install x":             "[apt install x]  map[]",
		"-n -H id":                  "[id]  map[]",
		"-nE id -u":                 "[id -u]  map[] keep",
		"-u bob id":                 "[id] bob map[]",
		"-ubob id":                  "[id] bob map[]",
		"--user=bob id":             "[id] bob map[]",
		"A=1 B=2 id C=3":            "[id C=3]  map[A:1 B:2]",
		"-- -x":                     "[-x]  map[]",
		"-i":                        "[]  map[] login shell",
		"-s echo hi":                "[echo hi]  map[] shell",
		"-v":                        "[]  map[] quiet",
		"-k":                        "[]  map[] quiet",
		"--preserve-env=A,B id":     "[id]  map[] [A B]",
		"-p prompt -S id":           "[id]  map[]",
		"./a=b/c x":                 "[./a=b/c x]  map[]",
		"--non-interactive --shell": "[]  map[] shell",
		"-u":                        "error",
		"-Z id":                     "error",
		"--frobnicate id":           "error",
		"":                          "error",
		"DEBIAN_FRONTEND=noninteractive apt-get -y install x": "[apt-get -y install x]  map[DEBIAN_FRONTEND:noninteractive]",
	} {
		got := "error"
		if c, err := agent.ParseSudo(strings.Fields(line)); err == nil {
			got = fmt.Sprint(c.Argv, " ", c.User, " ", c.Env)
			for word, on := range map[string]bool{" keep": c.KeepEnv, " quiet": c.Quiet} {
				if on {
					got += word
				}
			}
			if c.Login {
				got += " login"
			}
			if c.Shell {
				got += " shell"
			}
			if c.KeepVars != nil {
				got += fmt.Sprint(" ", c.KeepVars)
			}
		}
		if got != want {
			t.Errorf("sudo %s: %q, want %q", line, got, want)
		}
	}
}

func TestAKernelTellsItsStateOnlyWhenAsked(t *testing.T) {
	small, large := `{"names":1}`, `"`+strings.Repeat("x", agentapi.MaxHolding)+`"`
	for _, c := range []struct {
		asked      bool
		says, want string
	}{{true, small, small}, {false, small, ""}, {true, large, ""}} {
		h := newHome(t, agentapi.Boot{ID: "a", Python: python(t), Kernel: absolute(t, "testdata/kernel.py")})
		if _, err := h.KernelStart(t.Context(), agentapi.KernelStartParams{}); err != nil {
			t.Fatal(err)
		}
		s, err := h.Run(t.Context(), agentapi.RunParams{Code: `send {"type":"end","end":{"outcome":"ok","value":` + c.says + `}}`, State: c.asked})
		if err != nil {
			t.Fatal(err)
		}
		if _, end := collect(t, s); end.Outcome != agentapi.OutcomeOK || string(end.Value) != c.want {
			t.Errorf("asked %v, said %.20s: %s, %.20s", c.asked, c.says, end.Outcome, end.Value)
		}
	}
}

func TestWhatAKernelTellsBesideItsOutputIsBounded(t *testing.T) {
	long := strings.Repeat("ä", 1<<20)
	decode := func(in agentapi.Event) agentapi.Event {
		t.Helper()
		payload, err := json.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		out, err := agent.DecodeKernelEvent(agentapi.Frame{Kind: agentapi.FrameEvent, Payload: payload})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	size := func(e agentapi.Event) int {
		text, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		return len(text)
	}
	deep := make([]string, 5000)
	for i := range deep {
		deep[i] = fmt.Sprint("line ", i)
	}

	got := decode(agentapi.Event{Type: agentapi.EventError, Error: &agentapi.CodeError{Name: long, Value: long, Traceback: []string{long, "raised here", long}}})
	if n := size(got); n > 3<<20 || got.Error.Traceback[1] != "raised here" {
		t.Errorf("an error of long words has %d bytes, and line %.20q", n, got.Error.Traceback[1])
	}
	got = decode(agentapi.Event{Type: agentapi.EventError, Error: &agentapi.CodeError{Name: "E", Traceback: deep}})
	if lines := got.Error.Traceback; len(lines) > 1000 || lines[0] != "line 0" || lines[len(lines)-1] != "line 4999" {
		t.Errorf("of a deep traceback there are %d lines, the last is %q", len(lines), lines[len(lines)-1])
	}
	short := agentapi.CodeError{Name: "E", Value: "v", Traceback: []string{"a", "b"}}
	if got := decode(agentapi.Event{Type: agentapi.EventError, Error: &short}).Error; !reflect.DeepEqual(*got, short) {
		t.Errorf("a short one is %+v", got)
	}

	raw := json.RawMessage(`"` + long + `"`)
	result := agentapi.Result{Data: map[string]json.RawMessage{"text/plain": raw}, Metadata: map[string]json.RawMessage{"m": raw}, ID: long}
	if got := decode(agentapi.Event{Type: agentapi.EventResult, Result: &result}).Result; len(got.Metadata) > 0 || len(got.ID) > 256 || len(got.Data["text/plain"]) != len(raw) {
		t.Errorf("beside a result of %d bytes there are %d values, and a name of %d bytes", len(got.Data["text/plain"]), len(got.Metadata), len(got.ID))
	}
}

func FuzzKernelEvent(f *testing.F) {
	f.Add(uint8(2), []byte(`{"type":"ready","pid":3,"message":"ipython 9"}`))
	f.Add(uint8(2), []byte(`{"type":"result","result":{"data":{"text/plain":"\"2\""},"main":true}}`))
	f.Add(uint8(2), []byte(`{"type":"error","error":{"name":"E","value":"v","traceback":["a"]}}`))
	f.Add(uint8(2), []byte(`{"type":"end","end":{"outcome":"ok","value":{},"fault":{"kind":"gone"}}}`))
	f.Add(uint8(3), []byte(`x`))
	f.Fuzz(func(t *testing.T, kind uint8, payload []byte) {
		e, err := agent.DecodeKernelEvent(agentapi.Frame{Kind: agentapi.FrameKind(kind), Payload: payload})
		if err != nil {
			return
		}
		if _, err := json.Marshal(e); err != nil {
			t.Fatalf("an event that cannot be passed on: %v", err)
		}
		if e.Data != nil || e.ID != "" || e.File != nil || e.Entry != nil {
			t.Fatalf("a kernel says what only the agent may: %+v", e)
		}
		if e.Type == agentapi.EventEnd && (e.End.Fault != nil || len(e.End.Value) > agentapi.MaxHolding || e.End.Lost || e.End.Signal != "") {
			t.Fatalf("a kernel says what only the agent may: %+v", e.End)
		}
	})
}

func BenchmarkExec(b *testing.B) {
	h := newHome(b, agentapi.Boot{ID: "a"})
	for b.Loop() {
		s, err := h.Exec(b.Context(), agentapi.ExecParams{Argv: []string{"true"}})
		if err != nil {
			b.Fatal(err)
		}
		for range s.Events() {
		}
	}
}

func BenchmarkOutput(b *testing.B) {
	h := newHome(b, agentapi.Boot{ID: "a"})
	b.SetBytes(64 << 20)
	for b.Loop() {
		s, err := h.Exec(b.Context(), agentapi.ExecParams{Argv: []string{"head", "-c", "64M", "/dev/zero"}})
		if err != nil {
			b.Fatal(err)
		}
		for range s.Events() {
		}
	}
}

func BenchmarkCell(b *testing.B) {
	h := newHome(b, agentapi.Boot{ID: "a", Python: python(b), Kernel: absolute(b, "testdata/kernel.py")})
	if _, err := h.KernelStart(b.Context(), agentapi.KernelStartParams{}); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		s, err := h.Run(b.Context(), agentapi.RunParams{Code: "echo x"})
		if err != nil {
			b.Fatal(err)
		}
		for range s.Events() {
		}
	}
}
