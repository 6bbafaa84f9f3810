package maker

import (
	"errors"

	"github.com/covehq/cove/internal/driver/native/cgroup"
	"github.com/covehq/cove/internal/fault"
)

// Pause stops every process of a sandbox where it is: agent, kernels and commands. Their memory stays. It waits for a
// copy of the sandbox that is being made.
func (m *Maker) Pause(id string) error {
	l, err := m.find(id)
	if err != nil {
		return err
	}
	l.turn.Lock()
	defer l.turn.Unlock()
	if paused, err := l.setPaused(true); err != nil || paused {
		return err
	}
	err = l.shell.group.Freeze()
	l.mu.Lock()
	ending := l.cause != ""
	l.mu.Unlock()
	switch {
	case ending:
		// Whoever ended it saw it paused and has thawed it: perhaps before it froze.
		l.shell.end()
		return errEnding(l)
	case err != nil:
		_, _ = l.setPaused(false)
		return l.whyNotPaused(err)
	}
	return nil
}

// Resume lets a paused sandbox go on.
func (m *Maker) Resume(id string) error {
	l, err := m.find(id)
	if err != nil {
		return err
	}
	l.turn.Lock()
	defer l.turn.Unlock()
	if l.isHeld() {
		return errHeld(l)
	}
	if paused, err := l.setPaused(false); err != nil || !paused {
		return err
	}
	if err := l.shell.group.Thaw(); err != nil {
		_, _ = l.setPaused(true)
		return fault.Wrap(fault.Internal, err, "sandbox %s could not be resumed", l.id)
	}
	return nil
}

// setPaused notes what the sandbox will be and tells what it was. It is noted before it is so: whoever ends the sandbox
// meanwhile must know that it has to be thawed.
func (l *live) setPaused(paused bool) (was bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != "" {
		return false, errEnding(l)
	}
	was, l.paused = l.paused, paused
	return was, nil
}

func (l *live) isPaused() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.paused
}

func (l *live) whyNotPaused(err error) error {
	switch {
	case errors.Is(err, cgroup.ErrNoFreezer):
		return fault.Wrap(fault.Unsupported, err, "this server cannot pause sandboxes: its host has no cgroup freezer")
	case errors.Is(err, cgroup.ErrBusy):
		return fault.Wrap(fault.Timeout, err, "sandbox %s could not be paused: one of its processes waits for a disk and cannot be stopped; try again", l.id)
	default:
		return fault.Wrap(fault.Internal, err, "sandbox %s could not be paused", l.id)
	}
}

// awake keeps a sandbox from being paused until the function it returns is called; one that is paused is refused. What
// comes into a sandbox from outside, a kernel or a copier, must not find its processes standing still.
func (l *live) awake() (done func(), err error) {
	l.turn.RLock()
	if l.isPaused() {
		l.turn.RUnlock()
		return nil, fault.New(fault.Conflict, "sandbox %s is paused; resume it first", l.id)
	}
	if l.isHeld() {
		l.turn.RUnlock()
		return nil, errHeld(l)
	}
	return l.turn.RUnlock, nil
}

func errEnding(l *live) error { return fault.New(fault.Gone, "sandbox %s is ending", l.id) }

// end kills a sandbox whose processes may stand still.
func (s *shell) end() {
	s.kill()
	s.group.Kill()
}
