package pod_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/kubernetes/pod"
	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/internal/fault"
)

const uid = 54321 // nobody of this host

// programVariable has the test's own binary become a container and execute what it names.
const programVariable = "COVE_POD_TEST"

func TestMain(m *testing.M) {
	if os.Getenv(programVariable) != "" {
		fmt.Fprintln(os.Stderr, becomeContainer())
		os.Exit(1)
	}
	status := m.Run()
	os.RemoveAll(filepath.Dir(built.path))
	os.Exit(status)
}

var built struct {
	sync.Once
	path string
	err  error
}

// program builds the real one once.
func program(t *testing.T) string {
	t.Helper()
	built.Do(func() {
		dir, err := os.MkdirTemp("", "cove-pod-build-")
		if err != nil {
			built.err = err
			return
		}
		built.path = filepath.Join(dir, "cove-pod")
		cmd := exec.Command("go", "build", "-o", built.path, "github.com/covehq/cove/cmd/cove-pod")
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

// becomeContainer does what a runtime does before it executes the program, as far as the program can notice.
func becomeContainer() error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := syscall.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return err
	}
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(uid), syscall.Setuid(uid)); err != nil {
		return err
	}
	env := []string{podapi.Variable + "=" + os.Getenv(podapi.Variable), "SECRET=of-the-runtime"}
	return syscall.Exec(os.Getenv(programVariable), []string{"cove-pod", "serve"}, env)
}

// subject is a running program and a server that may command it.
type subject struct {
	*podapi.Client
	pod    *podapi.Pod
	cmd    *exec.Cmd
	stderr *bytes.Buffer
	wait   func() error  // until it has exited
	exited chan struct{} // closed then
	dir    string
}

func authority(t *testing.T) *podapi.Authority {
	t.Helper()
	a, err := podapi.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// skip says why in the name of a test, which is all that a summary shows.
func skip(t *testing.T, why string) {
	t.Helper()
	t.Run("skipped: "+why, func(t *testing.T) { t.Skip(why) })
	t.SkipNow()
}

func python(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"/usr/bin/python3", "/usr/local/bin/python3"} {
		if _, err := os.Stat(name); err == nil {
			return name
		}
	}
	skip(t, "no python3 here")
	return ""
}

// start runs the program as PID 1 and returns when it listens.
func start(t *testing.T, settings podapi.Settings) *subject {
	t.Helper()
	if os.Getuid() != 0 {
		skip(t, "namespaces need root here")
	}
	a := authority(t)
	dir, err := os.MkdirTemp("", "cove-pod-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(program(t), "install", dir).CombinedOutput(); err != nil {
		t.Fatalf("install: %v: %s", err, out)
	}
	if err := errors.Join(os.Mkdir(dir+"/home", 0o755), os.Chown(dir+"/home", uid, uid)); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	settings.Name, settings.Token, settings.Authority, settings.Address = "pod-1", a.Token("pod-1"), a.Certificate, address
	settings.Dir, settings.Home = dir, dir+"/home"
	text, err := podapi.EncodeSettings(settings)
	if err != nil {
		t.Fatal(err)
	}
	s := &subject{
		Client: podapi.NewClient(a, "test"), pod: &podapi.Pod{Name: "pod-1", Address: address}, stderr: &bytes.Buffer{}, dir: dir,
	}
	s.cmd = exec.Command("/proc/self/exe")
	s.cmd.Env = []string{programVariable + "=" + dir + "/cove-pod", podapi.Variable + "=" + text}
	s.cmd.Stderr = s.stderr
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		skip(t, fmt.Sprintf("no namespaces here: %v", err))
	}
	s.wait = sync.OnceValue(s.cmd.Wait)
	s.exited = make(chan struct{})
	go func() { defer close(s.exited); s.wait() }()
	t.Cleanup(func() {
		s.cmd.Process.Kill()
		s.wait()
		if t.Failed() {
			t.Logf("the program said: %s", s.stderr)
		}
	})
	s.awaitListening(t)
	return s
}

func (s *subject) awaitListening(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	for {
		err := s.Do(ctx, s.pod, podapi.Order{Op: podapi.OpStatus}, nil)
		if err == nil {
			return
		}
		if ctx.Err() != nil || !errors.Is(err, podapi.ErrRefused) {
			t.Fatalf("it does not listen: %v; %s", err, s.stderr)
		}
		select {
		case <-s.exited:
			t.Fatalf("it ended: %s", s.stderr)
		case <-time.After(5 * time.Millisecond): // nothing tells
		}
	}
}

func (s *subject) boot(t *testing.T, b agentapi.Boot, left time.Duration) podapi.Booted {
	t.Helper()
	var booted podapi.Booted
	if err := s.Do(t.Context(), s.pod, podapi.Order{Op: podapi.OpBoot, Boot: &b, Left: left}, &booted); err != nil {
		t.Fatal(err)
	}
	return booted
}

func (s *subject) agent() *agentapi.Client {
	return agentapi.NewClient(func(ctx context.Context) (net.Conn, error) { return s.Agent(ctx, s.pod) })
}

// told is what a run said, and how it ended.
func told(t *testing.T, stream *agentapi.Stream, err error) (string, agentapi.End) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for e, err := range stream.Events() {
		if err != nil {
			t.Fatal(err)
		}
		out.Write(e.Data)
		if e.Result != nil {
			out.WriteString(strings.Trim(string(e.Result.Data["text/plain"]), `"`))
		}
		if e.Error != nil {
			out.WriteString(e.Error.Name + ": " + e.Error.Value)
		}
		if e.End != nil {
			return out.String(), *e.End
		}
	}
	t.Fatal("a stream without an end")
	return "", agentapi.End{}
}

func (s *subject) sh(t *testing.T, script string) string {
	t.Helper()
	stream, err := s.agent().Exec(t.Context(), agentapi.ExecParams{Argv: []string{"sh", "-c", script}})
	out, _ := told(t, stream, err)
	return out
}

func (s *subject) cell(t *testing.T, code string) string {
	t.Helper()
	stream, err := s.agent().Run(t.Context(), agentapi.RunParams{Code: code})
	out, _ := told(t, stream, err)
	return out
}

func TestAPodBecomesASandbox(t *testing.T) {
	s := start(t, podapi.Settings{Python: python(t), Preload: []string{"decimal"}})
	t.Run("no operation is answered before", func(t *testing.T) {
		_, err := s.agent().Hello(t.Context())
		if !fault.Is(err, fault.Conflict) {
			t.Errorf("%v", err)
		}
	})
	booted := s.boot(t, agentapi.Boot{ID: "sb-1", User: "user", Env: map[string]string{"GREETING": "hello"}}, 0)
	if !booted.Kernel || !booted.Warm {
		t.Fatalf("%+v", booted)
	}
	t.Run("commands have its environment and its one user", func(t *testing.T) {
		want := fmt.Sprintf("hello user %d %s/home 1\n", uid, s.dir)
		if got := s.sh(t, `echo $GREETING $USER $(id -u) $HOME $(ps -o ppid= -p $$ | tr -d " ")`); got != want {
			t.Errorf("%q, not %q", got, want)
		}
	})
	t.Run("its kernel has too, and what the template preloads", func(t *testing.T) {
		code := "import os, sys\n(os.environ['GREETING'], 'SECRET' in os.environ, 'decimal' in sys.modules, os.getuid(), os.getcwd())"
		want := fmt.Sprintf("('hello', False, True, %d, '%s/home')", uid, s.dir)
		if got := s.cell(t, code); got != want {
			t.Errorf("%q, not %q", got, want)
		}
	})
	t.Run("a second kernel is forked too and knows nothing of the first", func(t *testing.T) {
		s.cell(t, "mine = 1")
		if err := s.Do(t.Context(), s.pod, podapi.Order{Op: podapi.OpKernel, Kernel: "other"}, nil); err != nil {
			t.Fatal(err)
		}
		k, err := s.agent().KernelWait(t.Context(), agentapi.KernelParams{Kernel: "other"})
		if err != nil || !k.Warm || k.State != agentapi.KernelIdle {
			t.Fatalf("%+v, %v", k, err)
		}
		stream, err := s.agent().Run(t.Context(), agentapi.RunParams{Kernel: "other", Code: "'mine' in globals()"})
		if got, _ := told(t, stream, err); got != "False" {
			t.Error(got)
		}
	})
	t.Run("the same boot again is answered as the first was, another is refused", func(t *testing.T) {
		if again := s.boot(t, agentapi.Boot{ID: "sb-1"}, 0); again != booted {
			t.Errorf("%+v", again)
		}
		err := s.Do(t.Context(), s.pod, podapi.Order{Op: podapi.OpBoot, Boot: &agentapi.Boot{ID: "sb-2"}}, nil)
		if !fault.Is(err, fault.Conflict) {
			t.Errorf("%v", err)
		}
	})
	t.Run("its code cannot look into PID 1", func(t *testing.T) {
		out := s.sh(t, "cat /proc/1/environ /proc/1/maps /proc/1/mem 2>&1; ls /proc/1/fd 2>&1; true")
		if strings.Contains(out, "COVE") || strings.Contains(out, "r-xp") || strings.Count(out, "ermission denied") != 4 {
			t.Error(out)
		}
	})
	t.Run("its code cannot end PID 1", func(t *testing.T) {
		s.sh(t, "for s in TERM INT HUP QUIT SEGV USR1 KILL STOP; do kill -$s 1; done 2>/dev/null; true")
		if got := s.sh(t, "echo here"); got != "here\n" {
			t.Error(got)
		}
	})
	t.Run("what runs in it is ended before PID 1 when memory runs out", func(t *testing.T) {
		// PID 1 has theirs for as long as a fork takes.
		command := strings.Fields(s.sh(t, `i=0
			while [ $i -lt 1000 ] && [ "$(cat /proc/1/oom_score_adj)" = "$(cat /proc/self/oom_score_adj)" ]; do i=$((i+1)); done
			cat /proc/1/oom_score_adj /proc/self/oom_score_adj`))
		kernel := s.cell(t, "open('/proc/self/oom_score_adj').read().strip()")
		if len(command) != 2 || command[0] == command[1] || strings.Trim(kernel, "'") != command[1] {
			t.Errorf("PID 1 and a command %v, the kernel %s", command, kernel)
		}
	})
	t.Run("orphans are collected", func(t *testing.T) {
		s.sh(t, "(setsid sh -c 'exit 3' &) ; true")
		deadline := time.Now().Add(2 * time.Minute)
		for strings.Contains(s.sh(t, "ps -eo stat="), "Z") {
			if time.Now().After(deadline) {
				t.Fatal("a zombie stays")
			}
		}
	})
	t.Run("limits of a run hold", func(t *testing.T) {
		stream, err := s.agent().Exec(t.Context(), agentapi.ExecParams{Argv: []string{"sh", "-c", "ulimit -n"}, Limits: agentapi.RunLimits{OpenFiles: 99}})
		if out, _ := told(t, stream, err); out != "99\n" {
			t.Error(out)
		}
	})
	t.Run("when the zygote is gone kernels are started by exec", func(t *testing.T) {
		s.sh(t, "pkill -KILL -f zygote.py")
		deadline := time.Now().Add(2 * time.Minute)
		for {
			err := s.Do(t.Context(), s.pod, podapi.Order{Op: podapi.OpKernel, Kernel: "third"}, nil)
			if fault.Is(err, fault.Unsupported) {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("%v", err)
			}
		}
		if _, err := s.agent().KernelStart(t.Context(), agentapi.KernelStartParams{Kernel: "third"}); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("usage is told", func(t *testing.T) {
		var u podapi.Usage
		if err := s.Do(t.Context(), s.pod, podapi.Order{Op: podapi.OpUsage}, &u); err != nil {
			t.Error(err)
		}
	})
}

func TestAnEndHasItsExitStatus(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(t *testing.T, s *subject)
		want int
	}{
		"a deadline of the boot": {func(t *testing.T, s *subject) { s.boot(t, agentapi.Boot{ID: "a"}, 300*time.Millisecond) }, podapi.ExitExpired},
		"a deadline that was moved": {func(t *testing.T, s *subject) {
			s.boot(t, agentapi.Boot{ID: "a"}, time.Hour)
			if err := s.Do(t.Context(), s.pod, podapi.Order{Op: podapi.OpDeadline, Left: 10 * time.Millisecond}, nil); err != nil {
				t.Error(err)
			}
		}, podapi.ExitExpired},
		"an order": {func(t *testing.T, s *subject) {
			s.boot(t, agentapi.Boot{ID: "a"}, 0)
			if err := s.Do(t.Context(), s.pod, podapi.Order{Op: podapi.OpEnd}, nil); err == nil {
				t.Error("it answered")
			}
		}, podapi.ExitEnded},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, podapi.Settings{})
			c.end(t, s)
			s.wait()
			if got := s.cmd.ProcessState.ExitCode(); got != c.want {
				t.Errorf("exit status %d: %s", got, s.stderr)
			}
		})
	}
}

func TestAPodThatCannotBecomeWarmSaysWhy(t *testing.T) {
	var stderr bytes.Buffer
	a := authority(t)
	text, err := podapi.EncodeSettings(podapi.Settings{Token: a.Token("x"), Authority: a.Certificate, Python: "/no/such/python", Preload: []string{"json"}})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program(t), "serve")
	cmd.Env, cmd.Stderr = []string{podapi.Variable + "=" + text}, &stderr
	err = cmd.Run()
	if cmd.ProcessState.ExitCode() != podapi.ExitFailed || !strings.Contains(stderr.String(), "/no/such/python") {
		t.Errorf("%v: %s", err, &stderr)
	}
}

func TestInstallLeavesWholeFilesOnly(t *testing.T) {
	dir := t.TempDir()
	for range 2 { // an init container may run twice
		if err := pod.Install(dir); err != nil {
			t.Fatal(err)
		}
	}
	names, err := filepath.Glob(dir + "/*")
	if err != nil || len(names) != 3 {
		t.Errorf("%v, %v", names, err)
	}
	for _, name := range []string{"cove-pod", "bin/sudo", "kernel/kernel.py", "kernel/zygote.py"} {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
}
