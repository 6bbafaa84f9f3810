package sandbox

import (
	"context"
	"fmt"
	"iter"
	"sync"
	"time"

	"github.com/covehq/cove/internal/auth"
)

// eventBatch is how many events are read at once.
const eventBatch = 256

// Events yields what happened to the caller's sandboxes, oldest first. With Follow it goes on until ctx or the Manager
// ends, and then stops without an error.
func (m *Manager) Events(ctx context.Context, p auth.Principal, q EventQuery) iter.Seq2[LifecycleEvent, error] {
	return func(yield func(LifecycleEvent, error) bool) {
		if q.Sandbox != "" {
			if _, err := m.Get(ctx, p, q.Sandbox); err != nil {
				yield(LifecycleEvent{}, err)
				return
			}
		}
		for {
			more := m.feed.next() // before reading, so that nothing falls in between
			n, ok := m.yieldEvents(ctx, p, &q, yield)
			if !ok || n < eventBatch && !q.Follow {
				return
			}
			if n == eventBatch {
				continue
			}
			select {
			case <-more:
			case <-m.othersNews():
			case <-ctx.Done():
				return
			case <-m.life.Done():
				return
			}
		}
	}
}

func (m *Manager) yieldEvents(ctx context.Context, p auth.Principal, q *EventQuery, yield func(LifecycleEvent, error) bool) (n int, ok bool) {
	events, err := m.store.Events(ctx, p.Tenant, *q, eventBatch)
	if err != nil {
		if q.Follow && ctx.Err() != nil {
			return 0, false
		}
		yield(LifecycleEvent{}, fmt.Errorf("read events: %w", err))
		return 0, false
	}
	for _, event := range events {
		if !yield(event, nil) {
			return 0, false
		}
		q.After = event.Seq
	}
	return len(events), true
}

// othersEvery is how often it is looked for what other servers wrote.
const othersEvery = time.Second

// othersNews is ready when it is time to look; never for a server that is alone.
func (m *Manager) othersNews() <-chan time.Time {
	if m.cfg.Server == "" {
		return nil
	}
	return time.After(othersEvery)
}

// feed wakes those who follow events.
type feed struct {
	mu   sync.Mutex
	more chan struct{} // closed by the next tell
}

func newFeed() *feed { return &feed{more: make(chan struct{})} }

func (f *feed) next() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.more
}

func (f *feed) tell() {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.more)
	f.more = make(chan struct{})
}
