package sandbox

import (
	"context"
	"math"
	"sync"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// slots bound how many sandboxes start at once and how many creates wait for that.
type slots struct {
	free   chan struct{}
	queued chan struct{}
}

func newSlots(starting, queued int) *slots {
	return &slots{free: make(chan struct{}, starting), queued: make(chan struct{}, queued)}
}

func (s *slots) take(ctx context.Context) (free func(), err error) {
	free = func() { <-s.free }
	select {
	case s.free <- struct{}{}:
		return free, nil
	default:
	}
	select {
	case s.queued <- struct{}{}:
		defer func() { <-s.queued }()
	default:
		return nil, fault.New(fault.Unavailable, "too many sandboxes are waiting to start; try again")
	}
	select {
	case s.free <- struct{}{}:
		return free, nil
	case <-ctx.Done():
		return nil, waitError(ctx, "other sandboxes to start")
	}
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

func (r *rates) take(tenant string) error {
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
	if b.tokens < 1 {
		wait := time.Duration((1 - b.tokens) / r.rate * float64(time.Second)).Round(time.Millisecond)
		return fault.New(fault.Exhausted, "%v sandboxes per second may be created; try again in %v", r.rate, wait)
	}
	b.tokens--
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
