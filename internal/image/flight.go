package image

import (
	"context"
	"errors"
	"sync"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// flight is work that several callers wait for. It goes on while one of them does.
type flight struct {
	cancel context.CancelFunc
	done   chan struct{} // closed when result and err are there
	result any
	err    error

	mu      sync.Mutex
	waiting int
	boards  map[*board]bool
	latest  []template.PullProgress // one for each layer, in the order in which they were first told
}

var errClosed = fault.New(fault.Unavailable, "the server is ending; try again")

// share starts work, or joins the same that somebody else has started, and waits for its end. The work's context is the
// service's own: a caller that leaves ends it only when it was the last.
func (s *Service) share(ctx context.Context, flights map[string]*flight, key string, tell func(template.PullProgress), work func(context.Context, *flight) (any, error)) (any, error) {
	for {
		f, err := s.join(flights, key, work)
		if err != nil {
			return nil, err
		}
		result, err := f.wait(ctx, tell)
		switch {
		case !errors.Is(err, context.Canceled) || ctx.Err() != nil:
			return result, err
		case s.life.Err() != nil:
			return nil, errClosed
		}
		// Whoever joined in the moment in which the last of the others left has got their end, and begins anew.
	}
}

func (s *Service) join(flights map[string]*flight, key string, work func(context.Context, *flight) (any, error)) (*flight, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	before := flights[key]
	if before != nil && before.enter() {
		return before, nil
	}
	ctx, cancel := context.WithCancel(s.life)
	f := &flight{cancel: cancel, done: make(chan struct{}), waiting: 1, boards: map[*board]bool{}}
	flights[key] = f
	s.work.Go(func() {
		defer cancel()
		if before != nil {
			<-before.done // everybody has left it, so it ends; two at once would write the same files
		}
		result, err := work(ctx, f)
		s.mu.Lock()
		if flights[key] == f {
			delete(flights, key)
		}
		s.mu.Unlock()
		f.result, f.err = result, err
		close(f.done)
	})
	return f, nil
}

// enter counts one more who waits; of a flight that everybody has left it is false.
func (f *flight) enter() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.waiting == 0 {
		return false
	}
	f.waiting++
	return true
}

func (f *flight) leave(b *board) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.boards, b)
	if f.waiting--; f.waiting == 0 {
		f.cancel()
	}
}

// wait tells a caller how the work goes, in the caller's own goroutine and at its pace, until it ends or the caller leaves.
func (f *flight) wait(ctx context.Context, tell func(template.PullProgress)) (any, error) {
	b := &board{news: make(chan struct{}, 1)}
	f.watch(b)
	defer f.leave(b)
	if tell == nil {
		tell = func(template.PullProgress) {}
	}
	for {
		select {
		case <-b.news:
			b.read(tell)
		case <-f.done:
			b.read(tell)
			return f.result, f.err
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// watch gives a newcomer all that the others know already.
func (f *flight) watch(b *board) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.boards[b] = true
	for _, p := range f.latest {
		b.post(p)
	}
}

// tell passes news on to all who wait.
func (f *flight) tell(p template.PullProgress) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.latest = latest(f.latest, p)
	for b := range f.boards {
		b.post(p)
	}
}

// board holds news that its reader has not seen: of each layer only the latest, so that a slow reader holds nobody up.
type board struct {
	news chan struct{}

	mu     sync.Mutex
	unread []template.PullProgress
}

func (b *board) post(p template.PullProgress) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.unread = latest(b.unread, p)
	select {
	case b.news <- struct{}{}:
	default:
	}
}

func (b *board) read(tell func(template.PullProgress)) {
	b.mu.Lock()
	unread := b.unread
	b.unread = nil
	b.mu.Unlock()
	for _, p := range unread {
		tell(p)
	}
}

// latest puts news in the place of older of the same layer. Only the very last news of an image is the end of it: that
// one stays behind all others.
func latest(all []template.PullProgress, p template.PullProgress) []template.PullProgress {
	for i := range all {
		if all[i].Layer == p.Layer {
			if p.Layer != "" {
				all[i] = p
				return all
			}
			all = append(all[:i], all[i+1:]...)
			break
		}
	}
	return append(all, p)
}
