package session

import (
	"context"
	"slices"
	"sync"

	"github.com/covehq/cove/internal/fault"
)

// maxWaiting is how many cells of one session wait for their turn; the others are turned away.
const maxWaiting = 64

// queue lets one at a time through, in the order in which they came.
type queue struct {
	mu      sync.Mutex
	busy    bool
	waiting []chan struct{} // closed when its turn has come
}

// take waits for its turn, which lasts until done is called.
func (q *queue) take(ctx context.Context) (done func(), err error) {
	q.mu.Lock()
	if !q.busy {
		q.busy = true
		q.mu.Unlock()
		return q.next, nil
	}
	if len(q.waiting) >= maxWaiting {
		q.mu.Unlock()
		return nil, fault.New(fault.Exhausted, "%d cells of this session wait already; wait for some of them to end", maxWaiting)
	}
	turn := make(chan struct{})
	q.waiting = append(q.waiting, turn)
	q.mu.Unlock()
	select {
	case <-turn:
		return q.next, nil
	case <-ctx.Done():
	}
	q.mu.Lock()
	at := slices.Index(q.waiting, turn)
	if at >= 0 {
		q.waiting = slices.Delete(q.waiting, at, at+1)
	}
	q.mu.Unlock()
	if at < 0 { // it came just now
		q.next()
	}
	return nil, fault.Wrap(fault.Unavailable, context.Cause(ctx), "the caller left while the cell waited for its turn")
}

func (q *queue) next() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		q.busy = false
		return
	}
	close(q.waiting[0])
	q.waiting = q.waiting[1:]
}

// lock is a mutex that a caller can stop waiting for.
type lock chan struct{}

func newLock() lock { return make(lock, 1) }

func (l lock) take(ctx context.Context) error {
	select {
	case l <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fault.Wrap(fault.Unavailable, context.Cause(ctx), "the caller left while the session was being changed by another")
	}
}

func (l lock) free() { <-l }
