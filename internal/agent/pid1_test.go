package agent_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

// roleVariable makes this test binary something else when it is executed again.
const roleVariable = "COVE_TEST_ROLE"

func TestMain(m *testing.M) {
	if os.Getenv(roleVariable) == "init" {
		fmt.Fprintln(os.Stderr, becomeAgent(os.Args[1]))
		os.Exit(1)
	}
	code := m.Run()
	if built.path != "" {
		os.RemoveAll(filepath.Dir(built.path))
	}
	os.Exit(code)
}

// becomeAgent is the last part of what a maker does: mounts, no_new_privs, then the agent.
func becomeAgent(binary string) error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := syscall.Mount("tmpfs", "/tmp", "tmpfs", 0, "mode=1777"); err != nil {
		return err
	}
	if err := os.MkdirAll("/tmp/bin", 0o755); err != nil {
		return err
	}
	raw, err := io.ReadAll(os.NewFile(4, "agent"))
	if err != nil {
		return err
	}
	for _, name := range []string{"cove-agent", "sudo"} {
		if err := os.WriteFile("/tmp/bin/"+name, raw, 0o755); err != nil {
			return err
		}
	}
	if err := syscall.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return err
	}
	const prSetNoNewPrivs = 38
	if _, _, errno := syscall.RawSyscall6(syscall.SYS_PRCTL, prSetNoNewPrivs, 1, 0, 0, 0, 0); errno != 0 {
		return errno
	}
	syscall.CloseOnExec(4)
	return syscall.Exec("/tmp/bin/cove-agent", []string{binary}, []string{"SECRET=of-the-maker"})
}

var built struct {
	sync.Once
	path string
	err  error
}

// agentBinary builds the real program once.
func agentBinary(t *testing.T) string {
	t.Helper()
	built.Do(func() {
		dir, err := os.MkdirTemp("", "cove-agent-")
		if err != nil {
			built.err = err
			return
		}
		built.path = filepath.Join(dir, "cove-agent")
		cmd := exec.Command("go", "build", "-o", built.path, "github.com/covehq/cove/cmd/cove-agent")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			built.err = fmt.Errorf("%v: %s", err, out)
		}
	})
	if built.err != nil {
		t.Fatal(built.err)
	}
	return built.path
}

// bootPID1 starts the real agent as PID 1 of namespaces of its own and returns a client and its pid out here.
func bootPID1(t *testing.T, boot agentapi.Boot) (*agentapi.Client, int) {
	t.Helper()
	ch, pid := startPID1(t)
	if err := agentapi.SendMessage(ch, agentapi.Message{Type: agentapi.MessageBoot, Boot: &boot}); err != nil {
		t.Fatal(err)
	}
	return clientOf(ch), pid
}

// startPID1 starts the real agent, which has yet to be told whose it is.
func startPID1(t *testing.T) (*net.UnixConn, int) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("namespaces need root here")
	}
	binary, err := os.Open(agentBinary(t))
	if err != nil {
		t.Fatal(err)
	}
	defer binary.Close()
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", "cove-agent")
	cmd.Env = []string{roleVariable + "=init"}
	theirs := os.NewFile(uintptr(pair[1]), "channel")
	cmd.ExtraFiles = []*os.File{theirs, binary}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 65536}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC,
		UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true, Pdeathsig: syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		t.Skipf("no namespaces here: %v", err)
	}
	theirs.Close()
	ch, err := agentapi.Channel(pair[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ch.Close() // the agent ends with its maker
		done := make(chan error, 1)
		go func() { done <- cmd.Wait() }()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("agent: %v: %s", err, stderr.String())
			}
		case <-time.After(2 * time.Minute):
			cmd.Process.Kill()
			t.Error("the agent outlived its maker")
		}
	})
	return ch, cmd.Process.Pid
}

// clientOf speaks to an agent over a channel.
func clientOf(ch *net.UnixConn) *agentapi.Client {
	return agentapi.NewClient(func(context.Context) (net.Conn, error) {
		pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		defer syscall.Close(pair[1])
		if err := agentapi.SendMessage(ch, agentapi.Message{Type: agentapi.MessageConn}, pair[1]); err != nil {
			syscall.Close(pair[0])
			return nil, err
		}
		return agentapi.DescriptorConn(pair[0])
	})
}

func TestAnAgentThatWasStartedAheadBecomesSomebodys(t *testing.T) {
	ch, _ := startPID1(t)
	expected := agentapi.Boot{User: "1000", Workdir: "/tmp/w", Sudo: true, Expected: true}
	if err := agentapi.SendMessage(ch, agentapi.Message{Type: agentapi.MessageBoot, Boot: &expected}); err != nil {
		t.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond) // mostly it has rehearsed by then; it need not have
	boot := agentapi.Boot{ID: "sb1", User: "1000", Workdir: "/tmp/w", Sudo: true, OpenFiles: 300, Env: map[string]string{"PATH": "/tmp/bin:/usr/bin:/bin", "WHO": "sb1"}}
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := agentapi.SendMessage(ch, agentapi.Message{Type: agentapi.MessageBoot, Boot: &boot, Channel: true}, pair[1]); err != nil {
		t.Fatal(err)
	}
	syscall.Close(pair[1])
	further, err := agentapi.Channel(pair[0])
	if err != nil {
		t.Fatal(err)
	}
	defer further.Close()
	for _, c := range []*agentapi.Client{clientOf(ch), clientOf(further)} {
		out, end := output(t, c, sh("id -u; pwd; ulimit -n; echo $WHO; sudo id -u"))
		if want := "1000\n/tmp/w\n300\nsb1\n0\n"; out != want || end.ExitCode != 0 {
			t.Errorf("a command says %q and ends with %d, want %q", out, end.ExitCode, want)
		}
	}
}

// output runs a command and returns what it said.
func output(t *testing.T, c *agentapi.Client, p agentapi.ExecParams) (string, agentapi.End) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s, err := c.Exec(ctx, p)
	if err != nil {
		t.Fatalf("exec %v: %v", p.Argv, err)
	}
	return collect(t, s)
}

func collect(t *testing.T, s *agentapi.Stream) (string, agentapi.End) {
	t.Helper()
	var out strings.Builder
	for e, err := range s.Events() {
		if err != nil {
			t.Fatal(err)
		}
		out.Write(e.Data)
		if e.End != nil {
			return out.String(), *e.End
		}
	}
	t.Fatal("a stream without an end")
	return "", agentapi.End{}
}

func sh(script string) agentapi.ExecParams {
	return agentapi.ExecParams{Argv: []string{"sh", "-c", script}}
}

func TestPID1(t *testing.T) {
	c, pid := bootPID1(t, agentapi.Boot{ID: "sb1", User: "1000", Workdir: "/tmp", Sudo: true, Env: map[string]string{"PATH": "/tmp/bin:/usr/bin:/bin"}})
	ctx := t.Context()

	t.Run("the agent is PID 1", func(t *testing.T) {
		h, err := c.Hello(ctx)
		if err != nil || h.PID != 1 || h.Version != agentapi.Version {
			t.Fatalf("%+v, %v", h, err)
		}
	})
	t.Run("commands run as the default user without capabilities", func(t *testing.T) {
		out, _ := output(t, c, sh("id -u; id -g; grep CapEff /proc/self/status"))
		if out != "1000\n1000\nCapEff:\t0000000000000000\n" {
			t.Error(out)
		}
	})
	t.Run("root has the sudo list and no more", func(t *testing.T) {
		p := sh("id -u; grep -E 'Cap(Prm|Eff|Bnd|Inh|Amb)' /proc/self/status")
		p.User = "root"
		out, _ := output(t, c, p)
		want := "0\nCapInh:\t0000000000000000\nCapPrm:\t00000000a00404fb\nCapEff:\t00000000a00404fb\nCapBnd:\t00000000a00404fb\nCapAmb:\t0000000000000000\n"
		if out != want {
			t.Error(out)
		}
	})
	for _, who := range []string{"1000", "root"} {
		t.Run("the agent cannot be looked into by "+who, func(t *testing.T) {
			for _, file := range []string{"mem", "environ", "maps", "fd/3", "root/etc/passwd", "auxv", "syscall"} {
				p := sh("head -c 1 /proc/1/" + file)
				p.User = who
				if out, end := output(t, c, p); end.ExitCode == 0 {
					t.Errorf("%s reads /proc/1/%s: %q", who, file, out)
				}
			}
			for _, link := range []string{"fd/0", "fd/3", "fd/4", "cwd", "root", "exe", "ns/mnt"} {
				p := sh("readlink /proc/1/" + link)
				p.User = who
				if out, end := output(t, c, p); end.ExitCode == 0 {
					t.Errorf("%s learns where /proc/1/%s leads: %s", who, link, out)
				}
			}
		})
		t.Run("a file operation does not look into the agent for "+who, func(t *testing.T) {
			for _, file := range []string{"/proc/1/environ", "/proc/self/environ", "/proc/thread-self/mem", "/proc/1/root/etc/passwd", "/proc/self/fd/0", "/proc/1/task/1/environ", "/proc/2/environ", "/proc/3/environ", "/proc/4/maps"} {
				if _, r, err := c.Read(ctx, agentapi.ReadParams{Path: file, User: who}); err == nil {
					data, _ := io.ReadAll(io.LimitReader(r, 64))
					r.Close()
					t.Errorf("%s reads %s: %q", who, file, data)
				}
			}
			if _, end := output(t, c, sh("rm -rf /tmp/way; ln -s /proc/self /tmp/way")); end.ExitCode != 0 {
				t.Fatal(end)
			}
			if _, _, err := c.Read(ctx, agentapi.ReadParams{Path: "/tmp/way/environ", User: who}); err == nil {
				t.Error("a link leads into the agent")
			}
		})
	}
	t.Run("the agent itself keeps one capability more", func(t *testing.T) {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			t.Fatal(err)
		}
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		for _, task := range tasks {
			if more, err := os.ReadFile(task); err == nil {
				raw = append(raw, more...)
			}
		}
		for line := range strings.Lines(string(raw)) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), ":\t")
			want := map[string]string{"CapEff": "00000000a00c04fb", "CapPrm": "00000000a00c04fb", "CapBnd": "00000000a00404fb", "CapInh": "0000000000000000"}[name]
			if want != "" && want != value {
				t.Error(line)
			}
		}
	})
	t.Run("orphans are collected", func(t *testing.T) {
		output(t, c, sh("for i in 1 2 3 4 5; do (sh -c 'sleep 0.05' >/dev/null 2>&1 &) ; done"))
		deadline := time.Now().Add(patience)
		for {
			out, _ := output(t, c, sh("grep -l 'State:.Z' /proc/[0-9]*/status 2>/dev/null; pgrep -c sleep"))
			if strings.TrimSpace(out) == "0" {
				break
			}
			if time.Now().After(deadline) {
				t.Fatal(out)
			}
		}
	})
	t.Run("no descriptor of the agent reaches a command", func(t *testing.T) {
		out, _ := output(t, c, sh("ls -l /proc/self/fd | wc -l"))
		if n, _ := strconv.Atoi(strings.TrimSpace(out)); n != 5 { // total, 0, 1, 2 and the directory
			t.Error(out)
		}
	})
	t.Run("the maker's environment reaches no command", func(t *testing.T) {
		if out, _ := output(t, c, sh("env")); strings.Contains(out, "SECRET") {
			t.Error(out)
		}
	})
	t.Run("signals from inside do not end the agent", func(t *testing.T) {
		p := sh("for s in HUP INT QUIT TERM USR1 USR2 PIPE ALRM KILL STOP TSTP; do kill -$s 1; done")
		p.User = "root"
		output(t, c, p)
		if _, err := c.Hello(ctx); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("commands start with default signals", func(t *testing.T) {
		out, _ := output(t, c, sh("grep -E 'Sig(Ign|Blk)' /proc/self/status"))
		if out != "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n" {
			t.Error(out)
		}
	})
	t.Run("limits hold from the first instruction", func(t *testing.T) {
		p := sh("ulimit -t; ulimit -v; ulimit -n; ulimit -Hn")
		p.Limits = agentapi.RunLimits{CPUSeconds: 7, MemoryBytes: 256 << 20, OpenFiles: 77}
		if out, _ := output(t, c, p); out != "7\n262144\n77\n77\n" {
			t.Error(out)
		}
	})
	t.Run("a limit of processor time is told", func(t *testing.T) {
		p := sh("while :; do :; done")
		p.Limits = agentapi.RunLimits{CPUSeconds: 1}
		if _, end := output(t, c, p); end.Outcome != agentapi.OutcomeKilled || end.Signal != "SIGXCPU" {
			t.Errorf("%+v", end)
		}
	})
	t.Run("files belong to the user who wrote them", func(t *testing.T) {
		e, err := c.Write(ctx, agentapi.WriteParams{Path: "/tmp/a/b/c.txt"}, strings.NewReader("x"))
		if err != nil || e.UID != 1000 || e.GID != 1000 {
			t.Fatalf("%+v, %v", e, err)
		}
		if _, err := c.Write(ctx, agentapi.WriteParams{Path: "/etc/cove-test"}, strings.NewReader("x")); err == nil {
			t.Error("the user writes into /etc")
		}
	})
	t.Run("what is made with root's rights for a user is the user's", func(t *testing.T) {
		for name, params := range map[string]agentapi.WriteParams{
			"in place": {Path: "/etc/cove-deep/er/f", Root: true, InPlace: true}, "by rename": {Path: "/etc/cove-deep/er/g", Root: true},
		} {
			if e, err := c.Write(ctx, params, strings.NewReader("x")); err != nil || e.UID != 1000 || e.GID != 1000 || e.Mode != 0o644 {
				t.Errorf("%s: %+v, %v", name, e, err)
			}
		}
		for _, dir := range []string{"/etc/cove-deep", "/etc/cove-deep/er"} {
			if e, err := c.Stat(ctx, agentapi.PathParams{Path: dir}); err != nil || e.UID != 1000 || e.Mode != 0o755 {
				t.Errorf("%+v, %v", e, err)
			}
		}
		if e, err := c.Mkdir(ctx, agentapi.MkdirParams{Path: "/etc/cove-dir", Root: true}); err != nil || e.UID != 1000 {
			t.Errorf("%+v, %v", e, err)
		}
		for _, p := range []string{"/etc/cove-deep", "/etc/cove-dir"} {
			if err := c.Remove(ctx, agentapi.RemoveParams{Path: p, Root: true, Recursive: true}); err != nil {
				t.Error(err)
			}
		}
	})
	t.Run("a write with root's rights gives nobody another's file", func(t *testing.T) {
		prepare := sh("mkdir /tmp/other && chmod 700 /tmp/other && cd /tmp/other && echo old > root && chmod 600 root && echo old > theirs && chown 1000 theirs && " +
			"mkdir -m 777 ../ours && ln -s /tmp/other/root ../ours/link && ln -s /tmp/other/new ../ours/dangling && ln -s made ../ours/near")
		prepare.User = "root"
		if out, end := output(t, c, prepare); end.ExitCode != 0 {
			t.Fatal(out, end)
		}
		for _, tc := range []struct {
			path, user string
			uid        int
			mode       uint32
		}{
			{"/tmp/ours/link", "", 0, 0o600}, {"/tmp/ours/dangling", "", 0, 0o644}, {"/tmp/ours/near", "", 1000, 0o644},
			{"/tmp/other/root", "", 0, 0o600}, {"/tmp/other/theirs", "", 1000, 0o644}, {"/tmp/other/fresh", "", 1000, 0o644},
			{"/tmp/other/theirs", "root", 0, 0o644},
		} {
			e, err := c.Write(ctx, agentapi.WriteParams{Path: tc.path, User: tc.user, Root: true, InPlace: true}, strings.NewReader("new"))
			if err != nil || e.UID != tc.uid || e.Mode != tc.mode || e.Size != 3 {
				t.Errorf("%s: %+v, %v", tc.path, e, err)
			}
		}
		relink := sh("rm -f /tmp/other/new /tmp/ours/made")
		relink.User = "root"
		output(t, c, relink)
		for path, uid := range map[string]int{"/tmp/ours/dangling": 0, "/tmp/ours/near": 1000, "/tmp/ours/link": 0} {
			e, err := c.Write(ctx, agentapi.WriteParams{Path: path, Root: true}, strings.NewReader("new"))
			if err != nil || e.UID != uid || e.Size != 3 {
				t.Errorf("by rename, %s: %+v, %v", path, e, err)
			}
		}
		if err := c.Remove(ctx, agentapi.RemoveParams{Path: "/tmp/other", Root: true, Recursive: true}); err != nil {
			t.Error(err)
		}
	})
	t.Run("a write in place is told in its order", func(t *testing.T) {
		if _, err := c.Mkdir(ctx, agentapi.MkdirParams{Path: "/tmp/order"}); err != nil {
			t.Fatal(err)
		}
		w, err := c.Watch(ctx, agentapi.WatchParams{Path: "/tmp/order"})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		for _, text := range []string{"first", "second"} {
			if _, err := c.Write(ctx, agentapi.WriteParams{Path: "/tmp/order/f", Root: true, InPlace: true}, strings.NewReader(text)); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Control(agentapi.Control{Sync: 1}); err != nil {
			t.Fatal(err)
		}
		var told []string
		for e, err := range w.Events() {
			if err != nil {
				t.Fatal(err)
			}
			if e.Type == agentapi.EventSynced {
				break
			}
			if e.File != nil {
				told = append(told, e.File.Op)
			}
		}
		// Emptying and writing are two writes, which the kernel may tell as one.
		if got := strings.Join(told, " "); !strings.HasPrefix(got+" ", "create chmod write chmod write ") || len(told) > 6 {
			t.Error(got)
		}
	})
	t.Run("what every process may see of another can be read as a file", func(t *testing.T) {
		for _, file := range []string{"/proc/mounts", "/proc/self/cmdline", "/proc/1/status"} {
			_, r, err := c.Read(ctx, agentapi.ReadParams{Path: file, Root: true})
			if err != nil {
				t.Error(err)
				continue
			}
			if data, err := io.ReadAll(r); err != nil || len(data) == 0 {
				t.Errorf("%s: %q, %v", file, data, err)
			}
			r.Close()
			if _, err := c.Write(ctx, agentapi.WriteParams{Path: file, Root: true, InPlace: true}, strings.NewReader("x")); err == nil {
				t.Errorf("%s was written", file)
			}
		}
	})
	t.Run("root's rights do not lead into the agent", func(t *testing.T) {
		for _, file := range []string{"/proc/1/environ", "/proc/self/environ", "/proc/1/root/etc/passwd", "/proc/self/fd/0", "/proc/self/stat", "/proc/1/task/1/cmdline"} {
			if _, r, err := c.Read(ctx, agentapi.ReadParams{Path: file, Root: true}); err == nil {
				r.Close()
				t.Errorf("%s was read", file)
			}
			if _, err := c.Write(ctx, agentapi.WriteParams{Path: file, Root: true, InPlace: true}, strings.NewReader("x")); err == nil {
				t.Errorf("%s was written", file)
			}
		}
	})
	t.Run("the user's files can be described, changed and watched", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
		defer cancel()
		e, err := c.Write(ctx, agentapi.WriteParams{Path: "/tmp/mine/f", Xattrs: map[string]string{"user.note": "x"}}, strings.NewReader("x"))
		if err != nil || e.Xattrs["user.note"] != "x" {
			t.Errorf("%+v, %v", e, err)
		}
		w, err := c.Watch(ctx, agentapi.WatchParams{Path: "/tmp/mine", Recursive: true})
		if err != nil {
			t.Fatal(err)
		}
		mode := uint32(0o600)
		if e, err := c.Chmod(ctx, agentapi.ChmodParams{Path: "/tmp/mine/f", Mode: &mode}); err != nil || e.Mode != mode {
			t.Errorf("%+v, %v", e, err)
		}
		for e, err := range w.Events() {
			if err != nil {
				t.Fatal(err)
			}
			if e.File != nil {
				if e.File.Op != "chmod" || e.File.Path != "/tmp/mine/f" {
					t.Errorf("%+v", e.File)
				}
				break
			}
		}
		if list, err := c.List(ctx, agentapi.ListParams{Path: "/tmp/mine"}); err != nil || len(list) != 1 || list[0].Mode != mode {
			t.Errorf("%+v, %v", list, err)
		}
		if _, err := c.Move(ctx, agentapi.MoveParams{From: "/tmp/mine/f", To: "/dev/shm/cove-moved"}); err != nil {
			t.Error(err)
		}
		if err := c.Remove(ctx, agentapi.RemoveParams{Path: "/dev/shm/cove-moved"}); err != nil {
			t.Error(err)
		}
		if _, err := c.Chmod(ctx, agentapi.ChmodParams{Path: "/tmp/mine", Owner: "root"}); !fault.Is(err, fault.Denied) {
			t.Errorf("a user gives files away: %v", err)
		}
		if e, err := c.Chmod(ctx, agentapi.ChmodParams{Path: "/tmp/mine", User: "root", Owner: "nobody", Group: "nogroup"}); err != nil || e.User != "nobody" || e.Group != "nogroup" {
			t.Errorf("%+v, %v", e, err)
		}
	})
	t.Run("every thread of the agent is itself again", func(t *testing.T) {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		for _, task := range tasks {
			raw, err := os.ReadFile(task)
			if err != nil {
				continue
			}
			for line := range strings.Lines(string(raw)) {
				if name, ids, _ := strings.Cut(line, ":"); (name == "Uid" || name == "Gid") && strings.Trim(ids, "0\t\n ") != "" {
					t.Errorf("%s: %s", task, line)
				}
			}
		}
	})
	t.Run("a terminal belongs to its user", func(t *testing.T) {
		p := sh("tty; stat -c %u $(tty); : </dev/tty && : >$(tty) && echo ok")
		p.PTY = &agentapi.PTYSize{}
		if out, _ := output(t, c, p); !strings.HasSuffix(out, "1000\r\nok\r\n") {
			t.Errorf("%q", out)
		}
	})
	t.Run("sudo makes the default user root", func(t *testing.T) {
		out, end := output(t, c, sh("sudo -n sh -c 'id -u; cat; echo $FOO; exit 7' </etc/hostname; echo $?"))
		host, _ := os.ReadFile("/etc/hostname")
		if want := "0\n" + string(host) + "\n7\n"; out != want || end.ExitCode != 0 {
			t.Errorf("%q, want %q", out, want)
		}
	})
	t.Run("sudo takes variables and users", func(t *testing.T) {
		out, _ := output(t, c, sh("FOO=lost sudo -u nobody FOO=kept sh -c 'id -un; echo $FOO'; FOO=all sudo -E sh -c 'echo $FOO; echo $HOME'"))
		if out != "nobody\nkept\nall\n/root\n" {
			t.Errorf("%q", out)
		}
	})
	t.Run("another user may not use sudo", func(t *testing.T) {
		p := sh("sudo id -u")
		p.User = "nobody"
		if out, end := output(t, c, p); end.ExitCode == 0 || !strings.Contains(out, "may not use sudo") {
			t.Errorf("%q %+v", out, end)
		}
	})
	t.Run("a command ends when its sudo does", func(t *testing.T) {
		out, _ := output(t, c, sh("sudo sleep 4242 & sleep 0.3; pgrep -xfc 'sleep 4242'; kill -9 $!; wait; sleep 0.3; pgrep -xfc 'sleep 4242'"))
		lines := strings.Fields(out)
		if len(lines) < 2 || lines[0] == "0" || lines[len(lines)-1] != "0" {
			t.Errorf("%q", out)
		}
	})
	t.Run("signals pass through sudo", func(t *testing.T) {
		out, _ := output(t, c, sh("sudo sh -c 'trap \"echo got; exit 9\" TERM; while :; do sleep 0.05; done' & sleep 0.3; kill -TERM $!; wait $!; echo $?"))
		if out != "got\n9\n" {
			t.Errorf("%q", out)
		}
	})
	t.Run("setsid is waited for", func(t *testing.T) {
		for _, line := range []string{"setsid sh -c 'sleep 0.3; echo late; exit 7'", "sudo setsid sh -c 'sleep 0.3; echo late; exit 7'"} {
			out, end := output(t, c, bash(line))
			if out != "late\n" || end.ExitCode != 7 {
				t.Errorf("%s: %q %+v", line, out, end)
			}
		}
	})
	t.Run("what a terminal sends passes through sudo to the whole group", func(t *testing.T) {
		s, err := c.Exec(ctx, bash(`exec sudo bash -c 'trap : WINCH; bash -c "trap \"echo got; exit\" WINCH; echo up; while :; do sleep 0.05; done"; echo end'`))
		if err != nil {
			t.Fatal(err)
		}
		var id, out string
		for e, err := range s.Events() {
			if err != nil {
				t.Fatal(err)
			}
			if e.ID != "" {
				id = e.ID
			}
			out += string(e.Data)
			if string(e.Data) == "up\n" {
				if err := c.Signal(ctx, agentapi.SignalParams{Target: agentapi.Target{ID: id}, Signal: "SIGWINCH"}); err != nil {
					t.Fatal(err)
				}
			}
		}
		if out != "up\ngot\nend\n" {
			t.Errorf("%q", out)
		}
	})
	t.Run("a timeout reaches through sudo", func(t *testing.T) {
		p := sh("sudo setsid -w sleep 4343")
		p.TimeoutMS = 300
		if _, end := output(t, c, p); end.Outcome != agentapi.OutcomeTimeout {
			t.Errorf("%+v", end)
		}
		if out, _ := output(t, c, sh("pgrep -xfc 'sleep 4343'")); strings.TrimSpace(out) != "0" {
			t.Error(out)
		}
	})
	t.Run("an idle agent is small", func(t *testing.T) {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			t.Fatal(err)
		}
		private := anonymous(string(raw))
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
		t.Logf("%d KiB of its own after the tests above, %d threads", private, len(threads))
		if private > 8<<10 {
			t.Errorf("%d KiB of its own", private)
		}
	})
}

func TestIdleMemory(t *testing.T) {
	c, pid := bootPID1(t, agentapi.Boot{ID: "sb1", User: "1000"})
	if _, err := c.Hello(t.Context()); err != nil {
		t.Fatal(err)
	}
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	n := anonymous(string(raw))
	t.Logf("a fresh agent has %d KiB of its own and %d threads", n, len(threads))
	if n > 3<<10 {
		t.Errorf("a fresh agent has %d KiB of its own", n)
	}
}

// anonymous is the memory that a process shares with no other; the program's own pages are in the page cache once.
func anonymous(rollup string) (kib int) {
	for line := range strings.Lines(rollup) {
		if strings.HasPrefix(line, "Anonymous:") {
			kib, _ = strconv.Atoi(strings.Fields(line)[1])
		}
	}
	return kib
}

// Without it the agent is the one to go where a sandbox has many small processes, and the sandbox with it.
func TestCommandsGoBeforeTheAgentWhenMemoryRunsOut(t *testing.T) {
	c, _ := bootPID1(t, agentapi.Boot{ID: "a", User: "1000", Workdir: "/tmp"})
	out, end := output(t, c, sh(`read own < /proc/$$/oom_score_adj
		for i in $(seq 10000); do # the agent goes back to its own a moment after the fork
			read agent < /proc/1/oom_score_adj
			[ $own = $agent ] || break
		done
		echo $((own - agent))`))
	if strings.TrimSpace(out) != "500" {
		t.Errorf("a command is %q sooner than the agent (%+v)", out, end)
	}
}
