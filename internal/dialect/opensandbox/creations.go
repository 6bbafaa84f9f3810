package opensandbox

import (
	"context"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/covehq/cove/internal/auth"
)

// maxCreations is how many creates of one tenant may go on at once, and maxFailed how many of those that failed are kept.
const (
	maxCreations = 256
	maxFailed    = 64
)

// creation is a sandbox that is being made, or could not be. The domain does not know it while its image is pulled.
type creation struct {
	plan    plan
	who     auth.Principal
	created time.Time
	cancel  context.CancelFunc
	done    chan struct{} // closed when it is decided

	// Written before done is closed, or under the lock of its creations.
	err     error     // why it failed
	ended   time.Time // when
	message string    // what it waits for
}

func (c *creation) decided() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// creations are those of this server.
type creations struct {
	keep time.Duration // how long one that failed stays

	mu  sync.Mutex
	all map[string]*creation // by id
}

func newCreations(keep time.Duration) *creations {
	return &creations{keep: keep, all: map[string]*creation{}}
}

// add enters a creation, unless its tenant has too many.
func (cs *creations) add(c *creation) error {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.prune()
	going := 0
	for _, other := range cs.all {
		if other.who.Tenant == c.who.Tenant && !other.decided() {
			going++
		}
	}
	if going >= maxCreations {
		return told(http.StatusTooManyRequests, codeExhausted, "%d sandboxes are being made, which is the limit; try again later", going)
	}
	cs.all[c.plan.spec.ID] = c
	return nil
}

// find is a tenant's creation, or nil.
func (cs *creations) find(tenant, id string) *creation {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if c := cs.all[id]; c != nil && c.who.Tenant == tenant {
		return c
	}
	return nil
}

// owner is whose creation an id is, for whoever has shown its token.
func (cs *creations) owner(id string) (*creation, bool) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	c, ok := cs.all[id]
	return c, ok
}

// of are a tenant's creations, the newest first.
func (cs *creations) of(tenant string) []*creation {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.prune()
	var list []*creation
	for _, c := range cs.all {
		if c.who.Tenant == tenant {
			list = append(list, c)
		}
	}
	slices.SortFunc(list, func(a, b *creation) int { return b.created.Compare(a.created) })
	return list
}

func (cs *creations) remove(id string) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.all, id)
}

// prune forgets what failed long ago, and the oldest of a tenant that has too many; called with mu held.
func (cs *creations) prune() {
	failed := map[string][]*creation{} // by tenant
	for id, c := range cs.all {
		switch {
		case !c.decided():
		case time.Since(c.ended) > cs.keep:
			delete(cs.all, id)
		default:
			failed[c.who.Tenant] = append(failed[c.who.Tenant], c)
		}
	}
	for _, list := range failed {
		slices.SortFunc(list, func(a, b *creation) int { return a.ended.Compare(b.ended) })
		for _, c := range list[:max(0, len(list)-maxFailed)] {
			delete(cs.all, c.plan.spec.ID)
		}
	}
}

// say notes what a creation waits for, for its owner to see.
func (cs *creations) say(c *creation, message string) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	c.message = message
}

func (cs *creations) said(c *creation) string {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return c.message
}
