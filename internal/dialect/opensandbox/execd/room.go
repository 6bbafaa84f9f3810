package execd

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
)

const (
	maxCommands  = 1000 // that a sandbox is known to have had
	maxSessions  = 256
	maxTerminals = 64
	sweepEvery   = 30 * time.Second
)

// room is what is known of one sandbox between requests, for as long as the sandbox and this server live.
type room struct {
	id        string
	who       auth.Principal
	replacing chan struct{} // holds one while a request changes contents of files

	mu        sync.Mutex
	account   *agentapi.Account // of the sandbox's user
	plain     time.Time         // until then there is no bash
	commands  map[string]*command
	order     []string // of commands, oldest first
	sessions  map[string]*session
	contexts  map[string]*codeContext
	terminals map[string]*terminal
	making    int // contexts that are being made
}

// rooms are those of all sandboxes.
type rooms struct {
	ended func(ctx context.Context, who auth.Principal, id string) bool

	mu     sync.Mutex
	by     map[string]*room
	timer  *time.Timer // of the next sweep; nil: none is due
	closed bool
	sweeps sync.WaitGroup
}

func newRooms(ended func(context.Context, auth.Principal, string) bool) *rooms {
	return &rooms{ended: ended, by: map[string]*room{}}
}

// of is the room of a request's sandbox.
func (rs *rooms) of(t *access.Target) *room {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r := rs.by[t.Sandbox.ID]
	if r == nil {
		r = &room{
			id: t.Sandbox.ID, who: t.Who, commands: map[string]*command{}, sessions: map[string]*session{},
			contexts: map[string]*codeContext{}, terminals: map[string]*terminal{}, replacing: make(chan struct{}, 1),
		}
		rs.by[r.id] = r
		rs.schedule()
	}
	return r
}

// schedule sets the next sweep; mu is held.
func (rs *rooms) schedule() {
	if rs.timer == nil && !rs.closed && len(rs.by) > 0 {
		rs.sweeps.Add(1)
		rs.timer = time.AfterFunc(sweepEvery, rs.sweep)
	}
}

// sweep forgets the rooms of sandboxes that have ended.
func (rs *rooms) sweep() {
	defer rs.sweeps.Done()
	rs.mu.Lock()
	all := make([]*room, 0, len(rs.by))
	for _, r := range rs.by {
		all = append(all, r)
	}
	rs.mu.Unlock()
	// A lookup in the Manager's memory, or of one row: nobody waits for it, and Close waits no longer than this.
	ctx, cancel := context.WithTimeout(context.Background(), sweepEvery)
	defer cancel()
	for _, r := range all {
		if rs.ended(ctx, r.who, r.id) {
			rs.mu.Lock()
			delete(rs.by, r.id)
			rs.mu.Unlock()
			r.clear()
		}
	}
	rs.mu.Lock()
	defer rs.mu.Unlock()
	rs.timer = nil
	rs.schedule()
}

func (rs *rooms) close() {
	rs.mu.Lock()
	rs.closed = true
	timer := rs.timer
	rs.mu.Unlock()
	if timer != nil && timer.Stop() {
		rs.sweeps.Done()
	}
	rs.sweeps.Wait()
}

// clear gives back what logs took.
func (r *room) clear() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, cmd := range r.commands {
		cmd.log.drop()
	}
	for _, t := range r.terminals {
		t.log.drop()
	}
}

// home is who the sandbox's user is, which does not change.
func (h *Handler) home(c *call) (*agentapi.Account, error) {
	c.room.mu.Lock()
	known := c.room.account
	c.room.mu.Unlock()
	if known != nil {
		return known, nil
	}
	agent, err := h.agent(c)
	if err != nil {
		return nil, err
	}
	who, err := agent.Account(c.ctx(), agentapi.AccountParams{})
	if err != nil {
		return nil, err
	}
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	c.room.account = &who
	return &who, nil
}

func (h *Handler) agent(c *call) (*agentapi.Client, error) {
	return h.sandboxes.Agent(c.ctx(), c.t.Who, c.id())
}

// newID is what commands, sessions, contexts and terminals are called.
func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// admit makes a command known. Of too many the one is forgotten that ended first.
func (r *room) admit(cmd *command) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.order) >= maxCommands {
		at := slices.IndexFunc(r.order, func(id string) bool { return !r.commands[id].running() })
		if at < 0 {
			return &refusal{http.StatusTooManyRequests, codeRuntime, "too many commands run in this sandbox"}
		}
		r.commands[r.order[at]].log.drop()
		delete(r.commands, r.order[at])
		r.order = slices.Delete(r.order, at, at+1)
	}
	r.commands[cmd.id] = cmd
	r.order = append(r.order, cmd.id)
	return nil
}

// forget takes back what admit did, for a command that did not begin.
func (r *room) forget(cmd *command) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.commands, cmd.id)
	if at := slices.Index(r.order, cmd.id); at >= 0 {
		r.order = slices.Delete(r.order, at, at+1)
	}
}

func (r *room) command(id string) (*command, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if cmd := r.commands[id]; cmd != nil {
		return cmd, nil
	}
	return nil, &refusal{http.StatusNotFound, codeNoCommand, "there is no command " + cmp.Or(short(id), "without an id")}
}

// short is a text of the caller's that an error repeats.
func short(text string) string {
	if len(text) > 64 {
		return text[:64] + "…"
	}
	return text
}
