package maker_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/template"
)

const withZygote = "[host]\ntrees = ['/usr']\n[python]\nfind = ['>=3.9,<3.15']\npreload = ['json']"

// TestAYoungZygoteTakesOver has pools of one shell, so that it knows who bore whom.
func TestAYoungZygoteTakesOver(t *testing.T) {
	for _, c := range []struct {
		claim string
		wear  func(*realMaker, *template.Template)
	}{
		{"after many forks", func(m *realMaker, from *template.Template) {
			for m.stats().Zygotes[0].Forks < fewForks {
				m.start(from).stop()
			}
		}},
		{"after hours", func(m *realMaker, from *template.Template) {
			noError(m.t, os.Truncate(hoursFile(m.dir), 7))
			m.start(from).stop()
			if forks := m.stats().Zygotes[0].Forks; forks >= fewForks*9/10 {
				m.t.Fatalf("it has forked %d times, which alone makes it old", forks)
			}
		}},
	} {
		t.Run(c.claim, func(t *testing.T) {
			m := newMaker(t, map[string]string{"warm": withZygote})
			from := m.build("warm")
			kept := m.start(from)
			kept.says("x = 41", "")
			all := m.stats().Zygotes
			if len(all) != 1 {
				t.Fatalf("the first zygotes are %+v", all)
			}
			old := all[0].PID
			end, err := unix.PidfdOpen(old, 0)
			noError(t, err)
			defer unix.Close(end)

			c.wear(m, from)
			await(t, "a second zygote", func() bool { return len(m.stats().Zygotes) == 2 })
			m.settle()
			m.start(from).stop() // whose kernel may be one that the old had forked ahead
			m.settle()
			both := m.stats().Zygotes
			next := m.start(from)
			next.says("y = 1", "")
			m.settle()
			if before, after := both[0].Forks, m.zygote(old).Forks; after != before {
				t.Errorf("the old zygote had forked %d times and has %d times", before, after)
			}
			if before, after := both[1].Forks, m.zygote(both[1].PID).Forks; after <= before {
				t.Errorf("the young zygote had forked %d times and has %d times", before, after)
			}

			kept.says("print(x + 1)", "42")
			branch := kept.branch()
			kept.stop()
			await(t, "one child of the old zygote", func() bool { return m.zygote(old).Live == 1 })
			m.start(from).stop()
			m.settle()
			if m.zygote(old); ended(t, end) { // the pool must not have given it up either
				t.Error("the old zygote ended before its last sandbox")
			}
			branch.says("print(x + 2)", "43")
			branch.stop()
			await(t, "the old zygote's end", func() bool {
				m.start(from).stop() // it is seen to when somebody comes
				return ended(t, end)
			})
			next.says("print(y)", "1")
		})
	}
}

// settle waits until the pool has what it shall have, and what ended is gone.
func (m *realMaker) settle() {
	m.t.Helper()
	await(m.t, "a full pool", func() bool { s := m.stats(); return s.Lacking == 0 && s.Dying == 0 })
}

func (m *realMaker) zygote(pid int) wire.ZygoteStats {
	m.t.Helper()
	for _, z := range m.stats().Zygotes {
		if z.PID == pid {
			return z
		}
	}
	m.t.Fatalf("zygote %d is not there", pid)
	return wire.ZygoteStats{}
}

// ended tells whether a process has.
func ended(t *testing.T, pidfd int) bool {
	t.Helper()
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0)
	if err != nil && err != unix.EINTR {
		t.Fatal(err)
	}
	return n == 1
}
