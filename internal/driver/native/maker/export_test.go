package maker

import (
	"encoding/binary"
	"strconv"
	"time"

	"github.com/covehq/cove/internal/sandbox"
)

// PlanSize is the size of a plan on the wire.
func PlanSize() int { return binary.Size(plan{}) }

// OOMLog is the memory of the kernel's out-of-memory messages, without the kernel.
type OOMLog struct{ o *oomLog }

// NewOOMLog follows groups below a prefix.
func NewOOMLog(prefix string, tell func(group, text string)) OOMLog {
	return OOMLog{&oomLog{prefix: prefix, victims: map[string]victim{}, tell: func(group string, v victim) { tell(group, v.String()) }}}
}

// Hear takes one record of the kernel's log.
func (l OOMLog) Hear(record string) { l.o.hear(record) }

// Victim of a group.
func (l OOMLog) Victim(group string) (text string, init, ok bool) {
	v, ok := l.o.victim(group)
	return v.String(), v.init, ok
}

// Journal of ends.
type Journal struct{ j *journal }

// NewJournal is empty.
func NewJournal() Journal { return Journal{newJournal()} }

// Add an end.
func (j Journal) Add(id string) { j.j.add(sandbox.Ended{ID: id}) }

// Forget ends.
func (j Journal) Forget(ids ...string) { j.j.forget(ids) }

// From gives the ids at and after a position, and the next position.
func (j Journal) From(position int) ([]string, int) {
	ends, next, _ := j.j.from(position)
	var ids []string
	for _, e := range ends {
		ids = append(ids, e.ID)
	}
	return ids, next
}

// Unescape undoes the escapes of mountinfo.
var Unescape = unescape

// MaxPools is how many pools are kept.
const MaxPools = maxPools

// PutAway tells which of n pools, numbered from the one unused for longest, would be put away when one of them is in use.
func PutAway(n, inUse int) []string {
	m := &Maker{pools: map[poolKey]*pool{}, sandboxes: map[string]*live{}}
	begin := time.Now().Add(-time.Hour)
	for i := range n {
		p := &pool{key: poolKey{tenant: strconv.Itoa(i)}, started: true, taken: begin.Add(time.Duration(i) * time.Second)}
		m.pools[p.key] = p
		if i == inUse {
			m.sandboxes["living"] = &live{pool: p}
		}
	}
	var gone []string
	for p := m.leastUsed(); p != nil; p = m.leastUsed() {
		gone = append(gone, p.key.tenant)
	}
	return gone
}
