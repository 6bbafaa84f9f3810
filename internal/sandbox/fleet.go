package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// Several servers can share a Store and a driver. Each sandbox belongs to one of them, whose memory is the authority for it: the
// others neither use nor change it. What belonged to a server that is gone is taken over by another, by TakeOver; a server that
// was taken for dead and is not lets go of everything, by Expelled.

// Has tells whether a sandbox belongs to this server and is in its memory.
func (m *Manager) Has(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.living[id] != nil
}

// TakeOver makes sandboxes this server's own, whose rows say so already: it adopts those that live and records the end of those
// that do not.
func (m *Manager) TakeOver(ctx context.Context, records []Record) error {
	if len(records) == 0 {
		return nil
	}
	leave, err := m.enter()
	if err != nil {
		return err
	}
	defer leave()
	instances, err := m.instances(ctx)
	if err != nil {
		return err
	}
	m.log.Info("taking over sandboxes of another server", "count", len(records))
	missing := m.readopt(ctx, m.unknown(records), instances)
	m.work.Go(func() { m.explain(m.life, missing) })
	m.work.Go(m.sampleAll) // the driver begins to watch what it is asked for
	return nil
}

// unknown are those that are not in memory yet.
func (m *Manager) unknown(records []Record) (list []Record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range records {
		if m.living[r.ID] == nil {
			list = append(list, r)
		}
	}
	return list
}

// foretold records the end of a sandbox that was heard while it belonged to another server.
func (m *Manager) foretold(ctx context.Context, e *entry) bool {
	m.mu.Lock()
	end, known := m.foreign[e.id]
	delete(m.foreign, e.id)
	m.mu.Unlock()
	if !known {
		return false
	}
	m.record(ctx, e, end)
	m.forget(ctx, e.id)
	return true
}

// Expelled lets go of every sandbox, since other servers have them now, and gives this server another name for those to come.
func (m *Manager) Expelled(server string) {
	m.mu.Lock()
	m.server = server
	all := make([]*entry, 0, len(m.living))
	for _, e := range m.living {
		all = append(all, e)
	}
	m.mu.Unlock()
	for _, e := range all {
		if e.server != server {
			m.lose(e)
		}
	}
}

// lose lets go of a sandbox that belongs to another server. Whoever uses it here is told to try again.
func (m *Manager) lose(e *entry) {
	e.mu.Lock()
	if e.sb.State == StateEnded { // whoever ends it lets go of it
		e.mu.Unlock()
		return
	}
	e.enter(StateEnded)
	e.sb.Cause, e.sb.CauseMessage, e.retry = causeMoved, "", time.Time{}
	cancel := e.cancel
	e.mu.Unlock()
	if cancel != nil {
		cancel()
	}
	e.settle()
	m.drop(e)
	e.lost()
	m.log.Warn("sandbox belongs to another server now", "sandbox", e.id, "tenant", e.tenant)
}

// errHeld is a create that another server was first with.
var errHeld = errors.New("another server has a sandbox with that key")

// reserve writes the row of a sandbox before it is made, since its key may be another server's already.
func (m *Manager) reserve(ctx context.Context, e *entry) error {
	born := e.record()
	born.MostOfTenant = m.cfg.MaxPerTenant
	e.saving.Lock()
	e.unborn = &born
	err := m.enroll(ctx, e)
	e.saving.Unlock()
	switch {
	case err == nil:
		return nil
	case !fault.Is(err, fault.Conflict):
		return m.unmake(ctx, e, fmt.Errorf("record sandbox %s: %w", e.id, err))
	}
	_ = m.unmake(ctx, e, errHeld) // hands it back
	e.mu.Lock()
	e.left = true // whoever waits for it here looks again
	e.mu.Unlock()
	return errHeld
}

// How often it is looked whether another server is done with a sandbox, at first and after a while.
const (
	lookSoon  = 20 * time.Millisecond
	lookLater = 500 * time.Millisecond
)

// joinOther is join for a sandbox that another server made; again when it is not there any more.
func (m *Manager) joinOther(ctx context.Context, pl plan) (sb Sandbox, again bool, err error) {
	for pause := lookSoon; ; pause = min(2*pause, lookLater) {
		r, err := m.store.Holder(ctx, pl.sandbox.Tenant, pl.sandbox.Key, pl.idem)
		switch {
		case fault.Is(err, fault.NotFound):
			return Sandbox{}, true, nil
		case err != nil:
			return Sandbox{}, false, fmt.Errorf("find the sandbox of a key: %w", err)
		case pl.idem != "" && r.IdempotencyKey == pl.idem && r.SpecDigest != pl.digest:
			return Sandbox{}, false, fault.New(fault.Conflict, "the idempotency key was used for a different request, which made sandbox %s", r.ID)
		case r.State.usable():
			return r.Sandbox, false, nil
		case m.Has(r.ID): // it was taken over meanwhile: memory answers
			return Sandbox{}, true, nil
		}
		select { // it starts, or ends
		case <-time.After(pause):
		case <-ctx.Done():
			return Sandbox{}, false, waitError(ctx, "sandbox "+r.ID+" of another server")
		}
	}
}

// seekOrphans takes over rows of this server's name that it does not have: they were given to it, or written by it, and the news
// of that was lost on its way from the database. Those that it sees twice in a row are neither just beginning nor just ending.
func (m *Manager) seekOrphans(ctx context.Context, rows map[string]string) error {
	m.mu.Lock()
	me := m.server
	m.mu.Unlock()
	orphans, mine := map[string]bool{}, []Record(nil)
	for id, server := range rows {
		if server != me || m.Has(id) {
			continue
		}
		orphans[id] = true
		if !m.orphans[id] {
			continue
		}
		r, err := m.store.Get(ctx, id)
		if err != nil && !fault.Is(err, fault.NotFound) {
			return err
		}
		if err == nil && r.Server == me && r.State != StateEnded {
			mine = append(mine, r)
		}
	}
	m.orphans = orphans
	return m.TakeOver(ctx, mine)
}

// strayFor is how long an instance may be without a row before it is stopped: a row is written while its instance starts.
const strayFor = 45 * time.Second

// Reconcile compares what the driver has with what the rows say, and sees to what nobody else would: sandboxes of this server
// whose instances are gone without a word and ends of other servers' sandboxes that the driver need not remember. The leader also
// stops instances without a row. It is to be called again and again.
func (m *Manager) Reconcile(ctx context.Context, leads bool) error {
	leave, err := m.enter()
	if err != nil {
		return err
	}
	defer leave()
	instances, err := m.instances(ctx)
	if err != nil {
		return err
	}
	rows, err := m.store.Belonging(ctx) // after the instances: what began in between has a row at least
	if err != nil {
		return err
	}
	m.seekMissing(ctx, instances)
	m.forgetForeign(ctx, rows)
	if err := m.seekOrphans(ctx, rows); err != nil {
		return err
	}
	if leads {
		m.seekStrays(ctx, instances, rows)
	}
	return nil
}

// seekMissing records the end of sandboxes that had no instance twice in a row, and that the driver knows nothing of.
func (m *Manager) seekMissing(ctx context.Context, instances map[string]Instance) {
	missing, gone := map[string]bool{}, []lost(nil)
	for _, e := range m.entries() {
		if _, there := instances[e.id]; there || !e.state().usable() {
			continue
		}
		missing[e.id] = true
		if !m.missing[e.id] {
			continue
		}
		if _, err := m.driver.Usage(ctx, e.id); fault.Is(err, fault.NotFound) {
			gone = append(gone, lost{e, m.cfg.BootID})
		}
	}
	m.missing = missing
	m.explain(ctx, gone)
}

func (m *Manager) forgetForeign(ctx context.Context, rows map[string]string) {
	m.mu.Lock()
	var over []string
	for id := range m.foreign {
		if _, lives := rows[id]; !lives {
			over = append(over, id)
			delete(m.foreign, id)
		}
	}
	m.mu.Unlock()
	if len(over) == 0 {
		return
	}
	if err := m.driver.Forget(ctx, over...); err != nil && ctx.Err() == nil {
		m.log.Warn("driver did not forget ends", "count", len(over), "error", err)
	}
}

// seekStrays stops instances that have had no row for a while. How long is measured here: clocks of other servers may be wrong.
func (m *Manager) seekStrays(ctx context.Context, instances map[string]Instance, rows map[string]string) {
	old := map[string]Instance{}
	strays := map[string]time.Time{}
	for id, i := range instances {
		if _, has := rows[id]; has || m.Has(id) {
			continue
		}
		since, seen := m.strays[id]
		if !seen {
			since = time.Now()
		}
		strays[id] = since
		if time.Since(since) >= strayFor {
			old[id] = i
		}
	}
	m.strays = strays
	m.stopStrays(ctx, old)
}
