package execd

import (
	"fmt"
	"sync"
	"sync/atomic"
)

// How much output is kept: of a background command, of a terminal, of all of a tenant's and of all of a server's together.
// What is beyond that has less, and whoever reads the output of a command is told how much is missing.
const (
	maxJournal       = 4 << 20
	maxReplay        = 1 << 20
	maxTenantJournal = 64 << 20
	maxJournals      = 256 << 20
	minJournal       = 64 << 10
)

// shelf is the room that journals have together: a tenant's, within the server's.
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

func newShelves() *shelves { return &shelves{all: shelf{most: maxJournals}, by: map[string]*shelf{}} }

func (s *shelves) of(tenant string) *shelf {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.by[tenant] == nil {
		s.by[tenant] = &shelf{most: maxTenantJournal, in: &s.all}
	}
	return s.by[tenant]
}

// journal makes one for a sandbox of the caller's.
func (h *Handler) journal(c *call, most int) *journal {
	return &journal{most: most, on: h.shelves.of(c.t.Who.Tenant)}
}

// journal is the newest output of something, by its place in all of it. It is kept outside of the sandbox's reach.
type journal struct {
	most int // bytes
	on   *shelf

	mu    sync.Mutex
	kept  []byte
	first int64 // place of kept[0]
	gone  bool  // nothing is kept any more
}

// write adds output; of what becomes too much the oldest part goes.
func (j *journal) write(p []byte) {
	if j == nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.gone {
		return
	}
	j.kept = append(j.kept, p...)
	most := j.most
	if j.on.add(len(p)) {
		most = minJournal
	}
	if len(j.kept) <= most {
		return
	}
	least := most / 4 * 3 // so that not every byte moves all
	over := len(j.kept) - least
	j.kept = append(make([]byte, 0, least), j.kept[over:]...)
	j.first += int64(over)
	j.on.add(-over)
}

// read gives what is kept from a place on and where that ends. What is lost before it is told in a line of its own. While
// more may come, a character that has not come whole waits for its rest.
func (j *journal) read(from int64, running bool) (text []byte, next int64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	end := j.first + int64(len(j.kept))
	if from < j.first {
		text = fmt.Appendf(nil, "[%d bytes of earlier output are not kept]\n", j.first-from)
		from = j.first
	}
	if from >= end {
		return text, end
	}
	part := j.kept[from-j.first:]
	if running {
		part = part[:len(part)-unfinished(part)]
	}
	return append(text, part...), from + int64(len(part))
}

// since gives what is kept from a place on, and the place where that begins.
func (j *journal) since(from int64) (data []byte, at int64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	at = min(max(from, j.first), j.first+int64(len(j.kept)))
	return append([]byte(nil), j.kept[at-j.first:]...), at
}

// end is the place behind the newest.
func (j *journal) end() int64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.first + int64(len(j.kept))
}

// drop gives everything back.
func (j *journal) drop() {
	if j == nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.gone {
		j.on.add(-len(j.kept))
		j.first += int64(len(j.kept))
		j.kept, j.gone = nil, true
	}
}
