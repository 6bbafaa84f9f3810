package resolver

import (
	"net/netip"
	"sync"
)

// share divides a fixed room among sources. Each may have a quarter of what is free, up to its own limit: a source that
// takes all it can leaves room for the next one, and so do eight of them.
type share struct {
	perSource int

	mu   sync.Mutex
	free int
	held map[netip.Addr]int
}

func newShare(room, perSource int) *share {
	return &share{free: room, perSource: perSource, held: make(map[netip.Addr]int)}
}

func (s *share) take(source netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.free == 0 || s.held[source] >= min(s.perSource, max(1, s.free/4)) {
		return false
	}
	s.free--
	s.held[source]++
	return true
}

func (s *share) give(source netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free++
	if s.held[source]--; s.held[source] == 0 {
		delete(s.held, source)
	}
}
