package maker_test

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/maker"
	"github.com/covehq/cove/internal/driver/native/wire"
)

func TestWhichZygoteForks(t *testing.T) {
	const hour = time.Hour
	for _, c := range []struct {
		claim string
		all   []maker.Zygote
		best  int
		kept  []int
		spare bool
	}{
		{"a new one has room to spare", []maker.Zygote{{}}, 0, []int{0}, true},
		{"with nearly all that it may have the next is started", []maker.Zygote{{Living: 500}}, 0, []int{0}, false},
		{"with more than it should have it goes on until there is another", []maker.Zygote{{Living: 700}}, 0, []int{0}, false},
		{"with twice that it does not", []maker.Zygote{{Living: 1024}}, -1, []int{0}, false},
		{"the one with fewest children forks", []maker.Zygote{{Living: 9}, {Living: 7}, {Living: 8}}, 1, []int{0, 1, 2}, true},
		{"the next is started before the last fork", []maker.Zygote{{Forks: 4500, Living: 3}}, 0, []int{0}, false},
		{"and before the last hour is over", []maker.Zygote{{Age: 5*hour + hour/2, Living: 3}}, 0, []int{0}, false},
		{"an old one goes on while there is no other", []maker.Zygote{{Forks: 5000, Living: 3}}, 0, []int{0}, false},
		{"also when nobody lives", []maker.Zygote{{Forks: 5000}}, 0, []int{0}, false},
		{"of old ones the one with fewest", []maker.Zygote{{Forks: 5000, Living: 3}, {Age: 7 * hour, Living: 2}}, 1, []int{0, 1}, false},
		{"a younger one takes over", []maker.Zygote{{Forks: 5000, Living: 3}, {Living: 400}}, 1, []int{0, 1}, true},
		{"whatever the order", []maker.Zygote{{Living: 400}, {Forks: 5000, Living: 3}}, 0, []int{0, 1}, true},
		{"and the old one ends with its last child", []maker.Zygote{{Age: 7 * hour}, {Living: 4}}, 1, []int{1}, true},
	} {
		t.Run(c.claim, func(t *testing.T) {
			best, kept, spare := maker.Choose(c.all...)
			if best != c.best || spare != c.spare || !cmp.Equal(kept, c.kept) {
				t.Errorf("took %d, kept %v, spare %v; want %d, %v, %v", best, kept, spare, c.best, c.kept, c.spare)
			}
		})
	}
}

func TestAnOrderToForkIsWrittenAsTheShimReadsIt(t *testing.T) {
	got, err := maker.ShortOrder(1000, 2, []int{3, 1 << 24}, "token", "/home", true)
	want := "F\x01\x02\x05" + "\xe8\x03\x00\x00" + "\x02\x00\x00\x00" + "\x00\x00\x00\x00" + "\x03\x00\x00\x00" + "\x00\x00\x00\x01" + "token/home"
	if err != nil || string(got) != want {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
	for claim, order := range map[string]func() ([]byte, error){
		"many groups":  func() ([]byte, error) { return maker.ShortOrder(0, 0, make([]int, 65), "t", "/", false) },
		"a long token": func() ([]byte, error) { return maker.ShortOrder(0, 0, nil, strings.Repeat("t", 64), "/", false) },
		"a long path":  func() ([]byte, error) { return maker.ShortOrder(0, 0, nil, "t", strings.Repeat("/", 4097), false) },
	} {
		if _, err := order(); err == nil {
			t.Errorf("%s: it was written", claim)
		}
	}
}

// A sandbox that ends while it is made closes what its kernel was to be given. That is no reason to end the zygote: all
// its other kernels could not be forked any more.
func TestOnlyAFailureOfItsOwnEndsAZygote(t *testing.T) {
	sleeper := exec.Command("sleep", "60")
	fd := -1
	sleeper.SysProcAttr = &syscall.SysProcAttr{PidFD: &fd}
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	pidfd := os.NewFile(uintptr(fd), "pidfd")
	defer pidfd.Close()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = sleeper.Wait()
	}()
	defer sleeper.Process.Kill() // it may have ended
	mine, theirs, err := wire.Pair(unix.SOCK_SEQPACKET)
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	conn, err := wire.Conn(mine)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	open, closed := openFile(t), openFile(t)
	closed.Close()

	err = maker.OrderFork(t.Context(), conn, pidfd, open, closed)
	if !errors.Is(err, wire.ErrNotHeld) || errors.Is(err, maker.ErrZygoteDied) {
		t.Errorf("with a descriptor that is closed: %v", err)
	}
	select {
	case <-ended:
		t.Error("the zygote was ended for it")
	case <-time.After(100 * time.Millisecond): // a signal is delivered at once
	}
	theirs.Close()
	if err = maker.OrderFork(t.Context(), conn, pidfd, open); !errors.Is(err, maker.ErrZygoteDied) {
		t.Errorf("a zygote that does not read: %v", err)
	}
	<-ended
}

func openFile(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestZygote_Hangs(t *testing.T) {
	for name, c := range map[string]struct {
		stopped bool
		hangs   time.Duration
	}{
		"a stopped zygote":            {true, 10 * time.Second},
		"a zygote that is hardly run": {false, 100 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun := time.Now()
				hung, done := maker.AwaitHang(func() bool { return c.stopped })
				defer done()
				<-hung
				if took := time.Since(begun); took != c.hangs {
					t.Errorf("it was given up after %v; want %v", took, c.hangs)
				}
			})
		})
	}
	t.Run("a zygote that answers", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			hung, done := maker.AwaitHang(func() bool { return true })
			done()
			time.Sleep(time.Hour)
			select {
			case <-hung:
				t.Error("it was given up")
			default:
			}
		})
	})
}

func TestIsStopped(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	await := func(what string, condition func() bool) {
		t.Helper()
		for end := time.Now().Add(time.Minute); !condition(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("not within a minute: %s", what)
			}
		}
	}
	pid := cmd.Process.Pid
	if maker.IsStopped(pid) {
		t.Error("a process that runs")
	}
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	await("it is stopped", func() bool { return maker.IsStopped(pid) })
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	await("it goes on", func() bool { return !maker.IsStopped(pid) })
	if maker.IsStopped(1 << 30) {
		t.Error("no process")
	}
}

// TestHoldAnchor_Ended has a kernel end before the maker holds its anchor, as it does with its
// zygote: the start is tried again with another zygote.
func TestHoldAnchor_Ended(t *testing.T) {
	for _, reaped := range []bool{false, true} {
		var pidfd int
		cmd := exec.Command("sleep", "1000")
		cmd.SysProcAttr = &syscall.SysProcAttr{PidFD: &pidfd}
		noError(t, cmd.Start())
		noError(t, cmd.Process.Kill())
		if reaped {
			_ = cmd.Wait() // it was killed
		} else {
			defer func() { _ = cmd.Wait() }()
			noError(t, waitid(cmd.Process.Pid))
		}
		if err := maker.HoldAnchor(os.NewFile(uintptr(pidfd), "pidfd")); !errors.Is(err, maker.ErrZygoteDied) {
			t.Errorf("reaped %v: %v", reaped, err)
		}
	}
}

// waitid waits until a child has ended, and leaves it to be reaped.
func waitid(pid int) error { return unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil) }
