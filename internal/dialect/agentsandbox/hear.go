package agentsandbox

import (
	"context"
	"sync"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// Sandboxes are paused, resumed and ended by others too: through other dialects, by their clocks, by themselves. That is heard
// in the events of their tenants.

// hearing is whose events are heard.
type hearing struct {
	mu  sync.Mutex
	all map[string]bool
}

// hear begins to hear a tenant's events, if nobody does yet.
func (a *API) hear(tenant string) {
	a.hearing.mu.Lock()
	defer a.hearing.mu.Unlock()
	if a.hearing.all[tenant] || a.life.Err() != nil {
		return
	}
	a.hearing.all[tenant] = true
	a.work.Go(func() { a.listen(auth.Principal{Tenant: tenant}) })
}

// How soon events that could not be read are tried again, the first time and after many.
const (
	listenFirst = 50 * time.Millisecond
	listenMost  = 10 * time.Second
)

// listen hears a tenant's events until the API or the domain ends. What happened before is passed over, and not even read:
// a tenant may have had a million sandboxes.
func (a *API) listen(who auth.Principal) {
	q := sandbox.EventQuery{Last: true, Internal: true}
	for pause := listenFirst; ; pause = min(2*pause, listenMost) {
		var failed error
		for e, err := range a.sandboxes.Events(a.life, who, q) {
			if failed = err; err != nil {
				break
			}
			q.After, pause = e.Seq, listenFirst
			if q.Follow {
				a.heard(who.Tenant, e)
			}
		}
		if a.life.Err() != nil || failed == nil && q.Follow {
			return
		}
		if failed == nil { // from here on everything is heard, so now is the time to look how things are
			q.Follow, q.Last = true, false
			a.wakeAll(who.Tenant)
			continue
		}
		a.log.Warn("events of sandboxes cannot be read; trying again", "tenant", who.Tenant, "error", failed)
		if !sleep(a.life, pause) {
			return
		}
	}
}

// wakeAll looks at everything that a tenant has.
func (a *API) wakeAll(tenant string) {
	for _, name := range a.store.realm(tenant).names() {
		a.workers.wake(key{tenant, name.namespace, name.name})
	}
}

func (a *API) heard(tenant string, e sandbox.LifecycleEvent) {
	switch e.Type {
	case sandbox.LifecyclePaused, sandbox.LifecycleResumed, sandbox.LifecycleEnded, sandbox.LifecycleAdopted:
		if o := a.store.realm(tenant).byID(e.Sandbox); o != nil {
			a.workers.wake(key{tenant, o.namespace(), o.name()})
		}
	case sandbox.LifecycleCreated, sandbox.LifecycleStarted, sandbox.LifecycleLifetime, sandbox.LifecycleNetwork,
		sandbox.LifecycleMetadata, sandbox.LifecycleForked, sandbox.LifecycleSnapshot:
	}
}

// sleep waits, and tells whether there is still a reason to.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// end ends a sandbox whose object is gone, after the request that took it away.
func (a *API) end(tenant, id string) {
	if id == "" || a.life.Err() != nil {
		return
	}
	a.work.Go(func() {
		// A server that closes meanwhile still waits for it; the domain bounds how long it takes.
		_, err := a.sandboxes.Kill(context.WithoutCancel(a.life), auth.Principal{Tenant: tenant}, id)
		if err != nil && !fault.Is(err, fault.NotFound) {
			a.log.Warn("sandbox whose object was deleted is not ended yet", "sandbox", id, "tenant", tenant, "error", err)
		}
	})
}
