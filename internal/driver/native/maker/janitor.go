package maker

import (
	"context"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// Housekeeping: every tenant and template that was ever used would otherwise keep a zygote and a pool for good, and a
// layer that was changed behind our back would be in every sandbox.
const (
	maxPools    = 16
	tidyEvery   = time.Minute
	verifyEvery = 6 * time.Hour
)

// keepHouse runs until the maker closes.
func (m *Maker) keepHouse() {
	tidy, verify := time.NewTicker(tidyEvery), time.NewTicker(verifyEvery)
	defer tidy.Stop()
	defer verify.Stop()
	ctx, cancel := context.WithCancel(context.Background()) // ended by close
	defer cancel()
	go func() {
		select {
		case <-m.closed:
			cancel()
		case <-ctx.Done():
		}
	}()
	for {
		select {
		case <-tidy.C:
			m.putAway()
		case <-verify.C:
			m.verify(ctx)
		case <-m.closed:
			return
		}
	}
}

// putAway closes the pools that were not used for the longest time, beyond maxPools and while nobody lives in them.
func (m *Maker) putAway() {
	for {
		p := m.leastUsed()
		if p == nil {
			return
		}
		m.log.Info("pool put away", "template", p.template.Name, "tenant", p.key.tenant)
		p.close()
	}
}

// leastUsed takes one pool out of the table, if there are too many.
func (m *Maker) leastUsed() *pool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.pools) <= maxPools || m.closing {
		return nil
	}
	inUse := map[*pool]bool{}
	for _, l := range m.sandboxes {
		inUse[l.pool] = true
	}
	var least *pool
	for _, p := range m.pools {
		if !inUse[p] && p.idle() && (least == nil || p.lastUse().Before(least.lastUse())) {
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
	for _, info := range m.templates.List() {
		if info.Digest == "" {
			continue
		}
		err := m.templates.Verify(ctx, info.Name)
		if err == nil || ctx.Err() != nil {
			continue
		}
		m.log.Error("a template's layers are not what was built; it is not used any more", "template", info.Name, "error", err)
		m.mu.Lock()
		m.spoilt[info.Digest] = true
		m.mu.Unlock()
	}
}

// errSpoilt is a template whose layers changed after they were built.
func errSpoilt(digest string) error {
	return fault.New(fault.Unavailable, "the layers of template %s were changed after they were built; remove it from the templates directory and restart the server", digest)
}
