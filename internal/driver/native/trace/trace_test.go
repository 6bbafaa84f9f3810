package trace_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/trace"
)

// parked is a program that waits like an anchor. What it keeps in a register is where its call is, so that a test can
// change its code.
const parked = `
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>
int main(int argc, char **argv)
{
	while (argc > 1)
		; // never waits
	for (;;) {
#if defined(__x86_64__)
		long ret;
		register long r10 __asm__("r10") = 0, r8 __asm__("r8") = 0;
		__asm__ volatile("lea 1f(%%rip), %%rbx\n1: syscall" : "=a"(ret) : "a"(SYS_ppoll), "D"(0), "S"(0), "d"(0), "r"(r10), "r"(r8) : "rbx", "rcx", "r11", "memory");
#else
		register long x8 __asm__("x8") = SYS_ppoll, x0 __asm__("x0") = 0, x1 __asm__("x1") = 0, x2 __asm__("x2") = 0, x3 __asm__("x3") = 0, x4 __asm__("x4") = 0;
		__asm__ volatile("adr x19, 1f\n1: svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "x19", "memory");
#endif
	}
}
`

var program = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "cove-trace")
	if err != nil {
		return "", err
	}
	source := filepath.Join(dir, "parked.c")
	if err := os.WriteFile(source, []byte(parked), 0o600); err != nil {
		return "", err
	}
	out, err := exec.Command("cc", "-O1", "-o", filepath.Join(dir, "parked"), source).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return filepath.Join(dir, "parked"), nil
})

func TestMain(m *testing.M) {
	status := m.Run()
	if path, err := program(); err == nil {
		os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(status)
}

func tracer(t *testing.T) *trace.Tracer {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root may stop processes everywhere")
	}
	tr := trace.New()
	t.Cleanup(tr.Close)
	return tr
}

// restartable tells glibc whether to register restartable sequences.
var restartable = "0"

// TestSeizeRefusesWhoCanBeSentElsewhere has a process with a restartable sequence: the host would send it where its memory
// says.
func TestSeizeRefusesWhoCanBeSentElsewhere(t *testing.T) {
	tr := tracer(t)
	restartable = "1"
	defer func() { restartable = "0" }()
	if p, err := tr.Seize(begin(t)); !errors.Is(err, trace.ErrStrayed) {
		t.Errorf("got %v", err)
		if p != nil {
			p.Kill()
		}
	}
}

// begin starts the program.
func begin(t *testing.T, args ...string) (pid int, pidfd *os.File) {
	t.Helper()
	path, err := program()
	if err != nil {
		t.Fatal(err)
	}
	fd := -1
	cmd := exec.Command(path, args...)
	cmd.Env = []string{"GLIBC_TUNABLES=glibc.pthread.rseq=" + restartable}
	cmd.SysProcAttr = &unix.SysProcAttr{PidFD: &fd}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid = cmd.Process.Pid
	if err := cmd.Process.Release(); err != nil { // whoever stops it waits for it
		t.Fatal(err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		t.Fatal(err)
	}
	return pid, os.NewFile(uintptr(fd), "pidfd")
}

func seize(t *testing.T, tr *trace.Tracer) *trace.Process {
	t.Helper()
	p, err := tr.Seize(begin(t))
	if err != nil {
		t.Fatal(err)
	}
	number(p)
	t.Cleanup(func() {
		p.Kill()
		gone(t, p)
	})
	return p
}

// numbers of processes, which are asked for once: who has ended has none.
var numbers sync.Map

func number(p *trace.Process) int {
	if n, ok := numbers.Load(p); ok {
		return n.(int)
	}
	n := 0
	_ = p.Hold(func(pid int) error {
		n = pid
		return nil
	})
	numbers.Store(p, n)
	return n
}

// gone waits until it has ended, and looks that nothing of it is left.
func gone(t *testing.T, p *trace.Process) {
	t.Helper()
	select {
	case <-p.Gone():
	case <-time.After(2 * time.Minute):
		t.Fatal("it does not end")
	}
	if state, held := state(number(p)); held {
		t.Errorf("process %d is still there: %s", number(p), state)
	}
}

// state of a process of ours, by its number: another that has the number by now has another name.
func state(pid int) (letter string, there bool) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil || !strings.Contains(string(text), " (parked) ") {
		return "", false
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	return rest[:1], true
}

func isStopped(t *testing.T, p *trace.Process) {
	t.Helper()
	if letter, _ := state(number(p)); letter != "t" {
		t.Errorf("process %d is in state %q", number(p), letter)
	}
}

func TestCall(t *testing.T) {
	p := seize(t, tracer(t))
	isStopped(t, p)
	for range 3 {
		got, err := p.Call(unix.SYS_GETPID)
		if err != nil || int(got) != number(p) {
			t.Errorf("getpid: %d %v, want %d", got, err, number(p))
		}
		isStopped(t, p)
	}
	if _, err := p.Call(unix.SYS_CLOSE, 999); !errors.Is(err, unix.EBADF) {
		t.Errorf("close of what is not open: %v", err)
	}
	// All six arguments arrive.
	at, err := p.Call(unix.SYS_MMAP, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uintptr(0), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Write(uint64(at), []byte("/dev/zero\x00")); err != nil {
		t.Fatal(err)
	}
	fd, err := p.Call(unix.SYS_OPENAT, 0, uintptr(at), unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	f, err := p.Descriptor(int(fd))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd())); err != nil || name != "/dev/zero" {
		t.Errorf("the descriptor is of %q %v", name, err)
	}
	if _, err := p.Descriptor(999); err == nil {
		t.Error("a descriptor that is not open was taken")
	}
	if err := p.Write(0x1000, []byte("x")); err == nil {
		t.Error("what is not mapped was written")
	}
}

func TestFork(t *testing.T) {
	p := seize(t, tracer(t))
	at, err := p.Call(unix.SYS_MMAP, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uintptr(0), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Write(uint64(at), []byte("common")); err != nil {
		t.Fatal(err)
	}
	copied, err := p.Fork()
	if err != nil {
		t.Fatal(err)
	}
	defer copied.Kill()
	again, err := copied.Fork()
	if err != nil {
		t.Fatal(err)
	}
	for who, c := range map[string]*trace.Process{"copy": copied, "copy of a copy": again} {
		isStopped(t, c)
		if got, err := c.Call(unix.SYS_GETPPID); err != nil || int(got) != os.Getpid() {
			t.Errorf("%s: its parent is %d %v, not that of the process %d", who, got, err, os.Getpid())
		}
		if got := memory(t, c, uint64(at), 6); got != "common" {
			t.Errorf("%s: it has %q", who, got)
		}
		if c.Resume() != p.Resume() {
			t.Errorf("%s: resumes at %x, not at %x", who, c.Resume(), p.Resume())
		}
	}
	if err := copied.Write(uint64(at), []byte("mine!!")); err != nil {
		t.Fatal(err)
	}
	if a, b := memory(t, p, uint64(at), 6), memory(t, again, uint64(at), 6); a != "common" || b != "common" {
		t.Errorf("what a copy wrote is elsewhere too: %q %q", a, b)
	}
	// Nobody needs the one that it was made from.
	p.Kill()
	gone(t, p)
	if got, err := copied.Call(unix.SYS_GETPID); err != nil || int(got) != number(copied) {
		t.Errorf("%d %v", got, err)
	}
	for _, c := range []*trace.Process{copied, again} {
		c.Kill()
		gone(t, c)
	}
	if _, err := copied.Fork(); !errors.Is(err, trace.ErrEnded) {
		t.Errorf("fork of what has ended: %v", err)
	}
}

func memory(t *testing.T, p *trace.Process, at uint64, n int) string {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/mem", number(p)))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, n)
	if _, err := f.ReadAt(b, int64(at)); err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Machine code, for both kinds.
var (
	trapArgument = code("\x48\x89\xf8\xcc\x90\xcc", 0xd4200000, 0xd503201f, 0xd4200000)  // trap with the argument; trap again
	forever      = code("\xeb\xfe", 0x14000000)                                          // jump here
	nothing      = code("\x90\x90", 0xd503201f)                                          // no operation
	undefined    = code("\x0f\x0b", 0x00000000)                                          // an illegal instruction
	otherCall    = code("\xb8\x6e\x00\x00\x00\x0f\x05", 0xd2800000|173<<5|8, 0xd4000001) // getppid, whatever was ordered
	otherArg     = code("\x48\xff\xc7\x0f\x05", 0x91000400, 0xd4000001)                  // adds one to the first argument
	exits        = code("\xb8\xe7\x00\x00\x00\x0f\x05", 0xd2800000|94<<5|8, 0xd4000001)  // exit_group
	forks        = code("\xb8\x39\x00\x00\x00\x0f\x05", 0xd2800000|220<<5|8, 0xd4000001) // fork; on arm64 clone
	loops        = code("\xeb\xfe", 0x14000000)                                          // a jump to itself
	trapsItself  = code("\xcc\xcc", 0xd4200000)                                          // a trap instead of the call
	writesStack  = code("\x48\x31\xe4\x50\x0f\x05", 0x910003e9, 0xf900013f, 0x00000000)  // a push onto no stack; arm64: an illegal instruction
	thirtyTwoBit = []byte("\xcd\x80")                                                    // amd64: a call by the numbers of another architecture
)

func code(amd64 string, arm64 ...uint32) []byte {
	if runtime.GOARCH == "amd64" {
		return []byte(amd64)
	}
	var b []byte
	for _, word := range arm64 {
		b = binary.LittleEndian.AppendUint32(b, word)
	}
	return b
}

// room maps memory with code into a process.
func room(t *testing.T, p *trace.Process, text []byte) uint64 {
	t.Helper()
	at, err := p.Call(unix.SYS_MMAP, 0, 8192, unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uintptr(0), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Write(uint64(at), text); err != nil {
		t.Fatal(err)
	}
	return uint64(at)
}

func TestRun(t *testing.T) {
	p := seize(t, tracer(t))
	at := room(t, p, trapArgument)
	for _, arg := range []uint64{0, 42, 1 << 40} {
		got, err := p.Run(at, at+8192, arg)
		if err != nil || uint64(got) != arg {
			t.Errorf("%d %v, want %d", got, err, arg)
		}
		if err := p.Continue(); err != nil {
			t.Errorf("to the next trap: %v", err)
		}
		isStopped(t, p)
		// A process that ran is parked again for the next call, and for the next fork.
		if got, err := p.Call(unix.SYS_GETPID); err != nil || int(got) != number(p) {
			t.Errorf("%d %v", got, err)
		}
	}
	copied, err := p.Fork()
	if err != nil {
		t.Fatal(err)
	}
	copied.Kill()
	gone(t, copied)

	bad := room(t, p, undefined)
	if _, err := p.Run(bad, bad+8192, 0); !errors.Is(err, trace.ErrStrayed) {
		t.Errorf("code that fails: %v", err)
	}
	gone(t, p)
}

// TestStray has the memory of a process changed after it was stopped: whatever it does then, it is not what was ordered,
// and not done.
func TestStray(t *testing.T) {
	page := bytes.Repeat([]byte{0}, 1<<12)
	for claim, text := range map[string][]byte{
		"another call": otherCall, "another argument": otherArg, "its end": exits, "a fork": forks, "a trap": trapsItself, "an illegal instruction": undefined,
		"no stack": writesStack, "zeros": page[:64],
	} {
		t.Run(claim, func(t *testing.T) {
			p := seize(t, tracer(t))
			change(t, p, text)
			if got, err := p.Call(unix.SYS_CLOSE, 998); !errors.Is(err, trace.ErrStrayed) {
				t.Errorf("it answers %d %v", got, err)
			}
			gone(t, p)
			for what, err := range afterwards(p) {
				if !errors.Is(err, trace.ErrEnded) {
					t.Errorf("%s afterwards: %v", what, err)
				}
			}
		})
	}
	t.Run("no operation is none: the call behind it is what was ordered", func(t *testing.T) {
		p := seize(t, tracer(t))
		change(t, p, append(bytes.Clone(nothing), code("\x0f\x05", 0xd4000001)...))
		if got, err := p.Call(unix.SYS_GETPID); err != nil || int(got) != number(p) {
			t.Errorf("%d %v", got, err)
		}
	})
	t.Run("its memory is gone", func(t *testing.T) {
		p := seize(t, tracer(t))
		if _, err := p.Call(unix.SYS_MUNMAP, uintptr(p.Resume())&^4095, 4096); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Fork(); !errors.Is(err, trace.ErrStrayed) {
			t.Errorf("got %v", err)
		}
		gone(t, p)
	})
	t.Run("a call by another architecture's numbers", func(t *testing.T) {
		if runtime.GOARCH != "amd64" {
			t.Skip("there is none")
		}
		p := seize(t, tracer(t))
		change(t, p, thirtyTwoBit)
		if got, err := p.Call(unix.SYS_GETPID); !errors.Is(err, trace.ErrStrayed) {
			t.Errorf("it answers %d %v", got, err)
		}
		gone(t, p)
	})
}

func TestCall_TakesTooLong(t *testing.T) {
	tr := tracer(t)
	p := seize(t, tr)
	tr.SetHurry(50 * time.Millisecond)
	change(t, p, loops)
	if _, err := p.Call(unix.SYS_GETPID); !errors.Is(err, trace.ErrLate) {
		t.Errorf("got %v, want trace.ErrLate", err)
	}
	gone(t, p)
	if _, err := p.Fork(); !errors.Is(err, trace.ErrLate) {
		t.Errorf("afterwards: %v, want trace.ErrLate", err)
	}
}

// change puts code where the process makes its calls.
func change(t *testing.T, p *trace.Process, text []byte) {
	t.Helper()
	if err := p.Write(p.Resume(), text); err != nil {
		t.Fatal(err)
	}
}

// afterwards does everything there is with a process.
func afterwards(p *trace.Process) map[string]error {
	_, call := p.Call(unix.SYS_GETPID)
	_, fork := p.Fork()
	_, run := p.Run(p.Resume(), p.Resume(), 0)
	return map[string]error{"call": call, "fork": fork, "run": run, "continue": p.Continue(), "write": p.Write(p.Resume(), []byte{0})}
}

func TestKill(t *testing.T) {
	t.Run("more than once, and everything afterwards says so", func(t *testing.T) {
		p := seize(t, tracer(t))
		p.Kill()
		p.Kill()
		gone(t, p)
		p.Kill()
		for what, err := range afterwards(p) {
			if !errors.Is(err, trace.ErrEnded) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if f, err := p.Descriptor(0); err == nil {
			f.Close()
			t.Error("a descriptor of what has ended was taken")
		}
	})
	t.Run("while it runs", func(t *testing.T) {
		p := seize(t, tracer(t))
		at := room(t, p, forever)
		done := make(chan error, 1)
		go func() {
			_, err := p.Run(at, at+8192, 0)
			done <- err
		}()
		awaitState(t, p, "R")
		p.Kill()
		if err := <-done; !errors.Is(err, trace.ErrEnded) {
			t.Errorf("got %v", err)
		}
		gone(t, p)
	})
	t.Run("by somebody else", func(t *testing.T) {
		p := seize(t, tracer(t))
		if err := unix.Kill(number(p), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		gone(t, p)
		if _, err := p.Fork(); !errors.Is(err, trace.ErrEnded) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("at any moment", func(t *testing.T) {
		tr := tracer(t)
		for i := range 60 {
			p := seize(t, tr)
			go func() {
				time.Sleep(time.Duration(i*15) * time.Microsecond)
				p.Kill()
			}()
			for {
				c, err := p.Fork()
				if err == nil {
					number(c)
					c.Kill()
					gone(t, c)
					continue
				}
				if !errors.Is(err, trace.ErrEnded) {
					t.Errorf("round %d: %v", i, err)
				}
				break
			}
			gone(t, p)
		}
		nobodyLeft(t)
	})
}

// nobodyLeft looks for copies that nobody was told of: they would be held for ever.
func nobodyLeft(t *testing.T) {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range procs {
		text, err := os.ReadFile(name)
		if err == nil && strings.Contains(string(text), "Name:\tparked\n") && strings.Contains(string(text), fmt.Sprintf("PPid:\t%d\n", os.Getpid())) {
			t.Errorf("left: %s", strings.Split(string(text), "\n")[2])
		}
	}
}

func awaitState(t *testing.T, p *trace.Process, want string) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		letter, _ := state(number(p))
		if letter == want {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("it is in state %q, not %s", letter, want)
		}
	}
}

func TestSignalsDoNotWakeIt(t *testing.T) {
	p := seize(t, tracer(t))
	for _, sig := range []unix.Signal{unix.SIGCONT, unix.SIGSTOP, unix.SIGUSR1, unix.SIGTRAP, unix.SIGTERM} {
		_ = unix.Kill(number(p), sig)
	}
	time.Sleep(20 * time.Millisecond) // nothing is to happen: a moment is all that can be done
	isStopped(t, p)
}

func TestSeizeRefuses(t *testing.T) {
	tr := tracer(t)
	t.Run("a process that does not wait", func(t *testing.T) {
		pid, pidfd := begin(t, "busy")
		if _, err := tr.Seize(pid, pidfd); !errors.Is(err, trace.ErrStrayed) && !errors.Is(err, trace.ErrEnded) {
			t.Errorf("got %v", err)
		}
		for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
			if _, there := state(pid); !there {
				break
			}
			if time.Now().After(deadline) {
				t.Fatal("it is still there")
			}
		}
	})
	t.Run("a process that has ended", func(t *testing.T) {
		pid, pidfd := begin(t)
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Wait4(pid, nil, 0, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := tr.Seize(pid, pidfd); !errors.Is(err, trace.ErrEnded) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("a process that is held already", func(t *testing.T) {
		p := seize(t, tr)
		fd, err := unix.PidfdOpen(number(p), unix.PIDFD_NONBLOCK)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tr.Seize(number(p), os.NewFile(uintptr(fd), "pidfd")); err == nil {
			t.Error("it was held once more")
		}
	})
}

func TestCloseEndsEverybody(t *testing.T) {
	tracer(t) // for the skip alone
	tr := trace.New()
	var all []*trace.Process
	for range 5 {
		p, err := tr.Seize(begin(t))
		if err != nil {
			t.Fatal(err)
		}
		c, err := p.Fork()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p, c)
		number(p)
		number(c)
	}
	tr.Close()
	for _, p := range all {
		gone(t, p)
	}
	if _, err := all[0].Call(unix.SYS_GETPID); !errors.Is(err, trace.ErrEnded) {
		t.Errorf("got %v", err)
	}
	pid, pidfd := begin(t)
	if _, err := tr.Seize(pid, pidfd); !errors.Is(err, trace.ErrEnded) {
		t.Errorf("got %v", err)
	}
	_ = unix.Kill(pid, unix.SIGKILL)
	_, _ = unix.Wait4(pid, nil, 0, nil)
}

// TestCloseWhileSomebodyWaits has the tracer end while a process that is somebody else's child makes a call: whoever waits
// for the call hears of it. The host would not wake him up when the thread that held the process ends.
func TestCloseWhileSomebodyWaits(t *testing.T) {
	tracer(t) // for the skip alone
	tr := trace.New()
	p, err := tr.Seize(beginBelow(t))
	if err != nil {
		t.Fatal(err)
	}
	number(p)
	change(t, p, forever)
	over := make(chan error, 1)
	go func() {
		_, err := p.Call(unix.SYS_GETPID)
		over <- err
	}()
	awaitState(t, p, "R")
	tr.Close()
	select {
	case err := <-over:
		if !errors.Is(err, trace.ErrEnded) {
			t.Errorf("got %v", err)
		}
	case <-time.After(2 * time.Minute):
		t.Error("it waits for a process that has ended")
	}
	select {
	case <-p.Gone():
	case <-time.After(2 * time.Minute):
		t.Fatal("it does not end")
	}
}

// beginBelow starts the program as the child of another one, which lives until the test is over.
func beginBelow(t *testing.T) (pid int, pidfd *os.File) {
	t.Helper()
	path, err := program()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", `"$0" & echo $!; exec sleep 60`, path)
	cmd.Env = append(os.Environ(), "GLIBC_TUNABLES=glibc.pthread.rseq=0")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if _, err := fmt.Fscan(out, &pid); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		if _, there := state(pid); there { // it has its own name: sh is gone
			return pid, os.NewFile(uintptr(fd), "pidfd")
		}
		if time.Now().After(deadline) {
			t.Fatal("it does not begin")
		}
	}
}

func TestManyUsersOfOneTracer(t *testing.T) {
	tr := tracer(t)
	before := descriptors(t)
	common := seize(t, tr)
	var work sync.WaitGroup
	for i := range 100 {
		var own *trace.Process
		if i%4 == 0 {
			own = seize(t, tr)
		}
		work.Go(func() {
			p := common
			if own != nil {
				p = own
			}
			c, err := p.Fork()
			if err != nil {
				t.Error(err)
				return
			}
			for range 5 {
				if got, err := c.Call(unix.SYS_GETPID); err != nil || int(got) != number(c) {
					t.Errorf("%d %v, want %d", got, err, number(c))
				}
			}
			c.Kill()
			<-c.Gone()
			if own != nil {
				own.Kill()
				<-own.Gone()
			}
		})
	}
	work.Wait()
	if got, err := common.Call(unix.SYS_GETPID); err != nil || int(got) != number(common) {
		t.Errorf("%d %v", got, err)
	}
	common.Kill()
	gone(t, common)
	for deadline := time.Now().Add(2 * time.Minute); descriptors(t) > before; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors before, %d after", before, descriptors(t))
		}
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// TestNobodyWaitsForAnother has one process stay away with its code changed: whoever has another one is not kept waiting.
func TestNobodyWaitsForAnother(t *testing.T) {
	tr := tracer(t)
	hostile, other := seize(t, tr), seize(t, tr)
	change(t, hostile, forever)
	over := make(chan error, 1)
	go func() {
		_, err := hostile.Call(unix.SYS_GETPID)
		over <- err
	}()
	awaitState(t, hostile, "R")
	begun := time.Now()
	if got, err := other.Call(unix.SYS_GETPID); err != nil || int(got) != number(other) {
		t.Errorf("%d %v", got, err)
	}
	c, err := other.Fork()
	if err != nil {
		t.Fatal(err)
	}
	c.Kill()
	if took := time.Since(begun); took >= time.Minute {
		t.Errorf("another process's call took %v", took)
	}
	hostile.Kill()
	if err := <-over; !errors.Is(err, trace.ErrEnded) && !errors.Is(err, trace.ErrStrayed) {
		t.Errorf("got %v", err)
	}
}

// TestNumbersAreUsedAgain has a process get the number of one that has ended. Whoever holds the old one must not reach the
// new one, which may be somebody else's memory.
func TestNumbersAreUsedAgain(t *testing.T) {
	tr := tracer(t)
	old := seize(t, tr)
	old.Kill()
	gone(t, old)
	heir := takeNumber(t, number(old))
	p, err := tr.Seize(heir.pid, heir.pidfd)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		p.Kill()
		gone(t, p)
	}()
	if got, err := old.Call(unix.SYS_GETPID); !errors.Is(err, trace.ErrEnded) {
		t.Errorf("a call of what has ended was made by another: %d %v", got, err)
	}
	if c, err := old.Fork(); !errors.Is(err, trace.ErrEnded) {
		if c != nil {
			c.Kill()
		}
		t.Errorf("what has ended was copied from another: %v", err)
	}
	if err := old.Write(p.Resume(), []byte{0}); !errors.Is(err, trace.ErrEnded) {
		t.Errorf("what was meant for one that has ended is in another's memory: %v", err)
	}
}

type started struct {
	pid   int
	pidfd *os.File
}

// takeNumber starts the program until it has a number.
func takeNumber(t *testing.T, want int) started {
	t.Helper()
	for range 50 {
		if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(want-1)), 0); err != nil {
			t.Skip("numbers cannot be chosen here: ", err)
		}
		pid, pidfd := begin(t)
		if pid == want {
			return started{pid, pidfd}
		}
		pidfd.Close()
		_ = unix.Kill(pid, unix.SIGKILL)
		_, _ = unix.Wait4(pid, nil, 0, nil)
	}
	t.Skip("others take the number first")
	return started{}
}
