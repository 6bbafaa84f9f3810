package sandbox

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// slots bound how many sandboxes start at once and how many creates wait for that. Tenants take turns, so one that asks
// for a thousand delays another's first by one start and not by a thousand. One whose starts take long has not all of the slots.
type slots struct {
	most, mostQueued int
	share            int // of one tenant

	mu      sync.Mutex
	taken   int
	held    map[string]int // by tenant; none is 0
	queued  int
	waiting map[string][]*waiter // by tenant, first come first; no empty list
	turns   []string             // the tenants of waiting, whose turn is next first
}

// waiter is a create in the queue. Its turn, or the fault that there will be none, is sent under mu and once.
type waiter struct{ turn chan error }

func newSlots(starting, queued int) *slots {
	return &slots{most: starting, mostQueued: queued, share: starting - starting/4, held: map[string]int{}, waiting: map[string][]*waiter{}}
}

func (s *slots) take(ctx context.Context, tenant string) (free func(), err error) {
	free = func() { s.free(tenant) }
	w, err := s.enter(tenant)
	if w == nil {
		return free, err
	}
	select {
	case err := <-w.turn:
		return free, err
	case <-ctx.Done():
	}
	s.mu.Lock()
	left := s.remove(tenant, w)
	s.mu.Unlock()
	if !left && <-w.turn == nil { // its turn came as it left
		free()
	}
	return nil, waitError(ctx, "other sandboxes to start")
}

var errQueueFull = fault.New(fault.Unavailable, "too many sandboxes are waiting to start; try again")

// enter takes a slot at once, or a place in the queue. A full queue has a place for whoever has fewer in it than another
// tenant, whose last one is turned away for it.
func (s *slots) enter(tenant string) (*waiter, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken < s.most && s.held[tenant] < s.share {
		s.taken++
		s.held[tenant]++
		return nil, nil
	}
	if s.queued >= s.mostQueued {
		greedy := s.longest()
		if len(s.waiting[greedy]) <= len(s.waiting[tenant])+1 {
			return nil, errQueueFull
		}
		last := s.waiting[greedy][len(s.waiting[greedy])-1]
		s.remove(greedy, last)
		last.turn <- errQueueFull
	}
	w := &waiter{turn: make(chan error, 1)}
	if s.waiting[tenant] == nil {
		s.turns = append(s.turns, tenant)
	}
	s.waiting[tenant] = append(s.waiting[tenant], w)
	s.queued++
	return w, nil
}

// longest is the tenant with the most in the queue; mu is held.
func (s *slots) longest() (tenant string) {
	for _, t := range s.turns {
		if len(s.waiting[t]) > len(s.waiting[tenant]) {
			tenant = t
		}
	}
	return tenant
}

// remove takes one out of the queue and reports whether it was there; mu is held.
func (s *slots) remove(tenant string, w *waiter) bool {
	at := slices.Index(s.waiting[tenant], w)
	if at < 0 {
		return false
	}
	s.queued--
	s.waiting[tenant] = slices.Delete(s.waiting[tenant], at, at+1)
	if len(s.waiting[tenant]) == 0 {
		delete(s.waiting, tenant)
		s.turns = slices.DeleteFunc(s.turns, func(t string) bool { return t == tenant })
	}
	return true
}

// free gives a slot back, and to the first of the tenant whose turn it is, who then comes last.
func (s *slots) free(tenant string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken--
	if s.held[tenant]--; s.held[tenant] == 0 {
		delete(s.held, tenant)
	}
	at := slices.IndexFunc(s.turns, func(t string) bool { return s.held[t] < s.share })
	if at < 0 {
		return
	}
	next := s.turns[at]
	s.turns = append(slices.Delete(s.turns, at, at+1), next)
	first := s.waiting[next][0]
	s.remove(next, first)
	s.taken++
	s.held[next]++
	first.turn <- nil
}

// rates is a bucket of create tokens per tenant: a second's worth at once, at least one.
type rates struct {
	rate, burst float64

	mu      sync.Mutex
	buckets map[string]bucket
}

type bucket struct {
	tokens float64
	at     time.Time
}

func newRates(rate float64) *rates {
	return &rates{rate: rate, burst: math.Max(1, rate), buckets: map[string]bucket{}}
}

// take takes n tokens. Where n is more than a bucket holds, a full one will do, and the tenant owes the rest.
func (r *rates) take(tenant string, n int) error {
	if r.rate == 0 {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	at := time.Now()
	b, ok := r.buckets[tenant]
	if !ok {
		b = bucket{tokens: r.burst, at: at}
	}
	b.tokens = math.Min(r.burst, b.tokens+r.rate*at.Sub(b.at).Seconds())
	b.at = at
	defer func() { r.buckets[tenant] = b }()
	if need := math.Min(float64(n), r.burst); b.tokens < need {
		wait := time.Duration((need - b.tokens) / r.rate * float64(time.Second)).Round(time.Millisecond)
		return fault.New(fault.Exhausted, "%v sandboxes per second may be created; try again in %v", r.rate, wait)
	}
	b.tokens -= float64(n)
	return nil
}

// sweep forgets tenants whose bucket is full again.
func (r *rates) sweep() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for tenant, b := range r.buckets {
		if b.tokens+r.rate*time.Since(b.at).Seconds() >= r.burst {
			delete(r.buckets, tenant)
		}
	}
}
