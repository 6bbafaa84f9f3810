// Package fleet makes several servers look like one: it knows which of them live, brings each request to the server that its
// sandbox belongs to, and has what a dead server left taken over. It decides nothing about sandboxes and reads no body.
package fleet

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/sandbox"
)

// Store is where servers find each other. Its clock is the only one that counts.
type Store interface {
	JoinServers(ctx context.Context, server sandbox.Server) error
	LeaveServers(ctx context.Context, id string) error
	// Beat says that a server lives and returns all that do, the oldest first, with what was given to this one. One that the others
	// took for dead is sandbox.ErrExpelled.
	Beat(ctx context.Context, id string, dead time.Duration) ([]sandbox.Server, []sandbox.Record, error)
	// Owner is the server of a living sandbox, or fault.NotFound.
	Owner(ctx context.Context, id string) (string, error)
}

// Sandboxes is what the fleet asks of the domain.
type Sandboxes interface {
	Has(id string) bool
	TakeOver(ctx context.Context, records []sandbox.Record) error
	Expelled(server string)
	Reconcile(ctx context.Context, leads bool) error
}

// Config is what a member of a fleet has to know.
type Config struct {
	URL   string        // where the others reach this one: https://HOST:PORT
	Every time.Duration // how often it says that it lives; zero: 2 s
	Dead  time.Duration // after how long without a word a server is dead; zero: 10 s
	Look  time.Duration // how often it is looked for what nobody else sees to; zero: 15 s
	// LastWords end streams whose server is gone; nil: they are cut.
	LastWords LastWords
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		field    *time.Duration
		standard time.Duration
	}{{&c.Every, 2 * time.Second}, {&c.Dead, 10 * time.Second}, {&c.Look, 15 * time.Second}} {
		if *d.field == 0 {
			*d.field = d.standard
		}
	}
	return c
}

// Office is what only the first server of a fleet does, since its state is in one server's memory.
type Office interface {
	// Take begins it, once everything that a server before had is taken over.
	Take(ctx context.Context) error
	// Resign ends it: another server is first now.
	Resign()
}

// Fleet is this server among the others.
type Fleet struct {
	cfg      Config
	store    Store
	identity *Identity
	peers    *http.Transport
	owners   *owners
	log      *slog.Logger

	life   context.Context // until Leave
	cancel context.CancelFunc
	beats  sync.WaitGroup
	news   chan struct{} // something changed that the work looks at

	mu      sync.Mutex
	me      sandbox.Server
	all     []sandbox.Server // the oldest first
	beaten  time.Time        // when the last sign began that arrived
	pending []sandbox.Record // given to this server and not yet taken over
	gone    bool             // it was expelled, and the work does not know yet
	office  bool             // taken
	domain  Sandboxes        // nil: not yet
	alive   map[string]life  // of the others, for as long as they are there
}

// life is how long a server is there, as far as this one knows.
type life struct {
	context.Context
	end context.CancelFunc
}

// Join enters this server and keeps saying that it lives until Leave.
func Join(ctx context.Context, cfg Config, store Store, identity *Identity, log *slog.Logger) (*Fleet, error) {
	f := &Fleet{cfg: cfg.withDefaults(), store: store, identity: identity, owners: newOwners(), log: log, news: make(chan struct{}, 1), alive: map[string]life{}}
	f.peers = f.newTransport()
	if err := f.enter(ctx); err != nil {
		return nil, err
	}
	f.life, f.cancel = context.WithCancel(context.Background()) // the fleet's own, until Leave
	f.beats.Go(f.keepBeating)
	return f, nil
}

// enter takes a new name and joins under it.
func (f *Fleet) enter(ctx context.Context) error {
	me := sandbox.Server{ID: newName(), URL: f.cfg.URL}
	if err := f.identity.rename(me.ID); err != nil {
		return err
	}
	if err := f.store.JoinServers(ctx, me); err != nil {
		return err
	}
	f.mu.Lock()
	f.gone = f.me.ID != "" // what it had under the name before is others', and so is what it was given
	f.me, f.pending = me, nil
	f.mu.Unlock()
	if err := f.beat(ctx); err != nil {
		return errors.Join(err, f.store.LeaveServers(context.WithoutCancel(ctx), me.ID))
	}
	return nil
}

// newName is a DNS label: servers know each other's certificates by it.
func newName() string { return "sv" + strings.ToLower(rand.Text()[:16]) }

// Me is this server's name at the moment.
func (f *Fleet) Me() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.me.ID
}

// First is the oldest server.
func (f *Fleet) First() (first sandbox.Server, mine bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.all) == 0 {
		return f.me, true
	}
	return f.all[0], f.all[0].ID == f.me.ID
}

// member finds a server that lives.
func (f *Fleet) member(id string) (sandbox.Server, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, one := range f.all {
		if one.ID == id {
			return one, true
		}
	}
	return sandbox.Server{}, false
}

// silent tells whether the others may have taken this server for dead without its knowing.
func (f *Fleet) silent() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return time.Since(f.beaten) > f.cfg.Dead
}

// Leave takes this server out of the fleet, so that another takes over at once.
func (f *Fleet) Leave() error {
	f.cancel()
	f.beats.Wait()
	f.peers.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(context.Background(), f.cfg.Dead) // whoever ends us has ended every other
	defer cancel()
	if err := f.store.LeaveServers(ctx, f.Me()); err != nil {
		return fmt.Errorf("the others learn of it when they miss this one: %w", err)
	}
	return nil
}
