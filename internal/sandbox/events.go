package sandbox

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

const (
	eventBatch   = 256     // events read from the store at once
	eventsKept   = 4 * 256 // newest events of a tenant that are in memory while it has followers
	eventReaders = 2       // of a tenant, that read its older events from the store at the same time
)

// Events yields what happened to the caller's sandboxes, oldest first. With Follow it goes on until ctx or the Manager
// ends, and then stops without an error. A tenant that follows more streams than its share gets fault.Exhausted.
func (m *Manager) Events(ctx context.Context, p auth.Principal, q EventQuery) iter.Seq2[LifecycleEvent, error] {
	return func(yield func(LifecycleEvent, error) bool) {
		if q.Sandbox != "" {
			if _, err := m.Get(ctx, p, q.Sandbox); err != nil {
				yield(LifecycleEvent{}, err)
				return
			}
		}
		t, leave, err := m.events.enter(p.Tenant, q.Follow && !q.Internal)
		if err != nil {
			yield(LifecycleEvent{}, err)
			return
		}
		defer leave()
		for {
			more := t.next() // before reading, so that an event written meanwhile ends the wait
			again, ok := m.yieldEvents(ctx, t, &q, yield)
			if !ok || !again && !q.Follow {
				return
			}
			if again {
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

// yieldEvents yields the next events and moves q on. It reports whether there may be more at once.
func (m *Manager) yieldEvents(ctx context.Context, t *tenantEvents, q *EventQuery, yield func(LifecycleEvent, error) bool) (again, ok bool) {
	events, after, again, err := t.read(ctx, *q)
	if err != nil {
		if q.Follow && ctx.Err() != nil {
			return false, false
		}
		yield(LifecycleEvent{}, fmt.Errorf("read events: %w", err))
		return false, false
	}
	for _, event := range events {
		if !yield(event, nil) {
			return false, false
		}
		q.After = event.Seq
	}
	q.After = max(q.After, after)
	return again, true
}

// othersEvery is how often the events of other servers are looked for.
const othersEvery = time.Second

// othersNews is ready when it is time to look; never for a server that is alone.
func (m *Manager) othersNews() <-chan time.Time {
	if m.cfg.Server == "" {
		return nil
	}
	return time.After(othersEvery)
}

// eventFeed has one tenantEvents for each tenant that reads events now.
type eventFeed struct {
	store  Store
	shared bool // other servers write events too
	most   int  // streams that one tenant follows

	mu      sync.Mutex
	tenants map[string]*tenantEvents
}

func newEventFeed(s Store, shared bool, most int) *eventFeed {
	return &eventFeed{store: s, shared: shared, most: most, tenants: map[string]*tenantEvents{}}
}

// enter counts a reader of a tenant's events until leave. One that follows counts against the tenant's share.
func (f *eventFeed) enter(tenant string, follows bool) (_ *tenantEvents, leave func(), err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.tenants[tenant]
	if follows && t != nil && t.followers >= f.most {
		return nil, nil, fault.New(fault.Exhausted, "%d event streams are open; the limit of a tenant is %d: end one, or share one", t.followers, f.most)
	}
	if t == nil {
		t = &tenantEvents{tenant: tenant, store: f.store, shared: f.shared, more: make(chan struct{}),
			memory: make(chan struct{}, 1), readers: make(chan struct{}, eventReaders)}
		f.tenants[tenant] = t
	}
	n := 0
	if follows {
		n = 1
	}
	t.all++
	t.followers += n
	return t, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		t.followers -= n
		if t.all--; t.all == 0 {
			delete(f.tenants, tenant)
		}
	}, nil
}

// tell wakes those who follow a tenant's events.
func (f *eventFeed) tell(tenant string) {
	f.mu.Lock()
	t := f.tenants[tenant]
	f.mu.Unlock()
	if t != nil {
		t.tell()
	}
}

// tenantEvents is what the readers of one tenant's events share. The newest events are read from the store once for all
// followers. Older ones are read for each, by few at a time, so that many readers cannot fill the store's connections.
type tenantEvents struct {
	tenant  string
	store   Store
	shared  bool
	readers chan struct{} // held while older events are read

	all, followers int // guarded by eventFeed.mu

	mu   sync.Mutex
	more chan struct{} // closed by the next tell

	stale  atomic.Bool   // events were written since the newest were read
	memory chan struct{} // held by whoever uses the fields below
	opened bool
	looked time.Time
	newest []LifecycleEvent // all of the tenant's between from and last
	from   int64            // Seq
	last   int64            // Seq
}

func (t *tenantEvents) next() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.more
}

func (t *tenantEvents) tell() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stale.Store(true)
	close(t.more)
	t.more = make(chan struct{})
}

// read returns the next events of a query, the Seq up to which nothing else is there for it, and whether there may be more.
func (t *tenantEvents) read(ctx context.Context, q EventQuery) (events []LifecycleEvent, after int64, again bool, err error) {
	near, last := false, int64(0)
	if q.Follow {
		if events, last, near, err = t.fromMemory(ctx, q.After); err != nil {
			return nil, 0, false, err
		}
	}
	if near {
		again = len(events) == eventBatch
		if again {
			last = events[len(events)-1].Seq
		}
		return ofSandbox(events, q.Sandbox), last, again, nil
	}
	events, err = t.older(ctx, q)
	switch {
	case err != nil:
		return nil, 0, false, err
	case len(events) == eventBatch:
		return events, 0, true, nil
	}
	return events, last, q.Follow, nil // what a follower needs next is in memory
}

// ofSandbox keeps the events of one sandbox; of all where none is named.
func ofSandbox(events []LifecycleEvent, id string) []LifecycleEvent {
	if id == "" {
		return events
	}
	return slices.DeleteFunc(events, func(e LifecycleEvent) bool { return e.Sandbox != id })
}

// older reads from the store when it is this reader's turn.
func (t *tenantEvents) older(ctx context.Context, q EventQuery) ([]LifecycleEvent, error) {
	select {
	case t.readers <- struct{}{}:
		defer func() { <-t.readers }()
		return t.store.Events(ctx, t.tenant, q, eventBatch)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// fromMemory returns a batch of the newest events that follow after, and the Seq of the last there is. It reports whether
// memory goes back that far.
func (t *tenantEvents) fromMemory(ctx context.Context, after int64) (events []LifecycleEvent, last int64, near bool, err error) {
	select {
	case t.memory <- struct{}{}:
		defer func() { <-t.memory }()
	case <-ctx.Done():
		return nil, 0, false, ctx.Err()
	}
	if err := t.refresh(ctx); err != nil {
		return nil, 0, false, err
	}
	if after < t.from {
		return nil, t.last, false, nil
	}
	at, _ := slices.BinarySearchFunc(t.newest, after+1, func(e LifecycleEvent, seq int64) int { return cmp.Compare(e.Seq, seq) })
	return slices.Clone(t.newest[at:min(len(t.newest), at+eventBatch)]), t.last, true, nil
}

// refresh reads what was written since the last time. The caller holds memory.
func (t *tenantEvents) refresh(ctx context.Context) (err error) {
	if !t.opened {
		head, err := t.store.Events(ctx, t.tenant, EventQuery{Last: true}, 1)
		if err != nil {
			return err
		}
		if len(head) > 0 {
			t.from = max(0, head[0].Seq-eventsKept)
			t.last = t.from
		}
		t.opened = true
		t.stale.Store(true)
	}
	if !t.stale.Swap(false) && (!t.shared || time.Since(t.looked) < othersEvery/2) {
		return nil
	}
	defer func() {
		if err != nil {
			t.stale.Store(true)
		}
	}()
	t.looked = time.Now()
	for n := eventBatch; n == eventBatch; {
		batch, err := t.store.Events(ctx, t.tenant, EventQuery{After: t.last}, eventBatch)
		if err != nil {
			return err
		}
		t.keep(batch)
		n = len(batch)
	}
	return nil
}

// keep adds events and forgets the oldest. The caller holds memory.
func (t *tenantEvents) keep(batch []LifecycleEvent) {
	if len(batch) == 0 {
		return
	}
	t.newest = append(t.newest, batch...)
	t.last = batch[len(batch)-1].Seq
	if over := len(t.newest) - eventsKept; over >= eventBatch {
		t.from = t.newest[over-1].Seq
		t.newest = slices.Clone(t.newest[over:])
	}
}
