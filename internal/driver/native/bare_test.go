package native_test

import (
	"testing"
	"time"

	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/test/slow"
)

// TestAShellForBranchesHasNoDevice: the files come with the branch, and a disk that nobody ever uses would be taken away while
// somebody waits.
func TestAShellForBranchesHasNoDevice(t *testing.T) {
	slow.Test(t)
	const branches, pool = 2, 2
	m := newMaker(t)
	parent := m.start(t, func(r *sandbox.StartRequest) { r.Template = buildTemplate(t, "python") })
	parent.value("open('/home/user/note', 'w').write('the parent was here')")
	for range 2 { // the second has shells that were made for it
		made, _ := parent.fork(branches)
		for _, b := range made {
			b.says("a branch", "print(open('/home/user/note').read())", "the parent was here")
			b.says("its disk", "import os; s = os.statvfs('/home/user'); print(s.f_blocks * s.f_frsize > 1 << 30)", "True")
			b.stop()
		}
		m.full(t)
	}
	parent.stop()
	m.full(t)
	// One for each shell with a disk, and those that are ready for the files of the next fork.
	if got, want := m.loops(t), pool+branches+1; got != want {
		t.Errorf("%d loop devices while nobody is there, want %d", got, want)
	}
}

// full waits until the pools have what they shall have, and what ended is gone.
func (m *ownMaker) full(t *testing.T) {
	t.Helper()
	for deadline, same, last := time.Now().Add(60*time.Second), 0, -1; same < 3; time.Sleep(100 * time.Millisecond) {
		s, err := m.driver.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		now := m.loops(t)
		if s.Dying == 0 && s.Lacking == 0 && now == last {
			same++
		} else {
			same = 0
		}
		last = now
		if time.Now().After(deadline) {
			t.Fatalf("the pools do not become full: %+v", s)
		}
	}
}
