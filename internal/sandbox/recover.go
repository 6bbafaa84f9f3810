package sandbox

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
)

// Open takes over what an earlier server left: it adopts the sandboxes that live, records the end of those that do
// not, and stops what has no row. Then the Manager answers. After an error it is closed.
func (m *Manager) Open(ctx context.Context) error {
	if err := m.cfg.Validate(); err != nil {
		return err
	}
	if err := m.checkNetwork(m.cfg.DefaultNetwork, policy.EveryTenant); err != nil {
		return fmt.Errorf("default network: %w", err)
	}
	var missing []lost
	if m.cfg.Server == "" { // of several the first takes over, when it knows that it is: TakeOver
		records, err := m.store.Gather(ctx, "")
		if err != nil {
			return fmt.Errorf("read living sandboxes: %w", err)
		}
		instances, err := m.instances(ctx)
		if err != nil {
			return err
		}
		missing = m.readopt(ctx, records, instances)
		m.stopStrays(ctx, instances)
	}
	m.work.Go(m.follow)
	m.work.Go(func() { m.clock.run(m.life, m.fire) })
	m.work.Go(m.sweep)
	m.work.Go(m.boundEnded)
	m.work.Go(m.sampling)
	m.explain(ctx, missing)
	m.mu.Lock()
	m.open = true
	m.mu.Unlock()
	return nil
}

func (m *Manager) instances(ctx context.Context) (map[string]Instance, error) {
	list, err := m.driver.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list sandboxes of driver %s: %w", m.driver.Caps().Name, err)
	}
	instances := make(map[string]Instance, len(list))
	for _, i := range list {
		instances[i.ID] = i
	}
	return instances, nil
}

// lost is a sandbox with a row and without an instance.
type lost struct {
	entry  *entry
	bootID string
}

// readopt enters every row into memory, takes its instance out of instances and returns the rows that had none
// although they should.
func (m *Manager) readopt(ctx context.Context, records []Record, instances map[string]Instance) (missing []lost) {
	for _, r := range records {
		e := newEntry(r.Sandbox, r.IdempotencyKey, r.SpecDigest)
		e.unspent, e.server = r.Unspent, r.Server
		close(e.started)
		m.mu.Lock()
		m.keep(e)
		m.mu.Unlock()
		instance, lives := instances[r.ID]
		delete(instances, r.ID)
		switch r.State {
		case StateRunning, StatePaused:
			if m.foretold(ctx, e) {
				continue
			}
			if !lives {
				missing = append(missing, lost{e, r.BootID})
				continue
			}
			m.adopt(ctx, e, instance)
		case StateStarting: // whoever asked for it never heard of it
			m.stopLeft(ctx, e, CauseStartFail, "the server stopped while it was starting")
		case StateStopping:
			m.stopLeft(ctx, e, r.Cause, r.CauseMessage)
		case StateEnded: // never among the living
		}
	}
	return missing
}

// narrowTries is how often a driver is asked to narrow a sandbox's network, a second apart.
const narrowTries = 5

// narrowNetwork closes what the operator's rules, which may have changed since, no longer allow a
// sandbox.
func (m *Manager) narrowNetwork(ctx context.Context, e *entry) (narrowed bool, err error) {
	sb := e.snapshot()
	if m.cfg.Networks.Check(sb.Network, e.tenant) == nil {
		return false, nil
	}
	n := m.cfg.Networks.Narrow(sb.Network, e.tenant)
	for try := 1; ; try++ {
		if err = m.driver.Change(ctx, e.id, Change{Network: &n}); err == nil {
			break
		}
		if try == narrowTries {
			return false, err
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return false, err
		}
	}
	e.mu.Lock()
	e.sb.Network = n
	e.mu.Unlock()
	m.log.Warn("a sandbox's network is narrowed to what is allowed now", "sandbox", e.id, "tenant", e.tenant, "mode", n.Mode)
	return true, nil
}

// adopt trusts the driver: its deadline and its state are the ones in force when a crash came between driver and row.
func (m *Manager) adopt(ctx context.Context, e *entry, i Instance) {
	before := e.record()
	if before.State == StatePaused || !before.pausesAtDeadline() { // a deadline that ends in a pause is ours alone
		e.mu.Lock()
		e.sb.Deadline = i.Deadline.UTC().Truncate(time.Microsecond)
		if i.Deadline.IsZero() {
			e.sb.Deadline = time.Time{}
		}
		e.mu.Unlock()
	}
	events := []LifecycleEvent{{Type: LifecycleAdopted}}
	switch {
	case i.Paused && before.Cold && i.Deadline.IsZero() && !before.Deadline.IsZero(): // cut short after its row, as pauseDriver writes it
		e.mu.Lock()
		e.sb.Deadline = before.Deadline
		e.mu.Unlock()
		m.setDeadline(ctx, e, before.Deadline)
	case i.Paused && before.State == StateRunning:
		m.adoptPaused(ctx, e, before, i.Deadline)
		events = append(events, LifecycleEvent{Type: LifecyclePaused, Deadline: e.snapshot().Deadline})
	case !i.Paused && before.State == StatePaused:
		m.adoptResumed(ctx, e, before)
		events = append(events, LifecycleEvent{Type: LifecycleResumed, Deadline: e.snapshot().Deadline})
	}
	narrowed, err := m.narrowNetwork(ctx, e)
	if err != nil {
		m.log.Error("a sandbox is ended: its network is no longer allowed and cannot be narrowed", "sandbox", e.id, "tenant", e.tenant, "error", err)
		m.stopLeft(ctx, e, CauseShutdown, "its network is no longer allowed on this server and could not be narrowed")
		return
	}
	if narrowed {
		events = append(events, LifecycleEvent{Type: LifecycleNetwork, Message: string(e.snapshot().Network.Mode)})
	}
	if err := m.save(ctx, e, events...); err != nil {
		m.log.Warn("adoption is not recorded", "sandbox", e.id, "tenant", e.tenant, "error", err)
	}
	m.clock.update(e)
	m.observer.Adopted(e.snapshot())
}

// adoptPaused takes over a pause that the row does not know. It lasts until the driver's deadline; what is left for after
// it is what the row leaves. One that the row's deadline has passed for is taken for the pause of that deadline, and so as
// cold as that was to be: no use must resume a sandbox whose processes are gone.
func (m *Manager) adoptPaused(ctx context.Context, e *entry, before Record, until time.Time) {
	expired := !before.Deadline.IsZero() && !before.Deadline.After(now())
	left := before.Deadline
	if expired { // while nobody watched, or at the pause
		left = deadlineOf(now(), m.cfg.DefaultLifetime)
	}
	if before.pausesAtDeadline() && until.IsZero() { // the pause was cut short before it had a deadline of its own
		until = deadlineOf(now(), m.cfg.PausedLifetime)
		m.setDeadline(ctx, e, until)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.enter(StatePaused)
	e.sb.Cold = expired && before.pausesAtDeadline() && before.ColdPause
	e.sb.PausedAt, e.sb.Deadline = now(), until.UTC().Truncate(time.Microsecond)
	if until.IsZero() {
		e.sb.Deadline = time.Time{}
	}
	e.unspent = unspent(left, e.sb.PausedAt)
}

func (m *Manager) setDeadline(ctx context.Context, e *entry, deadline time.Time) {
	if err := m.driver.Change(ctx, e.id, Change{Deadline: &deadline}); err != nil {
		m.log.Warn("deadline of an adopted sandbox is not set", "sandbox", e.id, "tenant", e.tenant, "error", err)
	}
}

// adoptResumed takes over a resume that the row does not know. Where the deadline of the pause is still in force, the
// resume was cut short before it set the one that follows.
func (m *Manager) adoptResumed(ctx context.Context, e *entry, before Record) {
	deadline := e.snapshot().Deadline
	cut := deadline.Equal(before.Deadline)
	if cut || before.pausesAtDeadline() {
		deadline = deadlineOf(now(), before.Unspent)
	}
	e.resume(deadline)
	if cut {
		m.setDeadline(ctx, e, e.driverDeadline())
	}
}

func (m *Manager) stopLeft(ctx context.Context, e *entry, cause Cause, message string) {
	e.ask(cause, message)
	if _, err := m.stop(ctx, e); err != nil {
		m.log.Warn("sandbox is not stopped yet", "sandbox", e.id, "tenant", e.tenant, "cause", cause, "error", err)
	}
}

// stopStrays ends instances without a living row, which no client could reach. An instance without any
// row gets one that has ended, with its event, so that its tenant learns why it is gone.
func (m *Manager) stopStrays(ctx context.Context, instances map[string]Instance) {
	var lost, ended []string
	tenants := map[string]bool{}
	for _, id := range slices.Sorted(maps.Keys(instances)) {
		i := instances[id]
		if err := m.driver.Stop(ctx, id, CauseRecordLost); err != nil && !fault.Is(err, fault.NotFound) {
			m.log.Warn("stray sandbox is not stopped", "sandbox", id, "tenant", i.Tenant, "error", err)
			continue
		}
		_, err := m.store.Get(ctx, id)
		if err == nil {
			ended = append(ended, id)
			continue
		}
		if fault.Is(err, fault.NotFound) {
			err = m.recordLost(ctx, i)
		}
		if err != nil {
			m.log.Warn("end of a stray sandbox is not recorded", "sandbox", id, "tenant", i.Tenant, "error", err)
		}
		lost, tenants[i.Tenant] = append(lost, id), true
	}
	if len(lost) > 0 {
		m.log.Warn("sandboxes without a row were ended: the database lost its last changes, or is an older copy; "+
			"sessions, artifacts and keys of that time are gone too", "count", len(lost), "tenants", len(tenants), "sandboxes", some(lost))
	}
	if len(ended) > 0 {
		m.log.Warn("sandboxes that lived on after their end was recorded were ended", "count", len(ended), "sandboxes", some(ended))
	}
}

// some keeps a line of the log short.
func some(ids []string) []string { return ids[:min(len(ids), 10)] }

// recordLost writes the row of an instance that has none, as one that has ended.
func (m *Manager) recordLost(ctx context.Context, i Instance) error {
	at := now()
	started := i.Started.UTC().Truncate(time.Microsecond)
	if i.Started.IsZero() {
		started = at
	}
	m.mu.Lock()
	server := m.server
	m.mu.Unlock()
	r := Record{Server: server, Sandbox: Sandbox{
		ID: i.ID, Tenant: i.Tenant, Template: i.Template, State: StateEnded, CreatedAt: started, StartedAt: started, EndedAt: at, LastUsed: at,
		Network: m.cfg.DefaultNetwork, Storage: StorageVolatile,
		Cause: CauseRecordLost, CauseMessage: "the server's database had no record of it when the server started",
	}}
	event := LifecycleEvent{Type: LifecycleEnded, At: at, Cause: r.Cause, Message: r.CauseMessage}
	return m.write(ctx, r, m.store.Insert, event)
}

// explain gives the driver a moment to tell how missing sandboxes ended, and then concludes it from what is known.
func (m *Manager) explain(ctx context.Context, missing []lost) {
	grace, cancel := context.WithTimeout(ctx, m.cfg.EndedGrace)
	defer cancel()
	for _, l := range missing {
		select {
		case <-l.entry.ended:
			continue
		case <-grace.Done():
		}
		end := Ended{ID: l.entry.id, Cause: CauseMakerDied, Message: "the process that kept it is gone"}
		switch {
		case m.cfg.Lost.Cause != "":
			end.Cause, end.Message = m.cfg.Lost.Cause, m.cfg.Lost.Message
		case l.bootID != m.cfg.BootID:
			end.Cause, end.Message = CauseHostReboot, "the host restarted"
		}
		m.record(ctx, l.entry, end)
	}
}
