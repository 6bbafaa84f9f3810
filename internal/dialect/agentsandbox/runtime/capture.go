package runtime

import (
	"fmt"
	"sync"
	"sync/atomic"
)

// How much output is kept: of one command's each stream, of all of a tenant's commands and of all of a server's together. What is
// beyond is read and dropped, and the answer says so.
const (
	maxCapture = 8 << 20
	maxTenant  = 256 << 20
	maxServer  = 1 << 30
	minCapture = 16 << 10 // that a command has although there is no room
)

// shelf is the room that outputs have together: a tenant's, within the server's.
type shelf struct {
	most  int64 // bytes
	taken atomic.Int64
	in    *shelf // nil: in none
}

// add takes room, or gives it back, and tells whether too much is taken now.
func (s *shelf) add(n int) (full bool) {
	for ; s != nil; s = s.in {
		full = s.taken.Add(int64(n)) > s.most || full
	}
	return full
}

// shelves are those of all tenants.
type shelves struct {
	all shelf

	mu sync.Mutex
	by map[string]*shelf
}

func newShelves() *shelves { return &shelves{all: shelf{most: maxServer}, by: map[string]*shelf{}} }

func (s *shelves) of(tenant string) *shelf {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.by[tenant] == nil {
		s.by[tenant] = &shelf{most: maxTenant, in: &s.all}
	}
	return s.by[tenant]
}

// capture is the beginning of an output.
type capture struct {
	on      *shelf
	kept    []byte
	dropped int64
}

func (c *capture) write(p []byte) {
	fits := p[:min(len(p), maxCapture-len(c.kept))]
	if len(fits) > 0 && c.on.add(len(fits)) && len(c.kept)+len(fits) > minCapture {
		c.on.add(-len(fits))
		fits = nil
	}
	c.kept = append(c.kept, fits...)
	c.dropped += int64(len(p) - len(fits))
}

func (c *capture) text() string { return string(c.kept) }

// note says what is missing; empty: nothing.
func (c *capture) note(what string) string {
	if c.dropped == 0 {
		return ""
	}
	return fmt.Sprintf("[%d bytes of the command's %s are left out: it wrote more than an answer holds]", c.dropped, what)
}

// release gives the room of a run's output back.
func (r *run) release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.over = true // whatever still comes is of no use
	for _, c := range []*capture{&r.out, &r.err} {
		c.on.add(-len(c.kept))
		c.kept = nil
	}
}
