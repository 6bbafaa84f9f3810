package native_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func pausing(t *testing.T) {
	t.Helper()
	world.open(t)
	if !world.driver.Caps().Pause {
		t.Skip("this host has no cgroup freezer")
	}
}

func (b *box) pause() {
	b.t.Helper()
	if err := b.driver.Pause(b.t.Context(), b.id); err != nil {
		b.t.Fatalf("pause: %v", err)
	}
}

func (b *box) resume() {
	b.t.Helper()
	if err := b.driver.Resume(b.t.Context(), b.id); err != nil {
		b.t.Fatalf("resume: %v", err)
	}
}

func (b *box) cpu() int64 {
	b.t.Helper()
	u, err := b.driver.Usage(b.t.Context(), b.id)
	if err != nil {
		b.t.Fatal(err)
	}
	return u.CPUMS
}

// rest waits until a paused box uses no more processor time and returns what it has used: a process
// that was exiting when the pause began still ends.
func (b *box) rest() int64 {
	b.t.Helper()
	used := b.cpu()
	for deadline, same := time.Now().Add(2*time.Minute), 0; same < 2; {
		time.Sleep(300 * time.Millisecond) // in which a process that is not paused would run
		now := b.cpu()
		if same++; now != used {
			same = 0
		}
		used = now
		if time.Now().After(deadline) {
			b.t.Fatalf("a paused sandbox goes on and has used %d ms of processor time", used)
		}
	}
	return used
}

func TestPauseStopsEverything(t *testing.T) {
	pausing(t)
	b := start(t)
	b.value("x = 41")
	// One that burns the processor, and one that has children as fast as it can.
	b.sh(`(while :; do :; done) & (while :; do /bin/true; done) & sleep 0.3`)
	before := b.cpu()
	for deadline := time.Now().Add(2 * time.Minute); b.cpu() == before; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("nothing runs that could be paused")
		}
	}
	b.pause()
	b.pause() // the same again
	paused := b.rest()
	if i := instance(t, b.driver, b.id); !i.Paused {
		t.Errorf("listed as %+v", i)
	}
	if err := b.driver.Kernel(t.Context(), b.id, "second"); !fault.Is(err, fault.Conflict) {
		t.Errorf("a kernel for a paused sandbox: %v", err)
	}
	b.resume()
	b.resume()
	if got := b.value("print(x + 1)"); got != "42" {
		t.Errorf("after the pause x + 1 is %s", got)
	}
	if i := instance(t, b.driver, b.id); i.Paused {
		t.Errorf("listed as %+v", i)
	}
	for deadline := time.Now().Add(2 * time.Minute); b.cpu() < paused+50; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the commands do not go on")
		}
	}
}

func instance(t *testing.T, d *native.Driver, id string) sandbox.Instance {
	t.Helper()
	all, err := d.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		if i.ID == id {
			return i
		}
	}
	t.Fatalf("%s is not listed", id)
	return sandbox.Instance{}
}

func TestPausedSandboxEnds(t *testing.T) {
	pausing(t)
	t.Run("by a stop", func(t *testing.T) {
		b := start(t)
		b.sh(`(while :; do /bin/true; done) & sleep 0.1`)
		b.pause()
		b.stop()
		waitGone(t, b.id)
	})
	t.Run("at its deadline", func(t *testing.T) {
		b := start(t)
		b.pause()
		soon := time.Now().Add(50 * time.Millisecond)
		if err := b.driver.Change(t.Context(), b.id, sandbox.Change{Deadline: &soon}); err != nil {
			t.Fatal(err)
		}
		waitGone(t, b.id)
	})
	t.Run("whichever comes first, the pause or the stop", func(t *testing.T) {
		for i := range 20 {
			b := start(t)
			done := make(chan error, 1)
			go func() {
				time.Sleep(time.Duration(i) * 50 * time.Microsecond)
				done <- b.driver.Pause(context.Background(), b.id)
			}()
			b.stop()
			if err := <-done; err != nil && !fault.Is(err, fault.NotFound) && !fault.Is(err, fault.Gone) {
				t.Errorf("pause: %v", err)
			}
			waitGone(t, b.id)
		}
	})
	t.Run("pausing what has ended", func(t *testing.T) {
		b := start(t)
		b.stop()
		if err := b.driver.Pause(t.Context(), b.id); !fault.Is(err, fault.NotFound) {
			t.Errorf("got %v", err)
		}
	})
}

func waitGone(t *testing.T, id string) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(5 * time.Millisecond) {
		all, err := world.driver.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		gone := true
		for _, i := range all {
			gone = gone && i.ID != id
		}
		if gone {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s still lives", id)
		}
	}
}

// TestMakerStop ends makers whose sandboxes cannot end by themselves.
func TestMakerStop(t *testing.T) {
	pausing(t)
	for claim, prepare := range map[string]func(m *ownMaker, b *box){
		"paused": func(_ *ownMaker, b *box) { b.pause() },
		"a fork, paused": func(m *ownMaker, b *box) {
			child := m.branch(t, b)
			child.pause()
			b.pause()
		},
		"frozen by another program": func(_ *ownMaker, b *box) { b.freezeByHand() },
	} {
		t.Run(claim, func(t *testing.T) {
			m := newMaker(t)
			b := m.start(t)
			inside, pid := b.hostPIDs(), m.driver.MakerPID()
			prepare(m, b)
			m.stopByCommand(t)
			if unix.Kill(pid, 0) == nil && !isZombie(pid) {
				t.Errorf("the maker, process %d, runs on", pid)
			}
			waitDead(t, inside)
		})
	}
}

// stopByCommand runs "cove maker stop".
func (m *ownMaker) stopByCommand(t *testing.T) {
	t.Helper()
	out, err := exec.Command("/proc/self/exe", "maker", "stop", "--data-dir", m.dir, "--timeout", "40s").CombinedOutput()
	if err != nil {
		t.Errorf("cove maker stop: %v: %s", err, out)
	}
	m.driver.Close()
	m.driver = nil
}

// freezeByHand freezes the sandbox's cgroup as an operator does.
func (b *box) freezeByHand() {
	b.t.Helper()
	pid := b.hostPIDs()[0]
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		b.t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		words := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if slices.Contains(strings.Split(words[1], ","), "freezer") {
			if err := os.WriteFile(filepath.Join("/sys/fs/cgroup/freezer", words[2], "freezer.state"), []byte("FROZEN"), 0); err != nil {
				b.t.Fatal(err)
			}
			return
		}
	}
	b.t.Skip("this host has no freezer of cgroup v1")
}

// TestPausedSandboxesOfADeadMaker are frozen and so cannot notice that their maker is gone: the next one clears them.
func TestPausedSandboxesOfADeadMaker(t *testing.T) {
	pausing(t)
	m := newMaker(t)
	b := m.start(t)
	inside := b.hostPIDs()
	if len(inside) == 0 {
		t.Fatal("no process of the sandbox is found")
	}
	b.pause()
	m.crash(t)
	m.open(t)
	waitDead(t, inside)
}

// waitDead waits until none of these processes lives: one that has left its cgroup may still be on its way out.
func waitDead(t *testing.T, pids []int) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		var living []int
		for _, pid := range pids {
			if unix.Kill(pid, 0) == nil && !isZombie(pid) {
				living = append(living, pid)
			}
		}
		if len(living) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("processes %v of the dead maker's sandbox live", living)
		}
	}
}

func isZombie(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && strings.Contains(string(text), ") Z ")
}

// hostPIDs are the sandbox's processes as the host numbers them: those whose environment or ancestry nobody could forge
// are found by the cgroup of their PID 1's namespace.
func (b *box) hostPIDs() []int {
	b.t.Helper()
	mark := "cove-find-me-" + b.id
	b.sh(`exec -a ` + mark + ` sleep 600 & sleep 0.1`)
	entries, err := os.ReadDir("/proc")
	if err != nil {
		b.t.Fatal(err)
	}
	namespace := ""
	for _, e := range entries {
		if line, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline")); err == nil && strings.HasPrefix(string(line), mark+"\x00") {
			namespace, _ = os.Readlink(filepath.Join("/proc", e.Name(), "ns/pid"))
		}
	}
	var pids []int
	for _, e := range entries {
		if ns, err := os.Readlink(filepath.Join("/proc", e.Name(), "ns/pid")); err == nil && ns == namespace {
			pid, _ := strconv.Atoi(e.Name())
			pids = append(pids, pid)
		}
	}
	return pids
}

func BenchmarkPauseResume(b *testing.B) {
	s := start(b)
	s.value("1")
	ctx := context.Background()
	for b.Loop() {
		if err := s.driver.Pause(ctx, s.id); err != nil {
			b.Fatal(err)
		}
		if err := s.driver.Resume(ctx, s.id); err != nil {
			b.Fatal(err)
		}
	}
}
