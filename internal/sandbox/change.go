package sandbox

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
)

// SetLifetime gives a sandbox a new deadline, counted from now; negative is none, where allowed, and zero is now.
func (m *Manager) SetLifetime(ctx context.Context, p auth.Principal, id string, d time.Duration) (Sandbox, error) {
	lifetime := d
	if d != 0 { // zero is no request for the default here, but for an end at once
		var err error
		if lifetime, err = m.cfg.lifetime(d); err != nil {
			return Sandbox{}, err
		}
	}
	return m.change(ctx, p, id, func(Sandbox) (adjustment, error) { return lifetimeOf(deadlineOf(now(), lifetime)), nil })
}

// ExtendLifetime makes a running sandbox live for at least so long from now; a later deadline stays.
func (m *Manager) ExtendLifetime(ctx context.Context, p auth.Principal, id string, d time.Duration) (Sandbox, error) {
	lifetime, err := m.cfg.lifetime(d)
	if err != nil {
		return Sandbox{}, err
	}
	return m.change(ctx, p, id, func(sb Sandbox) (adjustment, error) {
		deadline := deadlineOf(now(), lifetime)
		switch {
		case sb.State != StateRunning:
			return adjustment{}, goneError(sb)
		case sb.Deadline.IsZero(), !deadline.IsZero() && !deadline.After(sb.Deadline):
			return adjustment{}, nil
		}
		return lifetimeOf(deadline), nil
	})
}

// SetNetwork replaces a sandbox's network policy.
func (m *Manager) SetNetwork(ctx context.Context, p auth.Principal, id string, n policy.Network) (Sandbox, error) {
	return m.ChangeNetwork(ctx, p, id, NetworkChange{Network: &n})
}

// NetworkChange is a new network policy, with what its dialect keeps of how it was asked for.
type NetworkChange struct {
	Network *policy.Network // nil: the server's default
	Narrow  bool            // as of a Spec
	// Annotate gives annotations to replace, from the sandbox as it is when no other change can come between; an error
	// refuses the change. Nil: none.
	Annotate func(Sandbox) (map[string]string, error)
}

// ChangeNetwork replaces a sandbox's network policy and what is kept with it, both or neither.
func (m *Manager) ChangeNetwork(ctx context.Context, p auth.Principal, id string, c NetworkChange) (Sandbox, error) {
	n := m.cfg.network(c.Network, c.Narrow)
	if err := m.checkNetwork(n, p.Tenant); err != nil {
		return Sandbox{}, err
	}
	return m.change(ctx, p, id, func(sb Sandbox) (adjustment, error) {
		annotations, err := c.annotations(sb)
		if err != nil {
			return adjustment{}, err
		}
		return adjustment{
			Change{Network: &n}, LifecycleEvent{Type: LifecycleNetwork, Message: string(n.Mode)},
			func(sb *Sandbox) { sb.Network, sb.Annotations = n, annotations },
		}, nil
	})
}

// annotations are all that the sandbox has after the change.
func (c NetworkChange) annotations(sb Sandbox) (map[string]string, error) {
	if c.Annotate == nil {
		return sb.Annotations, nil
	}
	replaced, err := c.Annotate(sb)
	if err != nil {
		return nil, err
	}
	all := map[string]string{}
	maps.Copy(all, sb.Annotations)
	maps.Copy(all, replaced)
	return all, checkAnnotations(all)
}

// SetMetadata changes a sandbox's metadata: merge is told what it is when no other change can come between, and gives what
// it shall be.
func (m *Manager) SetMetadata(ctx context.Context, p auth.Principal, id string, merge func(map[string]string) (map[string]string, error)) (Sandbox, error) {
	if err := m.roomForRows(); err != nil {
		return Sandbox{}, err
	}
	return m.change(ctx, p, id, func(sb Sandbox) (adjustment, error) {
		metadata, err := merge(sb.Metadata)
		if err != nil {
			return adjustment{}, err
		}
		if err := checkMetadata(metadata); err != nil {
			return adjustment{}, err
		}
		return adjustment{
			event: LifecycleEvent{Type: LifecycleMetadata}, apply: func(sb *Sandbox) { sb.Metadata = metadata },
		}, nil
	})
}

// adjustment is one change of a sandbox for its driver, for its events and for memory; the zero value is none.
type adjustment struct {
	change Change
	event  LifecycleEvent
	apply  func(*Sandbox)
}

func lifetimeOf(deadline time.Time) adjustment {
	return adjustment{
		Change{Deadline: &deadline}, LifecycleEvent{Type: LifecycleLifetime, Deadline: deadline},
		func(sb *Sandbox) { sb.Deadline = deadline },
	}
}

// change tells the driver first: what it enforces is the truth, and Open takes it over after a crash in between.
func (m *Manager) change(ctx context.Context, p auth.Principal, id string, decide func(Sandbox) (adjustment, error)) (Sandbox, error) {
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
	sb := e.snapshot()
	a, err := decide(sb)
	if err != nil || a.apply == nil {
		return sb, err
	}
	if a.change.Deadline != nil && sb.State == StateRunning && sb.pausesAtDeadline() {
		a.change.Deadline = nil
	}
	if a.change != (Change{}) {
		if err := m.driver.Change(ctx, id, a.change); err != nil {
			return Sandbox{}, m.whyGone(ctx, e, fmt.Errorf("change sandbox %s: %w", id, err))
		}
	}
	e.mu.Lock()
	a.apply(&e.sb)
	e.used = time.Now()
	e.mu.Unlock()
	m.clock.update(e)
	// Conflict: the change was in force, and the sandbox has ended since, perhaps by it.
	if err := m.save(ctx, e, a.event); err != nil && !fault.Is(err, fault.Conflict) {
		return Sandbox{}, fmt.Errorf("record change of sandbox %s: %w", id, err)
	}
	return e.snapshot(), nil
}
