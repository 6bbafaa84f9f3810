package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// stopFor bounds one attempt to stop a sandbox: its caller may have left long ago.
const stopFor = 30 * time.Second

// retryAfter is how long the clock waits before it tries again to stop a sandbox or to record its end.
const retryAfter = 2 * time.Second

// Kill ends a sandbox and returns it with its cause. Killing one that has ended returns it as it is.
func (m *Manager) Kill(ctx context.Context, p auth.Principal, id string) (Sandbox, error) {
	leave, err := m.enter()
	if err != nil {
		return Sandbox{}, err
	}
	defer leave()
	if e := m.find(p, id); e != nil {
		return m.end(ctx, e, CauseKilled, "")
	}
	return m.stored(ctx, p, id)
}

// End ends a sandbox for a reason that its dialect saw: its main process is over. One that has ended, or is ending, is
// returned as it is.
func (m *Manager) End(ctx context.Context, p auth.Principal, id string, cause Cause, message string) (Sandbox, error) {
	leave, err := m.enter()
	if err != nil {
		return Sandbox{}, err
	}
	defer leave()
	if e := m.find(p, id); e != nil {
		return m.end(ctx, e, cause, message)
	}
	return m.stored(ctx, p, id)
}

// Expire does at once what would happen to a running sandbox at its deadline. A paused one stays as it is.
func (m *Manager) Expire(ctx context.Context, p auth.Principal, id string) (Sandbox, error) {
	e, leave, err := m.enterUsable(ctx, p, id)
	if err != nil {
		return Sandbox{}, err
	}
	defer leave()
	if sb := e.snapshot(); !sb.pausesAtDeadline() {
		return m.end(ctx, e, CauseExpired, "")
	}
	unlock, err := e.lockChanges(ctx)
	if err != nil {
		return Sandbox{}, err
	}
	defer unlock()
	if sb := e.snapshot(); sb.State == StatePaused {
		return sb, nil
	}
	return m.pause(ctx, e, m.atDeadline(e), "expired")
}

// end asks for a sandbox's end and sees to it.
func (m *Manager) end(ctx context.Context, e *entry, cause Cause, message string) (Sandbox, error) {
	e.ask(cause, message)
	select {
	case <-e.started: // before that its creator stops it, unless it ran when it was asked
		return m.stop(ctx, e)
	case <-e.ended:
		return e.snapshot(), nil
	case <-ctx.Done():
		return Sandbox{}, waitError(ctx, "sandbox "+e.id+" to end")
	}
}

// stop carries out an end that was asked for. It may be called again and by several at once.
func (m *Manager) stop(ctx context.Context, e *entry) (Sandbox, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopFor)
	defer cancel()
	sb := e.snapshot()
	if sb.State == StateStopping {
		// The decided cause survives a crash before the end is recorded; if it cannot be written the end goes on.
		if err := m.save(ctx, e); err != nil && !fault.Is(err, fault.Conflict) {
			m.log.Warn("cause of end is not recorded yet", "sandbox", e.id, "tenant", e.tenant, "error", err)
		}
	}
	usage, err := m.driver.Usage(ctx, e.id)
	if err != nil {
		usage = Usage{} // it may never have run
	}
	err = m.driver.Stop(ctx, e.id, sb.Cause)
	if err != nil && !fault.Is(err, fault.NotFound) && !fault.Is(err, fault.Gone) {
		m.again(e, StateStopping)
		return Sandbox{}, fmt.Errorf("stop sandbox %s: %w", e.id, err)
	}
	m.record(ctx, e, Ended{ID: e.id, At: now(), Usage: usage})
	return e.snapshot(), nil
}

// record makes a sandbox ended, exactly once, and returns when whoever was first has tried to write that.
func (m *Manager) record(ctx context.Context, e *entry, end Ended) {
	if e.finish(end) {
		m.settle(ctx, e)
		return
	}
	select {
	case <-e.tried:
	case <-e.ended: // it never came as far as a row
	}
}

// settle writes the end of a sandbox and lets go of it; where the store fails the clock tries again, and memory
// answers for the row until then.
func (m *Manager) settle(ctx context.Context, e *entry) bool {
	defer e.settle()
	e.saving.Lock()
	_ = m.enroll(ctx, e) // without a row there is nothing to write to, as Save says
	r := e.record()
	sb := r.Sandbox
	event := LifecycleEvent{Type: LifecycleEnded, At: sb.EndedAt, Cause: sb.Cause, Message: sb.CauseMessage}
	err := m.write(ctx, r, m.store.Save, event)
	e.saving.Unlock()
	if errors.Is(err, ErrMoved) { // its end is the other server's to tell
		m.log.Warn("sandbox was taken over by another server while it ended here", "sandbox", e.id, "tenant", e.tenant)
		m.drop(e)
		return true
	}
	// Conflict: an earlier attempt was written after all. NotFound: nothing is left to write to.
	if err != nil && !fault.Is(err, fault.Conflict) && !fault.Is(err, fault.NotFound) {
		m.log.Error("end of sandbox is not recorded yet", "sandbox", e.id, "tenant", e.tenant, "cause", sb.Cause, "error", err)
		m.again(e, StateEnded)
		return false
	}
	m.log.Info("sandbox ended", "sandbox", e.id, "tenant", e.tenant, "cause", sb.Cause, "message", sb.CauseMessage)
	m.observer.Ended(sb)
	m.ends.add(e.tenant)
	m.drop(e)
	return true
}

// decided is called when a sandbox was started or was not. Whoever asked for its end meanwhile may have left.
func (m *Manager) decided(e *entry) {
	close(e.started)
	m.again(e, StateStopping)
}

// again puts a sandbox back on the clock for what failed in a state; if it is past that state, somebody else did it.
func (m *Manager) again(e *entry, failed State) {
	e.mu.Lock()
	if e.sb.State == failed {
		e.retry = time.Now().Add(retryAfter)
	}
	e.mu.Unlock()
	m.clock.update(e)
}

// fire is called by the clock for a sandbox that may be due.
func (m *Manager) fire(e *entry) {
	cause, pause := e.overdue(time.Now())
	switch {
	case cause == "":
		m.clock.update(e)
	case pause:
		m.work.Go(func() { m.pauseDue(e, cause) })
	default:
		m.work.Go(func() { m.expire(e, cause) })
	}
}

func (m *Manager) expire(e *entry, cause Cause) {
	e.mu.Lock()
	unsettled := e.sb.State == StateEnded && !e.retry.IsZero()
	e.retry = time.Time{}
	state, told := e.sb.State, e.told
	e.mu.Unlock()
	if unsettled && m.settle(m.life, e) && told {
		m.forget(m.life, e.id)
	}
	if state == StateEnded { // without anything to retry it ended since the clock looked, and whoever did that records it
		return
	}
	if _, err := m.end(m.life, e, cause, ""); err != nil && m.life.Err() == nil {
		m.log.Warn("sandbox is not stopped yet", "sandbox", e.id, "tenant", e.tenant, "cause", cause, "error", err)
	}
}

// follow records every end that the driver reports, until the Manager closes.
func (m *Manager) follow() {
	for m.life.Err() == nil {
		for end, err := range m.driver.Ended(m.life) {
			if err != nil {
				if m.life.Err() == nil {
					m.log.Warn("driver does not tell ends; asking again", "error", err)
				}
				break
			}
			m.hear(end)
		}
		select {
		case <-m.life.Done():
		case <-time.After(retryAfter):
		}
	}
}

// hear takes in one end and lets the driver forget it once the row says so.
func (m *Manager) hear(end Ended) {
	m.mu.Lock()
	e := m.living[end.ID]
	if e == nil && m.server != "" { // whoever it belongs to records it, and may be gone before
		m.foreign[end.ID] = end
		m.mu.Unlock()
		return
	}
	m.mu.Unlock()
	if e != nil && e.finish(end) && !m.settle(m.life, e) {
		e.mu.Lock()
		e.told = true
		e.mu.Unlock()
		return
	}
	m.forget(m.life, end.ID)
}

func (m *Manager) forget(ctx context.Context, id string) {
	if err := m.driver.Forget(ctx, id); err != nil && ctx.Err() == nil {
		m.log.Warn("driver did not forget an end", "sandbox", id, "error", err)
	}
}
