package execd

import (
	"context"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/sandbox"
)

// Lines cuts chunks into lines, for tests.
func Lines(raw bool, chunks ...[]byte) (told []string) {
	l := lines{raw: raw}
	tell := func(text string) { told = append(told, text) }
	for _, chunk := range chunks {
		l.next(chunk, tell)
	}
	l.end(tell)
	return told
}

// Journal is a log of a background command, for tests.
type Journal = journal

// NewJournal makes one.
func NewJournal(s *Shelves, tenant string) *Journal {
	return &journal{most: maxJournal, on: s.of(tenant)}
}

func (j *journal) Write(p []byte) { j.write(p) }
func (j *journal) Read(from int64, running bool) (string, int64) {
	text, next := j.read(from, running)
	return string(text), next
}
func (j *journal) Drop() { j.drop() }

// Shelves are where logs are.
type Shelves = shelves

// NewShelves makes them.
var NewShelves = newShelves

// Taken is what all logs take.
func (s *shelves) Taken() int64 { return s.all.taken.Load() }

// What tests read by themselves.
var (
	Patterns       = patterns
	DecodeMetadata = decodeMetadata
	KeepsEnds      = keepsEnds
	StatusOf       = statusOf
)

// The bounds that tests reach.
const (
	MaxLine    = maxLine
	MaxJournal = maxJournal
	MinJournal = minJournal
	MaxTenant  = maxTenantJournal
)

// Rooms are those of sandboxes of which gone tells whether they have ended, for tests.
type Rooms = rooms

// NewRooms makes them.
func NewRooms(gone func(id string) bool) *Rooms {
	return newRooms(func(_ context.Context, _ auth.Principal, id string) bool { return gone(id) })
}

// Of makes a sandbox known.
func (rs *rooms) Of(id string) { rs.of(&access.Target{Sandbox: sandbox.Sandbox{ID: id}}) }

// Close ends them.
func (rs *rooms) Close() { rs.close() }

// Len is how many are known.
func (rs *rooms) Len() int {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return len(rs.by)
}

// Admit makes a command known, one that has ended or not.
func Admit(r *Rooms, id string, ended bool) (known int, err error) {
	room := r.of(&access.Target{Sandbox: sandbox.Sandbox{ID: id}})
	cmd := newCommand("")
	if ended {
		cmd.finish(0, "")
	}
	err = room.admit(cmd)
	return len(room.commands), err
}

// MaxCommands is how many commands of a sandbox are known.
const MaxCommands = maxCommands

// Ended tells whether a sandbox is gone for good.
func (h *Handler) Ended(ctx context.Context, who auth.Principal, id string) bool {
	return h.ended(ctx, who, id)
}
