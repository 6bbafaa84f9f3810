package maker

import (
	"context"
	"slices"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// Housekeeping: every tenant and template that was ever used would otherwise keep a zygote and a pool for good, and a
// layer that was changed behind our back would be in every sandbox.
const (
	maxPools  = 16
	tidyEvery = time.Minute
)

var verifyEvery = 6 * time.Hour // a variable for tests

// keepHouse runs until the maker closes.
func (m *Maker) keepHouse() {
	tidy, verify := time.NewTicker(tidyEvery), time.NewTicker(verifyEvery)
	defer tidy.Stop()
	defer verify.Stop()
	for {
		select {
		case <-tidy.C:
			m.putAway()
			m.sweepTemplates()
		case <-verify.C:
			m.verify(m.life)
		case <-m.closed:
			return
		}
	}
}

// putAway closes the pools that were not used for the longest time, beyond maxPools, and those of removed templates, while
// nobody lives in them.
func (m *Maker) putAway() {
	for m.closeIdle(m.surplus) {
	}
}

// surplus reports whether an idle pool is not worth its memory. Called with m.mu.
func (m *Maker) surplus(p *pool) bool { return p.removed || len(m.pools) > maxPools }

// closeIdle closes the least used of the idle pools that may be closed; may is called with m.mu. It
// reports whether there was one.
func (m *Maker) closeIdle(may func(*pool) bool) bool {
	p := m.leastUsed(may)
	if p == nil {
		return false
	}
	m.log.Info("pool put away", "template", p.template.Name, "tenant", p.key.tenant)
	p.close()
	if p.nursery == nil { // else the owner is the nursery's
		m.slots.giveOwner(p.owner)
	}
	return true
}

// How long a template that was built again is kept after it was replaced, and how long the garbage collector waits for a
// builder to finish.
const (
	supersededFor = time.Hour
	sweepPatience = time.Second
)

// sweepTemplates closes the pools of templates that were built again since, once no sandbox lives in them, and removes
// those templates. A host whose packages are updated daily would else collect hundreds of megabytes a month.
func (m *Maker) sweepTemplates() {
	old := m.templates.Superseded(supersededFor)
	if len(old) == 0 {
		return
	}
	m.mu.Lock()
	nurseries := map[*pool]bool{}
	for _, p := range m.pools {
		nurseries[p.nursery] = true
	}
	for _, p := range m.pools {
		if slices.Contains(old, p.template.Digest) && !nurseries[p] {
			p.removed = true
		}
	}
	m.mu.Unlock()
	m.putAway()
	var inUse []*template.Template
	m.mu.Lock()
	for _, p := range m.pools {
		inUse = append(inUse, p.template)
	}
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(m.life, sweepPatience)
	defer cancel()
	if err := m.templates.Sweep(ctx, inUse, supersededFor); err != nil && ctx.Err() == nil {
		m.log.Warn("templates that were built again are not removed", "error", err)
	}
}

// leastUsed takes the least used of the idle pools that may be closed out of the table, or gives
// nil. Pools whose template was removed go first.
func (m *Maker) leastUsed(may func(*pool) bool) *pool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing {
		return nil
	}
	inUse := map[*pool]bool{}
	for _, l := range m.sandboxes {
		inUse[l.pool] = true
	}
	for _, p := range m.pools {
		inUse[p.nursery] = true
	}
	var least *pool
	for _, p := range m.pools {
		if inUse[p] || !p.idle() || !may(p) {
			continue
		}
		if least == nil || p.removed || !least.removed && p.lastUse().Before(least.lastUse()) {
			least = p
		}
	}
	if least != nil {
		delete(m.pools, least.key)
	}
	return least
}

// verify hashes the layers of every built template again. All sandboxes share their pages: one that no longer matches is
// not started from any more.
func (m *Maker) verify(ctx context.Context) {
	for _, info := range m.templates.All() {
		if info.Digest == "" {
			continue
		}
		err := m.templates.Verify(ctx, info.Tenant, info.Name)
		if err == nil || ctx.Err() != nil || fault.Is(err, fault.NotFound) { // removed meanwhile
			continue
		}
		m.log.Error("a template's layers are not what was built; it is not used any more", "template", info.Name, "tenant", info.Tenant, "error", err)
		m.mu.Lock()
		m.spoilt[info.Digest] = true
		if info.Tenant == "" {
			m.changed[info.Name] = info.Digest // the server has it built again
		}
		m.mu.Unlock()
	}
}

// errSpoilt is a template whose layers changed after they were built. That is remembered as long as the maker lives, which the
// server's restart does not end. A template that is built again has another digest.
func errSpoilt(name string) error {
	return fault.New(fault.Unavailable, "the layers of template %s were changed after they were built: no sandbox starts from it until it is built again", name)
}
