package build

import (
	"cmp"
	"context"
	"maps"
	"slices"

	"github.com/covehq/cove/internal/fault"
)

// maxTenantBuilds bounds the builds of all templates of a tenant, which are in memory and in documents.
const maxTenantBuilds = 2000

// newestFirst orders builds; those of the same moment by id.
func newestFirst(a, b *made) int {
	return cmp.Or(b.Created.Compare(a.Created), cmp.Compare(a.ID, b.ID))
}

// sorted are all builds, newest first.
func (s *shelf) sorted() []*made {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.SortedFunc(maps.Values(s.builds), newestFirst)
}

// buildsByTemplate are the builds of every template, newest first: a listing needs them all, and looks at each once.
func (s *shelf) buildsByTemplate() map[string][]*made {
	all := map[string][]*made{}
	for _, m := range s.sorted() {
		all[m.Template] = append(all[m.Template], m)
	}
	return all
}

// makeRoom forgets the oldest builds until at most so many are left. Those that go on stay, and those that tags name.
func (s *shelf) makeRoom(ctx context.Context, most int) error {
	s.changing.Lock()
	defer s.changing.Unlock()
	s.mu.RLock()
	excess := len(s.builds) - most
	s.mu.RUnlock()
	if excess <= 0 {
		return nil
	}
	for _, m := range slices.Backward(s.sorted()) {
		running := m.Started && !m.Status.ended()
		if running || m.Domain != "" {
			continue
		}
		if err := s.deleteBuild(ctx, m.ID); err != nil {
			return err
		}
		if excess--; excess == 0 {
			return nil
		}
	}
	return fault.New(fault.Exhausted, "there are %d builds that go on or have tags, which is the limit; delete a template or remove tags first", most+1)
}
