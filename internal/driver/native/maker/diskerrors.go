package maker

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/sandbox"
)

// How often disks are asked for errors: after the kernel's log told of one, which names few of
// those that come at once, and without such a log.
const (
	suspectRest = 5 * time.Second
	blindEvery  = time.Minute
)

// syncPatience is how long one disk may take to answer. Another disk is asked after it.
const syncPatience = 10 * time.Second

// suspectDisks has the disks asked, soon.
func (m *Maker) suspectDisks() {
	select {
	case m.suspect <- struct{}{}:
	default:
	}
}

// watchDisks ends sandboxes whose disks the host could not write, until the maker closes. Such a
// disk is damaged, and the processes of the sandbox need not have noticed.
func (m *Maker) watchDisks() {
	var blind <-chan time.Time
	if m.oom.file == nil {
		tick := time.NewTicker(blindEvery)
		defer tick.Stop()
		blind = tick.C
	}
	for {
		select {
		case <-m.suspect:
		case <-blind:
		case <-m.closed:
			return
		}
		m.checkDisks()
		select {
		case <-time.After(suspectRest):
		case <-m.closed:
			return
		}
	}
}

func (m *Maker) checkDisks() {
	bad := map[*volume]bool{} // an error is told once
	for _, s := range m.writers() {
		failed := false
		if k := s.disk; k != nil {
			failed = m.ask(&k.question, k.hasFailed)
		}
		for _, v := range s.volumes {
			if _, asked := bad[v]; !asked {
				bad[v] = m.ask(&v.question, v.hasFailed)
			}
			failed = failed || bad[v]
		}
		if failed && !s.l.isEnding() {
			m.endFailed(s.l)
		}
	}
}

// syncQuestion is what one file system was asked and has not answered yet. Only watchDisks uses it.
type syncQuestion struct {
	answer chan bool // nil: no question is open
}

// ask tells whether writes to a file system failed. It waits for the answer for syncPatience at
// most, since syncfs cannot be cut short.
//
// A file system that is late is not asked again before it has answered. If that answer is a failure,
// the disks are asked once more and the failure is told then.
func (m *Maker) ask(q *syncQuestion, hasFailed func() bool) bool {
	if q.answer != nil {
		select {
		case failed := <-q.answer:
			q.answer = nil
			return failed
		default:
			return false
		}
	}
	answer := make(chan bool, 1)
	q.answer = answer
	go func() { // ends when the kernel answers; a maker that ends does not wait for it
		failed := hasFailed()
		answer <- failed
		if failed {
			m.suspectDisks()
		}
	}()
	late := time.NewTimer(syncPatience)
	defer late.Stop()
	select {
	case failed := <-answer:
		q.answer = nil
		return failed
	case <-late.C:
	case <-m.closed:
	}
	return false
}

// endFailed ends a sandbox with a damaged disk.
func (m *Maker) endFailed(l *live) {
	cause, message := sandbox.CauseDiskFailed, "the server could not write the sandbox's disk: what it wrote last is lost"
	if s, err := m.space.now(); err == nil && s.free < m.space.marks(s).end {
		cause, message = sandbox.CauseHostDiskFull, "the server's disk was full: what the sandbox wrote last is lost"
	}
	m.log.Error("the disk of a sandbox could not be written: it is ended", "sandbox", l.id, "tenant", l.tenant, "cause", cause)
	l.decide(cause, message, m.usage(l))
	if l.shell.disk != nil {
		l.shell.disk.cutOff()
	}
	l.shell.end()
	l.insist()
}

// hasFailed tells whether something that was written did not reach the host's disk.
func (k *disk) hasFailed() bool {
	if err := hold(k.root, unix.Syncfs); err != nil && !errors.Is(err, wire.ErrNotHeld) {
		k.failed.Store(true)
	}
	return k.failed.Load()
}

func (u *volume) hasFailed() bool {
	root := u.root.Load()
	if root == nil {
		return false
	}
	err := hold(root, unix.Syncfs)
	return err != nil && !errors.Is(err, wire.ErrNotHeld)
}
