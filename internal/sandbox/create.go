package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
)

// plan is a Spec with everything decided.
type plan struct {
	sandbox  Sandbox
	idem     string
	digest   string
	lifetime time.Duration
	request  StartRequest
	idEnv    string
}

// Create makes a sandbox and returns when it can be used. It makes none, and created is false, when a living one of the
// same tenant has the same Key, or was made by the same request under the same IdempotencyKey. A caller who leaves
// before it runs leaves nothing behind.
func (m *Manager) Create(ctx context.Context, p auth.Principal, spec Spec) (sb Sandbox, created bool, err error) {
	begun := time.Now()
	leave, err := m.enter()
	if err != nil {
		return Sandbox{}, false, err
	}
	defer leave()
	letGo, err := m.uses.hold(ctx, p.Tenant, m.templateOf(spec))
	if err != nil {
		return Sandbox{}, false, err
	}
	defer letGo()
	pl, err := m.plan(ctx, p, spec)
	if err != nil {
		return Sandbox{}, false, err
	}
	for {
		e, mine, err := m.claim(pl)
		if err != nil {
			return Sandbox{}, false, err
		}
		if mine {
			err := m.start(ctx, e, pl)
			if errors.Is(err, errHeld) {
				if sb, again, err := m.joinOther(ctx, pl); !again {
					return sb, false, err
				}
				continue
			}
			sb := e.snapshot()
			m.observer.Created(sb, time.Since(begun), err)
			if err != nil {
				return Sandbox{}, false, err
			}
			return sb, true, nil
		}
		sb, again, err := m.join(ctx, e)
		if !again {
			return sb, false, err
		}
	}
}

// plan validates a Spec and decides what it left open.
func (m *Manager) plan(ctx context.Context, p auth.Principal, spec Spec) (plan, error) {
	if p.Tenant == "" {
		return plan{}, fault.New(fault.Unauthed, "a sandbox needs an owner")
	}
	if err := spec.validate(); err != nil {
		return plan{}, err
	}
	if err := checkLimits(spec.Limits, m.cfg.MaxLimits); err != nil {
		return plan{}, err
	}
	lifetime, err := m.cfg.lifetime(spec.Lifetime)
	if err != nil {
		return plan{}, err
	}
	network := m.cfg.network(spec.Network, spec.NarrowNetwork)
	if spec.Network != nil {
		if err := m.checkNetwork(network, p.Tenant); err != nil {
			return plan{}, err
		}
	}
	if spec.IdleAction == IdlePause || spec.DeadlineAction == IdlePause {
		if err := m.canPause(); err != nil {
			return plan{}, err
		}
	}
	if len(spec.Mounts) > 0 && !m.driver.Caps().Mounts {
		return plan{}, m.noMounts()
	}
	t, err := m.templates.Resolve(ctx, p.Tenant, m.templateOf(spec))
	if err != nil {
		return plan{}, fmt.Errorf("resolve template: %w", err)
	}
	defaults := capLimits(orLimits(t.Limits, m.cfg.DefaultLimits), m.cfg.MaxLimits)
	sb := Sandbox{
		ID: spec.ID, Tenant: p.Tenant, Template: t.Name, TemplateDigest: t.Digest, Key: spec.Key, State: StateStarting,
		IdleTimeout: max(0, cmp.Or(spec.IdleTimeout, m.cfg.DefaultIdleTimeout)),
		IdleAction:  cmp.Or(spec.IdleAction, IdleKill), AutoResume: spec.AutoResume,
		DeadlineAction: cmp.Or(spec.DeadlineAction, IdleKill), ColdPause: spec.ColdPause, ResumeLifetime: m.cfg.atMost(spec.ResumeLifetime),
		Limits: orLimits(spec.Limits, defaults), Metadata: maps.Clone(spec.Metadata), Annotations: maps.Clone(spec.Annotations),
		Network: network, Storage: cmp.Or(spec.Storage, StorageVolatile), Mounts: slices.Clone(spec.Mounts),
	}
	return plan{
		sandbox: sb, idem: spec.IdempotencyKey, digest: spec.digest(), lifetime: lifetime, idEnv: spec.IDEnv,
		request: StartRequest{
			Tenant: p.Tenant, Template: t, Limits: sb.Limits, Network: sb.Network, Storage: sb.Storage,
			Env: maps.Clone(spec.Env), Labels: maps.Clone(spec.Metadata), Mounts: sb.Mounts,
		},
	}, nil
}

func (m *Manager) templateOf(spec Spec) string { return cmp.Or(spec.Template, m.cfg.DefaultTemplate) }

// claim finds the living sandbox that a plan means, or enters a new one for the caller to start.
func (m *Manager) claim(pl plan) (e *entry, mine bool, err error) {
	tenant := pl.sandbox.Tenant
	full := m.roomForRows()
	m.mu.Lock()
	defer m.mu.Unlock()
	if e := m.byIdem[claimKey{tenant, pl.idem}]; e != nil && pl.idem != "" {
		if e.digest != pl.digest {
			return nil, false, fault.New(fault.Conflict, "the idempotency key was used for a different request, which made sandbox %s", e.id)
		}
		return e, false, nil
	}
	if e := m.byKey[claimKey{tenant, pl.sandbox.Key}]; e != nil && pl.sandbox.Key != "" {
		return e, false, nil
	}
	if full != nil {
		return nil, false, full
	}
	if err := m.admit(tenant, 1); err != nil {
		return nil, false, err
	}
	return m.enlist(pl.sandbox, pl.lifetime, pl.idem, pl.digest), true, nil
}

// roomForRows refuses new rows where they would use the reserve of the host's disk.
//
// The driver asks for the space of a sandbox's disk itself. A sandbox in memory has none, but its
// row and events are on this disk for as long as ended sandboxes are kept.
func (m *Manager) roomForRows() error { return m.cfg.Space.Allow(diskspace.Step) }

// admit lets a tenant have n sandboxes more, or says why not; called with mu held.
func (m *Manager) admit(tenant string, n int) error {
	living, most := m.tenants[tenant], m.cfg.MaxPerTenant
	switch {
	case most > 0 && living >= most:
		return fault.New(fault.Exhausted, "%d sandboxes are living, which is the limit; end one first", living)
	case most > 0 && living+n > most:
		return fault.New(fault.Exhausted, "%d sandboxes are living and at most %d may: that leaves no room for %d more", living, most, n)
	}
	return m.rates.take(tenant, n)
}

// enlist gives a new sandbox its id and deadline and enters it into memory; called with mu held.
func (m *Manager) enlist(sb Sandbox, lifetime time.Duration, idem, digest string) *entry {
	sb.ID, sb.CreatedAt = cmp.Or(sb.ID, NewID()), now()
	sb.Deadline = deadlineOf(sb.CreatedAt, lifetime)
	e := newEntry(sb, idem, digest)
	e.server = m.server
	m.keep(e)
	return e
}

// keep enters a living sandbox into memory; called with mu held.
func (m *Manager) keep(e *entry) {
	m.living[e.id] = e
	m.tenants[e.tenant]++
	if e.key != "" {
		m.byKey[claimKey{e.tenant, e.key}] = e
	}
	if e.idem != "" {
		m.byIdem[claimKey{e.tenant, e.idem}] = e
	}
}

// drop takes a sandbox out of memory, once.
func (m *Manager) drop(e *entry) {
	m.clock.update(e)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.living[e.id] != e {
		return
	}
	delete(m.living, e.id)
	if e.key != "" {
		delete(m.byKey, claimKey{e.tenant, e.key})
	}
	if e.idem != "" {
		delete(m.byIdem, claimKey{e.tenant, e.idem})
	}
	if m.tenants[e.tenant]--; m.tenants[e.tenant] == 0 {
		delete(m.tenants, e.tenant)
	}
	close(e.ended)
}

// join waits for a sandbox that somebody else made; again when it is not there any more and the caller must make one.
func (m *Manager) join(ctx context.Context, e *entry) (sb Sandbox, again bool, err error) {
	select {
	case <-e.started:
	case <-ctx.Done():
		return Sandbox{}, false, waitError(ctx, "sandbox "+e.id+" to start")
	}
	err = m.use(ctx, e)
	sb = e.snapshot()
	switch {
	case err == nil:
		m.release(e)
		return sb, false, nil
	case sb.State == StatePaused && !sb.wakes(): // it is there, and only its owner wakes it
		return sb, false, nil
	case sb.State.usable():
		return Sandbox{}, false, err
	}
	e.mu.Lock()
	err, left := e.startErr, e.left
	e.mu.Unlock()
	if err != nil && !left {
		return Sandbox{}, false, err
	}
	select {
	case <-e.ended:
		return Sandbox{}, true, nil
	case <-ctx.Done():
		return Sandbox{}, false, waitError(ctx, "sandbox "+e.id+" to end")
	}
}

// start makes a claimed sandbox run, or records why it does not. Until it returns nobody else asks the driver to stop
// it, because a stop that arrives before the start would be lost.
func (m *Manager) start(ctx context.Context, e *entry, pl plan) error {
	defer m.decided(e)
	startCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(m.life, cancel)()
	e.mu.Lock()
	e.cancel = cancel
	e.mu.Unlock()
	free, err := m.slots.take(startCtx, e.tenant)
	if err != nil {
		return m.unmake(ctx, e, err)
	}
	defer free()
	if e.server != "" && (e.key != "" || e.idem != "") { // another server may be making the same: the rows decide who does, before anything is made
		if err := m.reserve(ctx, e); err != nil {
			return err
		}
	} else {
		defer m.enrollBeside(ctx, e, cancel, e.server != "" || pl.sandbox.ID != "")()
	}
	m.clock.update(e)
	req := pl.request
	req.ID, req.Deadline, req.Env = e.id, e.driverDeadline(), withID(req.Env, pl.idEnv, e.id)
	err = m.startWithin(startCtx, m.cfg.StartTimeout, req)
	began, unrecorded := m.enrollStarted(ctx, e, err == nil && startCtx.Err() == nil)
	if unrecorded != nil {
		return m.discard(ctx, e, fmt.Errorf("record sandbox %s: %w", e.id, unrecorded))
	}
	if err == nil && !began {
		err = m.launched(startCtx, e)
	}
	if err != nil {
		return m.abandon(ctx, e, err)
	}
	m.clock.update(e)
	return nil
}

// rowAfter is how long a start may take, on a server that is alone, before there is a row of it. Most are over by then and are
// written once instead of twice: what else takes processor time makes a start slower. Until then it can be found by its id, which
// nobody has, and is in no list.
const rowAfter = 25 * time.Millisecond

// enrollBeside has the first row of a sandbox written while its driver works, and cancels the start if it cannot be. A crash leaves
// a row that Open ends, an instance that it stops, or both. Whoever has something to record before there is a row writes both.
// With soon that is at once: others ask the rows what there is, or somebody has its id already.
func (m *Manager) enrollBeside(ctx context.Context, e *entry, cancel context.CancelFunc, soon bool) (stop func()) {
	born, after := e.record(), rowAfter
	if soon {
		after = 0
	}
	if e.server != "" {
		born.MostOfTenant = m.cfg.MaxPerTenant
	}
	e.saving.Lock()
	e.unborn = &born
	e.saving.Unlock()
	timer := time.AfterFunc(after, func() {
		e.saving.Lock()
		defer e.saving.Unlock()
		if m.enroll(ctx, e) != nil {
			cancel()
		}
	})
	return func() { timer.Stop() } // one that has begun finds nothing left to write
}

// enroll writes the first row of a sandbox, unless somebody has, with what has happened to it beside its creation; called with
// saving held.
func (m *Manager) enroll(ctx context.Context, e *entry, more ...LifecycleEvent) error {
	if e.unborn == nil {
		return e.unwritten
	}
	born := *e.unborn
	e.unborn = nil
	e.unwritten = m.write(ctx, born, m.store.Insert, append([]LifecycleEvent{{Type: LifecycleCreated, At: born.CreatedAt}}, more...)...)
	return e.unwritten
}

// enrollStarted sees to it that there is a row of a sandbox whose start is over. One that runs and has none yet begins in that row.
func (m *Manager) enrollStarted(ctx context.Context, e *entry, runs bool) (began bool, err error) {
	e.saving.Lock()
	defer e.saving.Unlock()
	if !runs || e.unborn == nil || e.state() != StateStarting {
		return false, m.enroll(ctx, e)
	}
	since := now()
	e.unborn.State, e.unborn.StartedAt, e.unborn.LastUsed = StateRunning, since, since
	if err := m.enroll(ctx, e, LifecycleEvent{Type: LifecycleStarted, At: since}); err != nil {
		return false, err
	}
	return e.begin(since), nil // false: its end is recorded next
}

// withID is an environment with the sandbox's id in one variable, if that has a name.
func withID(env map[string]string, name, id string) map[string]string {
	if name == "" {
		return env
	}
	env = maps.Clone(env)
	if env == nil {
		env = map[string]string{}
	}
	env[name] = id
	return env
}

// discard ends what a driver may have made of a sandbox that could not be recorded. What cannot be ended is kept until it is.
func (m *Manager) discard(ctx context.Context, e *entry, err error) error {
	stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleFor)
	defer cancel()
	if stopErr := m.driver.Stop(stopCtx, e.id, CauseStartFail); stopErr != nil && !fault.Is(stopErr, fault.NotFound) {
		return m.abandon(ctx, e, err)
	}
	return m.unmake(ctx, e, err)
}

// launched makes a sandbox that its driver has started a running one.
func (m *Manager) launched(ctx context.Context, e *entry) error {
	if ctx.Err() != nil {
		return waitError(ctx, "sandbox "+e.id+" to start")
	}
	if !e.begin(now()) {
		return goneError(e.snapshot())
	}
	if err := m.save(ctx, e, LifecycleEvent{Type: LifecycleStarted}); err != nil {
		if fault.Is(err, fault.Conflict) { // it ended before this row was written
			return goneError(e.snapshot())
		}
		return fmt.Errorf("record start of sandbox %s: %w", e.id, err)
	}
	return nil
}

// startWithin bounds the driver: a start that hangs would hold its slot, and in the end all of them.
func (m *Manager) startWithin(ctx context.Context, limit time.Duration, req StartRequest) error {
	late := fault.New(fault.Unavailable, "sandbox %s did not start within %v; the host may be overloaded, try again", req.ID, limit)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, late)
	defer cancel()
	err := m.driver.Start(ctx, req)
	if err != nil && errors.Is(context.Cause(ctx), late) {
		return fault.Wrap(fault.Unavailable, err, "%s", fault.Message(late))
	}
	if err != nil {
		return fmt.Errorf("start sandbox %s: %w", req.ID, err)
	}
	return nil
}

// unmake forgets a sandbox that never reached store or driver.
func (m *Manager) unmake(ctx context.Context, e *entry, err error) error {
	e.mu.Lock()
	e.enter(StateEnded)
	e.startErr, e.left = err, ctx.Err() != nil
	e.mu.Unlock()
	m.drop(e)
	return err
}

// StartFailure returns the sentence that the owner of a sandbox gets for a start that failed. An
// internal error has no sentence of its own: the operator finds it in the log.
func StartFailure(err error) string {
	switch {
	case fault.KindOf(err) != fault.Internal:
		return fault.Message(err)
	case errors.Is(err, context.Canceled):
		return "its caller left while it was starting"
	case errors.Is(err, context.DeadlineExceeded):
		return "it did not start in time"
	}
	return "it could not be started; the server's log says why"
}

// abandon stops a sandbox whose start came to nothing and records that.
func (m *Manager) abandon(ctx context.Context, e *entry, err error) error {
	message := StartFailure(err)
	switch {
	case ctx.Err() != nil:
		message = "its caller left while it was starting"
		err = waitError(ctx, "sandbox "+e.id+" to start")
	case m.life.Err() != nil:
		message = "the server stopped while it was starting"
		err = fault.Wrap(fault.Unavailable, err, "the server is shutting down; try again")
	}
	// It has ended already, by another's request or by itself. What the driver ended because the start failed has no
	// other reason than err.
	if !e.ask(CauseStartFail, message) && e.snapshot().Cause != CauseStartFail {
		err = goneError(e.snapshot())
	}
	e.mu.Lock()
	e.startErr, e.left = err, ctx.Err() != nil
	e.mu.Unlock()
	if _, stopErr := m.stop(ctx, e); stopErr != nil {
		m.log.Warn("sandbox is not stopped yet", "sandbox", e.id, "tenant", e.tenant, "error", stopErr)
	}
	return err
}
