package image

import "context"

// keyLock lets one at a time, or a few, do something to a thing of a name.
type keyLock struct {
	held  chan struct{}
	users int
}

// lock waits for its turn at a name.
func (s *Service) lock(ctx context.Context, key string) (free func(), err error) {
	return s.place(ctx, key, 1)
}

// place waits until fewer than so many hold a name; all who ask for it say the same number.
func (s *Service) place(ctx context.Context, key string, most int) (free func(), err error) {
	s.mu.Lock()
	l := s.locks[key]
	if l == nil {
		l = &keyLock{held: make(chan struct{}, most)}
		s.locks[key] = l
	}
	l.users++
	s.mu.Unlock()
	forget := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(s.locks, key)
		}
	}
	select {
	case l.held <- struct{}{}:
		return func() { <-l.held; forget() }, nil
	case <-ctx.Done():
		forget()
		return nil, context.Cause(ctx)
	}
}
