package sandbox

import (
	"container/heap"
	"context"
	"sync"
	"time"
)

// clock wakes the Manager when a sandbox is due: one goroutine and one timer for all of them.
type clock struct {
	wake chan struct{} // the earliest time may have changed

	mu   sync.Mutex
	heap dueHeap
}

func newClock() *clock { return &clock{wake: make(chan struct{}, 1)} }

// update asks an entry when it is due, under the clock's own lock so that the last change is the one that counts.
// The caller does not hold the entry's mu.
func (c *clock) update(e *entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := e.due()
	e.at = at
	switch {
	case at.IsZero() && e.index >= 0:
		heap.Remove(&c.heap, e.index)
	case at.IsZero():
	case e.index >= 0:
		heap.Fix(&c.heap, e.index)
	default:
		heap.Push(&c.heap, e)
	}
	if e.index == 0 {
		select {
		case c.wake <- struct{}{}:
		default:
		}
	}
}

// run calls fire for every entry that is due, which takes it off the clock, until ctx ends. fire must not block.
func (c *clock) run(ctx context.Context, fire func(*entry)) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		due, next := c.pop()
		for _, e := range due {
			fire(e)
		}
		timer.Reset(next)
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		case <-timer.C:
		}
	}
}

// pop takes off what is due and says how long until the next is.
func (c *clock) pop() (due []*entry, next time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := time.Now()
	for len(c.heap) > 0 && !at.Before(c.heap[0].at) {
		due = append(due, heap.Pop(&c.heap).(*entry))
	}
	if len(c.heap) == 0 {
		return due, time.Hour
	}
	// A deadline is wall time, which may jump: look at least once a minute.
	return due, min(c.heap[0].at.Sub(at), time.Minute)
}

type dueHeap []*entry

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *dueHeap) Push(x any) {
	e := x.(*entry)
	e.index = len(*h)
	*h = append(*h, e)
}

func (h *dueHeap) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = nil
	e.index = -1
	*h = old[:len(old)-1]
	return e
}
