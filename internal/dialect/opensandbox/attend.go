package opensandbox

import (
	"sync"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/sandbox"
)

// Sandboxes are resumed and ended by others too: through other dialects, by their clocks, by themselves. What there is to do
// then is heard in the events of their tenants.

// attended is a tenant whose events are heard.
type attended struct {
	volumes sync.Mutex // held while volumes that end with their sandboxes are made or removed
}

// tenants are those whose events are heard.
type tenants struct {
	mu  sync.Mutex
	all map[string]*attended
}

func newTenants() *tenants { return &tenants{all: map[string]*attended{}} }

// attend begins to hear a tenant's events, if nobody does yet.
func (a *API) attend(tenant string) *attended {
	a.tenants.mu.Lock()
	defer a.tenants.mu.Unlock()
	t := a.tenants.all[tenant]
	if t == nil {
		t = &attended{}
		a.tenants.all[tenant] = t
		a.work.Go(func() { a.listen(auth.Principal{Tenant: tenant}) })
	}
	return t
}

// How soon something that failed in the background is tried again, the first time and after many.
const (
	retryFirst = 50 * time.Millisecond
	retryMost  = 10 * time.Second
)

// sleep waits, and tells whether the API still lives then.
func (a *API) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return a.life.Err() == nil
	case <-a.life.Done():
		return false
	}
}

// listen hears a tenant's events until the API or the domain ends. What happened before is passed over: whoever begins to
// listen looks at everything as it is now.
func (a *API) listen(who auth.Principal) {
	begun := time.Now().Add(-time.Second) // an event is dated before it can be read
	a.tidyVolumes(a.life, who)
	q := sandbox.EventQuery{Follow: true, Internal: true}
	for pause := retryFirst; ; pause = min(2*pause, retryMost) {
		var failed error
		for e, err := range a.sandboxes.Events(a.life, who, q) {
			if failed = err; err != nil {
				break
			}
			q.After, pause = e.Seq, retryFirst
			if e.At.After(begun) {
				a.heard(who, e)
			}
		}
		if failed == nil || a.life.Err() != nil {
			return
		}
		a.log.Warn("events of sandboxes cannot be read; trying again", "tenant", who.Tenant, "error", failed)
		if !a.sleep(pause) {
			return
		}
	}
}

func (a *API) heard(who auth.Principal, e sandbox.LifecycleEvent) {
	switch e.Type {
	case sandbox.LifecycleResumed, sandbox.LifecycleAdopted:
		if sb, err := a.sandboxes.Get(a.life, who, e.Sandbox); err == nil { // else it has ended meanwhile
			a.adopt(sb)
		}
	case sandbox.LifecyclePaused:
		if sb, err := a.sandboxes.Get(a.life, who, e.Sandbox); err == nil {
			a.chill(sb)
		}
	case sandbox.LifecycleEnded:
		a.mains.thaw(e.Sandbox)
		a.tidyVolumes(a.life, who)
	case sandbox.LifecycleCreated, sandbox.LifecycleStarted, sandbox.LifecycleLifetime, sandbox.LifecycleNetwork, sandbox.LifecycleMetadata,
		sandbox.LifecycleForked, sandbox.LifecycleSnapshot:
	}
}
