package sandbox

import (
	"context"
	"fmt"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// Lookup finds a sandbox of any tenant, ended ones too while they are retained, with a principal of its tenant. It is for
// an edge that checks what guards the sandbox itself instead of a key: whoever calls it must do so.
func (m *Manager) Lookup(ctx context.Context, id string) (auth.Principal, Sandbox, error) {
	m.mu.Lock()
	e := m.living[id]
	m.mu.Unlock()
	if e != nil {
		return auth.Principal{Tenant: e.tenant}, e.snapshot(), nil
	}
	r, err := m.store.Get(ctx, id)
	if fault.Is(err, fault.NotFound) {
		return auth.Principal{}, Sandbox{}, fault.New(fault.NotFound, "there is no sandbox %.64q", id)
	}
	if err != nil {
		return auth.Principal{}, Sandbox{}, fmt.Errorf("read sandbox %s: %w", id, err)
	}
	return auth.Principal{Tenant: r.Tenant}, r.Sandbox, nil
}

// closed is what Stopped gives for whatever does not run.
var closed = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Stopped is closed once a sandbox that runs does so no more: it was paused, ends or has ended. It is closed already for
// one that does not run or is not known.
func (m *Manager) Stopped(id string) <-chan struct{} {
	m.mu.Lock()
	e := m.living[id]
	m.mu.Unlock()
	if e == nil {
		return closed
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.stopped
}

// Each yields the living sandboxes of all tenants, in no order, until the caller has seen enough.
func (m *Manager) Each(yield func(Sandbox) bool) {
	for _, e := range m.entries() {
		if sb := e.snapshot(); sb.State.Living() && !yield(sb) {
			return
		}
	}
}

// Running is how many sandboxes of the caller's tenant can be used now, but for those with an annotation of that name.
func (m *Manager) Running(p auth.Principal, without string) (n int) {
	for _, e := range m.entries() {
		if e.tenant == p.Tenant && e.runs(without) {
			n++
		}
	}
	return n
}

// entries are the living sandboxes of this moment.
func (m *Manager) entries() []*entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]*entry, 0, len(m.living))
	for _, e := range m.living {
		all = append(all, e)
	}
	return all
}
