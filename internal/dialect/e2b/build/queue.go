package build

import (
	"context"
	"slices"
	"sync"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// What may wait, of everybody and of one tenant; the others are turned away.
const (
	maxQueued            = 256
	maxQueuedTenant      = 16
	maxQueuedBytes       = 64 << 20 // of steps
	maxQueuedTenantBytes = 16 << 20
)

// job is one build on its way.
type job struct {
	who      auth.Principal
	shelf    *shelf
	template string // id
	alias    string
	build    string // id
	want     startRequest
	bytes    int // that want takes
	book     *book
	ctx      context.Context // of this build; its owner is the Builder
	cancel   context.CancelCauseFunc
}

// queue lets a few builds go on at the same time: one of a template, and tenants with fewer of them first.
type queue struct {
	parallel int
	begin    func(*job) // must not block

	mu      sync.Mutex
	shutOff bool
	waiting []*job
	going   map[string]*job // by template
	tenants map[string]int  // how many go on
}

func newQueue(parallel int, begin func(*job)) *queue {
	return &queue{parallel: parallel, begin: begin, going: map[string]*job{}, tenants: map[string]int{}}
}

func (q *queue) add(j *job) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.shutOff {
		return errShutdown
	}
	j.bytes = j.want.size()
	if err := q.room(j); err != nil {
		return err
	}
	q.waiting = append(q.waiting, j)
	q.pump()
	return nil
}

// room tells whether one more may wait; called with mu held.
func (q *queue) room(j *job) error {
	count, own, all := 0, j.bytes, j.bytes
	for _, w := range q.waiting {
		all += w.bytes
		if w.who.Tenant == j.who.Tenant {
			count++
			own += w.bytes
		}
	}
	switch {
	case count >= maxQueuedTenant:
		return fault.New(fault.Exhausted, "%d of your template builds are waiting already; try again later", count)
	case own > maxQueuedTenantBytes:
		return fault.New(fault.Exhausted, "the steps of your template builds that wait are too large together; try again later")
	case len(q.waiting) >= maxQueued || all > maxQueuedBytes:
		return fault.New(fault.Exhausted, "too many template builds are waiting already; try again later")
	}
	return nil
}

// most is how many builds of one tenant may go on: where there is more than one place, one is always left to the others.
func (q *queue) most() int {
	if q.parallel > 1 {
		return q.parallel - 1
	}
	return q.parallel
}

// done makes room for the next.
func (q *queue) done(j *job) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.going, j.template)
	if q.tenants[j.who.Tenant]--; q.tenants[j.who.Tenant] == 0 {
		delete(q.tenants, j.who.Tenant)
	}
	q.pump()
}

// pump begins what may; called with mu held.
func (q *queue) pump() {
	for !q.shutOff && len(q.going) < q.parallel {
		next := -1
		for i, j := range q.waiting {
			may := q.going[j.template] == nil && q.tenants[j.who.Tenant] < q.most()
			if may && (next < 0 || q.tenants[j.who.Tenant] < q.tenants[q.waiting[next].who.Tenant]) {
				next = i
			}
		}
		if next < 0 {
			return
		}
		j := q.waiting[next]
		q.waiting = slices.Delete(q.waiting, next, next+1)
		q.going[j.template] = j
		q.tenants[j.who.Tenant]++
		q.begin(j)
	}
}

// drop takes the builds of a template out of the queue and cancels the one that goes on.
func (q *queue) drop(template string, why error) (dropped []*job) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if j := q.going[template]; j != nil {
		j.cancel(why)
	}
	q.waiting = slices.DeleteFunc(q.waiting, func(j *job) bool {
		if j.template == template {
			dropped = append(dropped, j)
		}
		return j.template == template
	})
	return dropped
}

// shut lets nothing begin any more and gives back what waited.
func (q *queue) shut() []*job {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.shutOff = true
	left := q.waiting
	q.waiting = nil
	return left
}
