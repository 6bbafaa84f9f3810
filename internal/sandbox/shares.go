package sandbox

import (
	"sync"

	"github.com/covehq/cove/internal/fault"
)

// shares count what each tenant does in its sandboxes at the same time, so that one tenant cannot take the server's
// descriptors and memory.
type shares struct {
	most int // of one tenant

	mu   sync.Mutex
	held map[string]int // by tenant; none is 0
}

func newShares(most int) *shares { return &shares{most: most, held: map[string]int{}} }

// take reports whether the tenant had room for one more; then free gives it back.
func (s *shares) take(tenant string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[tenant] >= s.most {
		return false
	}
	s.held[tenant]++
	return true
}

func (s *shares) free(tenant string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[tenant]--; s.held[tenant] == 0 {
		delete(s.held, tenant)
	}
}

func (s *shares) full() error {
	return fault.New(fault.Exhausted,
		"%d operations of yours go on in sandboxes, which is the limit of a tenant: end some runs, watches or connections", s.most)
}
