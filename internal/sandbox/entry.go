package sandbox

import (
	"cmp"
	"context"
	"maps"
	"sync"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// entry is a living sandbox in the Manager's memory.
type entry struct {
	id, tenant, key, idem, digest string
	server                        string // that it belongs to: this one, under the name that it had when it got it

	started chan struct{} // closed when its start is decided, for whoever shares the create
	ended   chan struct{} // closed when its end is recorded
	tried   chan struct{} // closed when its end has been recorded or that has failed once

	saving    sync.Mutex // held while its row is written; guards the two below
	unborn    *Record    // its first row, while that is not written
	unwritten error      // why that could not be

	changes chan struct{} // a lock that a caller can give up: held over a change and the driver's answer to it
	kernels chan struct{} // another: held while a kernel is made

	history history // of its usage

	here context.Context // until another server has taken it over: connections to it end then
	lost context.CancelFunc

	mu       sync.Mutex
	sb       Sandbox
	stopped  chan struct{} // closed while it does not run; changed by enter alone
	unspent  time.Duration // as Record has it
	used     time.Time     // with a monotonic clock, unlike sb.LastUsed
	uses     int           // streams that are open
	forks    int           // those that copy it now
	asked    time.Time     // when its end was asked for
	retry    time.Time     // when to try again what failed: its pause, its stop or the record of its end
	settled  bool          // tried is closed
	told     bool          // the driver reported its end and has not been told to forget it
	left     bool          // the caller of its create left: whoever shares it makes another
	startErr error
	cancel   context.CancelFunc // stops its start

	at    time.Time // guarded by the clock, like index
	index int       // in the clock's heap, −1: not there
}

func newEntry(sb Sandbox, idem, digest string) *entry {
	here, lost := context.WithCancel(context.Background()) // of the entry itself, whoever made it
	return &entry{
		here: here, lost: lost, id: sb.ID, tenant: sb.Tenant, key: sb.Key, idem: idem, digest: digest,
		started: make(chan struct{}), ended: make(chan struct{}), tried: make(chan struct{}),
		changes: make(chan struct{}, 1), kernels: make(chan struct{}, 1),
		sb: sb, used: time.Now(), index: -1, stopped: stoppedIn(sb.State),
	}
}

func (e *entry) snapshot() Sandbox { return e.record().Sandbox }

// stoppedIn is what entry.stopped begins as.
func stoppedIn(s State) chan struct{} {
	if s == StateRunning {
		return make(chan struct{})
	}
	return closed
}

// enter puts it into a state, which those who watch it hear of; called with mu held.
func (e *entry) enter(s State) {
	if e.sb.State == s {
		return
	}
	if e.sb.State == StateRunning {
		close(e.stopped)
		e.stopped = closed
	}
	e.sb.State = s
	if s == StateRunning {
		e.stopped = make(chan struct{})
	}
}

func (e *entry) state() State {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sb.State
}

// runs reports whether it can be used and has no annotation of that name; an empty name is none's.
func (e *entry) runs(without string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, has := e.sb.Annotations[without]
	return e.sb.State == StateRunning && !has
}

// record is a sandbox as its row should be; the boot is for its writer to say.
func (e *entry) record() Record {
	e.mu.Lock()
	defer e.mu.Unlock()
	r := Record{Sandbox: e.sb, IdempotencyKey: e.idem, SpecDigest: e.digest, Unspent: e.unspent, Server: e.server}
	r.Metadata, r.Annotations = maps.Clone(r.Metadata), maps.Clone(r.Annotations)
	if r.State == StateRunning {
		r.LastUsed = e.lastUsed()
	}
	return r
}

// lastUsed is called with mu held.
func (e *entry) lastUsed() time.Time {
	if e.uses > 0 {
		return now()
	}
	return e.used.UTC().Truncate(time.Microsecond)
}

// touch counts as use; a use lasts until release. It reports false when the sandbox is not running.
func (e *entry) touch() bool { return e.touchFor(0) }

// touchFor is touch by so many forks, which also keep it from being paused until forked.
func (e *entry) touchFor(forks int) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.sb.State != StateRunning {
		return false
	}
	e.uses++
	e.forks += forks
	return true
}

func (e *entry) forked() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.forks--
}

// release ends a use and reports whether that starts the idle clock.
func (e *entry) release() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.uses--
	e.used = time.Now()
	return e.uses == 0 && e.sb.IdleTimeout > 0
}

// begin makes a starting sandbox a running one, since a time; false when its end was asked for or has come meanwhile.
func (e *entry) begin(since time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.sb.State != StateStarting {
		return false
	}
	e.used = time.Now()
	e.enter(StateRunning)
	e.sb.StartedAt = since
	return true
}

// pausing is a pause that is decided.
type pausing struct {
	until time.Time     // the deadline of the pause
	auto  *bool         // nil: AutoResume stays as it is
	cold  bool          // its processes are ended first
	due   Cause         // the clock's reason, which must hold at this very moment; empty: somebody asked
	left  time.Duration // what is left of its lifetime after the pause; zero: what is left now
}

// pause makes a running sandbox a paused one, from now on for everybody. undo makes it a running one again, unless it has
// ended since.
func (e *entry) pause(p pausing) (undo func(), err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	passed := func(t time.Time) bool { return !t.IsZero() && !time.Now().Before(t) }
	switch {
	case e.sb.State != StateRunning:
		return nil, goneError(e.sb)
	case p.due == CauseIdle && !passed(e.idleAt()):
		return nil, fault.New(fault.Conflict, "sandbox %s is in use", e.id)
	case p.due == CauseExpired && !passed(e.sb.Deadline):
		return nil, fault.New(fault.Conflict, "sandbox %s was given more time", e.id)
	case e.forks > 0: // it would stand still in the middle of being copied
		return nil, fault.New(fault.Conflict, "sandbox %s is being forked; try again", e.id)
	}
	before := e.sb
	e.sb.LastUsed = e.lastUsed()
	e.enter(StatePaused)
	e.sb.PausedAt, e.sb.Deadline, e.sb.Cold = now(), p.until, p.cold
	e.unspent = cmp.Or(p.left, unspent(before.Deadline, e.sb.PausedAt))
	if p.auto != nil {
		e.sb.AutoResume = *p.auto
	}
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.unspent = 0
		if e.sb.State == StatePaused {
			e.enter(StateRunning)
			e.sb = before
		}
	}, nil
}

// unspent is what is left of a lifetime, as Record has it.
func unspent(deadline, at time.Time) time.Duration {
	if deadline.IsZero() {
		return -1
	}
	return max(deadline.Sub(at), time.Microsecond)
}

// resume makes a paused sandbox a running one, whose idle clock begins anew; false when its end has come meanwhile.
func (e *entry) resume(deadline time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.sb.State != StatePaused {
		return false
	}
	e.used, e.unspent = time.Now(), 0
	e.enter(StateRunning)
	e.sb.PausedAt, e.sb.Deadline, e.sb.Cold = time.Time{}, deadline, false
	return true
}

// driverDeadline is the deadline that the driver of a starting or running sandbox is to enforce.
func (e *entry) driverDeadline() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.sb.pausesAtDeadline() {
		return time.Time{}
	}
	return e.sb.Deadline
}

// forking is how many copies of it are being made.
func (e *entry) forking() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.forks
}

// lockChanges keeps other changes away.
func (e *entry) lockChanges(ctx context.Context) (unlock func(), err error) {
	select {
	case e.changes <- struct{}{}:
		return func() { <-e.changes }, nil
	case <-ctx.Done():
		return nil, waitError(ctx, "another change of sandbox "+e.id)
	}
}

// ask decides why a sandbox ends; the first to ask wins. It reports whether this was the first.
func (e *entry) ask(cause Cause, message string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch e.sb.State {
	case StateStarting:
		if e.cancel != nil {
			e.cancel()
		}
	case StateRunning:
		e.sb.LastUsed = e.lastUsed()
	case StatePaused:
	case StateStopping, StateEnded:
		return false
	}
	e.enter(StateStopping)
	e.sb.Cause, e.sb.CauseMessage = cause, message
	e.sb.PausedAt, e.sb.Cold, e.unspent = time.Time{}, false, 0
	e.asked = time.Now()
	return true
}

// finish makes it an ended sandbox; false when it was one already. What happened first is the cause: an end that the
// driver saw before anybody asked for one counts more than the asking.
func (e *entry) finish(end Ended) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch e.sb.State {
	case StateEnded:
		return false
	case StateStarting, StateRunning, StatePaused:
		if e.sb.State == StateRunning {
			e.sb.LastUsed = e.lastUsed()
		}
		e.sb.Cause, e.sb.CauseMessage = end.Cause, end.Message
	case StateStopping:
		if end.Cause != "" && (end.At.Before(e.asked) || end.Cause == e.sb.Cause && end.Message != "") {
			e.sb.Cause, e.sb.CauseMessage = end.Cause, end.Message
		}
	}
	e.enter(StateEnded)
	e.sb.EndedAt, e.sb.Usage = now(), end.Usage
	e.sb.PausedAt, e.sb.Cold, e.unspent = time.Time{}, false, 0
	if !end.At.IsZero() {
		e.sb.EndedAt = end.At.UTC().Truncate(time.Microsecond)
	}
	e.retry = time.Time{}
	return true
}

// settle tells those who wait for the record of its end that an attempt is over.
func (e *entry) settle() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.settled {
		e.settled = true
		close(e.tried)
	}
}

// due is when the clock must look at this sandbox again; zero is never.
func (e *entry) due() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch e.sb.State {
	case StateStopping, StateEnded:
		return e.retry
	case StateStarting, StatePaused, StateRunning:
		idle, deadline := e.idleAt(), e.deadlineAt()
		if deadline.IsZero() || !idle.IsZero() && idle.Before(deadline) {
			return idle
		}
		return deadline
	}
	return time.Time{}
}

// deadlineAt is when its deadline must be acted on; zero is never. Called with mu held.
func (e *entry) deadlineAt() time.Time {
	switch {
	case !e.sb.pausesAtDeadline() || e.sb.State == StatePaused || e.sb.Deadline.IsZero():
		return e.sb.Deadline
	case e.sb.State == StateStarting: // it is paused once it runs
		return time.Time{}
	case e.sb.Deadline.Before(e.retry): // a pause that failed
		return e.retry
	}
	return e.sb.Deadline
}

// idleAt is when it has been idle for too long; zero while it is in use or does not run. Called with mu held.
func (e *entry) idleAt() time.Time {
	if e.sb.IdleTimeout <= 0 || e.uses > 0 || e.sb.State != StateRunning {
		return time.Time{}
	}
	at := e.used.Add(e.sb.IdleTimeout)
	if at.Before(e.retry) { // a pause that failed
		return e.retry
	}
	return at
}

// overdue says what the clock must do now, and whether that is a pause and not an end; an empty cause is nothing.
func (e *entry) overdue(at time.Time) (cause Cause, pause bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	passed := func(t time.Time) bool { return !t.IsZero() && !at.Before(t) }
	switch e.sb.State {
	case StateStopping, StateEnded:
		if passed(e.retry) {
			return e.sb.Cause, false
		}
	case StateStarting, StatePaused, StateRunning:
		if passed(e.deadlineAt()) {
			return CauseExpired, e.sb.State == StateRunning && e.sb.pausesAtDeadline()
		}
		if passed(e.idleAt()) {
			return CauseIdle, e.sb.IdleAction == IdlePause
		}
	}
	return "", false
}
