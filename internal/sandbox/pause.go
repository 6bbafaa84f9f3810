package sandbox

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// settleFor bounds one change of a sandbox at its driver that must come to an end although its caller may have left.
const settleFor = 30 * time.Second

// PauseSpec says how to pause; the zero value is the server's choice.
type PauseSpec struct {
	Lifetime   time.Duration // of the pause; zero: the server's default; negative: none, where allowed
	AutoResume *bool         // nil: as it is
	Cold       bool          // only files are kept: every process is ended first
}

// Pause stops every process of a sandbox until it is resumed; a run that goes on stands still. What was left of its
// lifetime is kept for then. Pausing a paused sandbox returns it as it is.
func (m *Manager) Pause(ctx context.Context, p auth.Principal, id string, spec PauseSpec) (Sandbox, error) {
	lifetime, err := m.cfg.pausedLifetime(spec.Lifetime)
	if err != nil {
		return Sandbox{}, err
	}
	e, leave, err := m.enterUsable(ctx, p, id)
	if err != nil {
		return Sandbox{}, err
	}
	defer leave()
	unlock, err := e.lockChanges(ctx)
	if err != nil {
		return Sandbox{}, err
	}
	defer unlock()
	if sb := e.snapshot(); sb.State == StatePaused {
		return sb, nil
	}
	if err := m.canPause(); err != nil {
		return Sandbox{}, err
	}
	return m.pause(ctx, e, pausing{until: deadlineOf(now(), lifetime), auto: spec.AutoResume, cold: spec.Cold}, "")
}

func (m *Manager) canPause() error {
	if caps := m.driver.Caps(); !caps.Pause {
		return fault.New(fault.Unsupported, "the %s driver cannot pause sandboxes", caps.Name)
	}
	return nil
}

// pausedLifetime turns what was asked for a pause into a duration; negative is none.
func (c Config) pausedLifetime(asked time.Duration) (time.Duration, error) {
	most := max(c.MaxLifetime, c.PausedLifetime)
	switch {
	case asked == 0:
		return c.PausedLifetime, nil
	case c.MaxLifetime > 0 && c.PausedLifetime > 0 && (asked < 0 || asked > most):
		return 0, fault.New(fault.Invalid, "a sandbox may stay paused for at most %v here", most)
	}
	return asked, nil
}

// pause pauses a sandbox in memory and then at its driver; the caller holds the lock of changes. Memory is first: a use
// that comes from now on waits for the lock or is refused, so that none begins in a sandbox that stops under it.
func (m *Manager) pause(ctx context.Context, e *entry, p pausing, message string) (_ Sandbox, err error) {
	undo, err := e.pause(p)
	if err != nil {
		return Sandbox{}, err
	}
	begun := time.Now()
	defer func() { m.observer.Paused(e.snapshot(), time.Since(begun), err) }()
	m.clock.update(e)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleFor)
	defer cancel()
	if err := m.pauseDriver(ctx, e); err != nil {
		undo()
		m.clock.update(e)
		if p.cold {
			m.unrecordCold(ctx, e)
		}
		return Sandbox{}, m.whyGone(ctx, e, fmt.Errorf("pause sandbox %s: %w", e.id, err))
	}
	return m.recordChange(ctx, e, LifecyclePaused, message)
}

func (m *Manager) pauseDriver(ctx context.Context, e *entry) error {
	sb := e.snapshot()
	deadline := sb.Deadline
	if sb.Cold {
		// The row is first: after a crash the driver tells only that it is paused, and no use must resume what has ended.
		if err := m.save(ctx, e); err != nil {
			return fmt.Errorf("record that its processes end: %w", err)
		}
		if err := m.direct(e).Halt(ctx); err != nil {
			return fmt.Errorf("end its processes: %w", err)
		}
	}
	err := m.driver.Pause(ctx, e.id)
	if err == nil {
		err = m.driver.Change(ctx, e.id, Change{Deadline: &deadline})
	}
	if err != nil {
		m.putBack(ctx, e, "resume", m.driver.Resume)
	}
	return err
}

// unrecordCold takes back what pauseDriver wrote ahead. Where that fails the next server finds it running, as its driver says.
func (m *Manager) unrecordCold(ctx context.Context, e *entry) {
	if err := m.save(ctx, e); err != nil {
		m.log.Warn("sandbox runs although its row says that it is paused", "sandbox", e.id, "tenant", e.tenant, "error", err)
	}
}

// putBack undoes a change at the driver that may have happened, in whole or in half. Where even that fails the next use
// or the next server finds out: the driver's word counts.
func (m *Manager) putBack(ctx context.Context, e *entry, what string, do func(context.Context, string) error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleFor)
	defer cancel()
	err := do(ctx, e.id)
	if err != nil && !fault.Is(err, fault.NotFound) && !fault.Is(err, fault.Gone) {
		m.log.Warn("sandbox is not as its row says", "sandbox", e.id, "tenant", e.tenant, "undo", what, "error", err)
	}
}

// recordChange writes a sandbox whose state has changed at its driver; one that has ended since is fault.Gone.
func (m *Manager) recordChange(ctx context.Context, e *entry, kind LifecycleType, message string) (Sandbox, error) {
	err := m.save(ctx, e, LifecycleEvent{Type: kind, Deadline: e.snapshot().Deadline, Message: message})
	sb := e.snapshot()
	if sb.State == StateStopping || sb.State == StateEnded {
		return Sandbox{}, goneError(sb)
	}
	if err != nil {
		return Sandbox{}, fmt.Errorf("record that sandbox %s is %s: %w", e.id, kind, err)
	}
	return sb, nil
}

// atDeadline is the pause of a sandbox whose lifetime has passed. Whoever resumes it without saying for how long gives it
// the server's default: nothing is left.
func (m *Manager) atDeadline(e *entry) pausing {
	return pausing{
		until: deadlineOf(now(), m.cfg.PausedLifetime), cold: e.snapshot().ColdPause, left: max(m.cfg.DefaultLifetime, -1),
	}
}

// pauseDue is the clock's pause. A use, or a change, that has come meanwhile wins.
func (m *Manager) pauseDue(e *entry, due Cause) {
	unlock, err := e.lockChanges(m.life)
	if err != nil {
		return
	}
	defer unlock()
	p := pausing{until: deadlineOf(now(), m.cfg.PausedLifetime)}
	if due == CauseExpired {
		p = m.atDeadline(e)
	}
	p.due = due
	_, err = m.pause(m.life, e, p, string(due))
	switch {
	case err == nil, fault.Is(err, fault.Gone), m.life.Err() != nil:
	case fault.Is(err, fault.Conflict) && e.forking() == 0: // somebody uses it
	default:
		if !fault.Is(err, fault.Conflict) {
			m.log.Warn("sandbox is not paused yet", "sandbox", e.id, "tenant", e.tenant, "cause", due, "error", err)
		}
		e.mu.Lock()
		e.retry = time.Now().Add(retryAfter)
		e.mu.Unlock()
	}
	m.clock.update(e)
}

// Resume lets a paused sandbox go on, for what was left of its lifetime or for a new one: zero is what was left, negative
// none, where allowed. Resuming a running sandbox returns it as it is.
func (m *Manager) Resume(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (Sandbox, error) {
	if lifetime != 0 {
		var err error
		if lifetime, err = m.cfg.lifetime(lifetime); err != nil {
			return Sandbox{}, err
		}
	}
	e, leave, err := m.enterUsable(ctx, p, id)
	if err != nil {
		return Sandbox{}, err
	}
	defer leave()
	return m.resume(ctx, e, lifetime, "")
}

// wake resumes a sandbox for somebody who uses it; others who do so meanwhile wait for the same resume.
func (m *Manager) wake(ctx context.Context, e *entry) error {
	leave, err := m.enter()
	if err != nil {
		return err
	}
	defer leave()
	_, err = m.resume(ctx, e, e.snapshot().ResumeLifetime, "used")
	return err
}

func (m *Manager) resume(ctx context.Context, e *entry, lifetime time.Duration, message string) (_ Sandbox, err error) {
	unlock, err := e.lockChanges(ctx)
	if err != nil {
		return Sandbox{}, err
	}
	defer unlock()
	r := e.record()
	switch r.State {
	case StatePaused:
	case StateRunning:
		return r.Sandbox, nil
	case StateStarting, StateStopping, StateEnded:
		return Sandbox{}, goneError(r.Sandbox)
	}
	begun := time.Now()
	defer func() { m.observer.Resumed(e.snapshot(), time.Since(begun), err) }()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleFor)
	defer cancel()
	deadline := deadlineOf(now(), cmp.Or(lifetime, r.Unspent))
	if err := m.resumeDriver(ctx, e, deadline); err != nil {
		return Sandbox{}, m.whyGone(ctx, e, fmt.Errorf("resume sandbox %s: %w", e.id, err))
	}
	if r.Cold {
		m.boot(ctx, e)
	}
	if !e.resume(deadline) {
		return Sandbox{}, goneError(e.snapshot())
	}
	m.clock.update(e)
	return m.recordChange(ctx, e, LifecycleResumed, message)
}

func (m *Manager) resumeDriver(ctx context.Context, e *entry, deadline time.Time) error {
	if sb := e.snapshot(); sb.pausesAtDeadline() {
		deadline = time.Time{}
	}
	err := m.driver.Resume(ctx, e.id)
	if err == nil {
		err = m.driver.Change(ctx, e.id, Change{Deadline: &deadline})
	}
	if err != nil {
		m.putBack(ctx, e, "pause", m.driver.Pause)
	}
	return err
}

// boot gives a cold sandbox that goes on the kernel that it would have had from its start. Where that fails the next run
// makes one.
func (m *Manager) boot(ctx context.Context, e *entry) {
	_, err := m.makeKernel(ctx, m.direct(e), e.id, agentapi.KernelStartParams{Kernel: agentapi.DefaultKernel, Language: kernelLanguage})
	if err != nil && !fault.Is(err, fault.Unsupported) { // Unsupported: its template has no Python
		m.log.Warn("resumed sandbox has no kernel yet", "sandbox", e.id, "tenant", e.tenant, "error", err)
	}
}

// use counts as use of a sandbox until release. A paused one that may be is resumed first.
func (m *Manager) use(ctx context.Context, e *entry) error {
	for !e.touch() {
		sb := e.snapshot()
		if !sb.wakes() {
			if sb.State == StateRunning { // since touch looked
				continue
			}
			return goneError(sb)
		}
		if err := m.wake(ctx, e); err != nil {
			return err
		}
	}
	return nil
}
