package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
)

// fleet is a world with several servers: w itself is the first of them.
type fleet struct {
	*world
	db *sqlstore.Store
}

// dead is how long a server of these tests is silent before it is taken for dead. The database has a clock of its own, which the
// tests' does not move.
const dead = time.Hour

func fleetClaims(t *testing.T, cfg sandbox.Config, claims map[string]func(*testing.T, *fleet)) {
	t.Helper()
	for name, claim := range claims {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg.Server = "a"
				w := newWorld(t, cfg)
				f := &fleet{world: w, db: w.store.Store.(*sqlstore.Store)}
				f.join("a")
				claim(t, f)
			})
		})
	}
}

func (f *fleet) join(id string) {
	f.t.Helper()
	if err := f.db.JoinServers(f.t.Context(), sandbox.Server{ID: id, URL: "https://" + id}); err != nil {
		f.t.Fatal(err)
	}
}

// server starts one more.
func (f *fleet) server(id string) *sandbox.Manager {
	f.t.Helper()
	f.join(id)
	cfg := f.cfg
	cfg.Server = id
	m := sandbox.NewManager(cfg, f.driver, f.store, fakeTemplates{}, f.observer, slog.New(slog.DiscardHandler))
	if err := m.Open(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { m.Close() })
	return m
}

// bury takes a server for dead and gives what it had to m.
func (f *fleet) bury(id, heir string, m *sandbox.Manager) int {
	f.t.Helper()
	if err := f.db.LeaveServers(f.t.Context(), id); err != nil {
		f.t.Fatal(err)
	}
	_, taken, err := f.db.Beat(f.t.Context(), heir, dead)
	if err != nil {
		f.t.Fatal(err)
	}
	if err := m.TakeOver(f.t.Context(), taken); err != nil {
		f.t.Fatal(err)
	}
	return len(taken)
}

// leftBehindBy is a row that a server wrote and came no further.
func (f *fleet) leftBehindBy(server string, state sandbox.State, cause sandbox.Cause) string {
	f.t.Helper()
	sb := sandbox.Sandbox{
		ID: "sbleft" + string(state), Tenant: "acme", Template: "python", State: state, Cause: cause, CreatedAt: time.Now().UTC(),
		Storage: sandbox.StorageVolatile,
	}
	if err := f.store.Insert(f.t.Context(), sandbox.Record{Sandbox: sb, BootID: f.cfg.BootID, Server: server}); err != nil {
		f.t.Fatal(err)
	}
	return sb.ID
}

func TestServersShareADriver(t *testing.T) {
	fleetClaims(t, sandbox.Config{}, map[string]func(*testing.T, *fleet){
		"a server that starts leaves the sandboxes of the others alone": func(t *testing.T, f *fleet) {
			id := f.create(sandbox.Spec{}).ID
			b := f.server("b")
			sleep(time.Second)
			f.wantRunning(id)
			if b.Has(id) || !f.Has(id) || f.driver.count("stop") != 0 {
				t.Fatal("it belongs to the one that made it")
			}
		},
		"a sandbox of another server can be seen and not be used": func(t *testing.T, f *fleet) {
			id := f.create(sandbox.Spec{}).ID
			b := f.server("b")
			if sb, err := b.Get(t.Context(), acme, id); err != nil || sb.State != sandbox.StateRunning {
				t.Fatalf("%+v, %v", sb, err)
			}
			_, err := b.Agent(t.Context(), acme, id)
			wantKind(t, err, fault.Unavailable)
		},
		"what a dead server had is adopted by another": func(t *testing.T, f *fleet) {
			kept := f.create(sandbox.Spec{Lifetime: time.Minute}).ID
			b := f.server("b")
			f.Manager.Close()
			if n := f.bury("a", "b", b); n != 1 || !b.Has(kept) {
				t.Fatalf("%d were taken over", n)
			}
			f.Manager = b
			f.wantRunning(kept)
			sleep(time.Minute)
			f.wantEnded(kept, sandbox.CauseExpired)
		},
		"what a dead server was starting or stopping is ended": func(t *testing.T, f *fleet) {
			b := f.server("b")
			f.Manager.Close()
			starting := f.leftBehindBy("a", sandbox.StateStarting, "")
			stopping := f.leftBehindBy("a", sandbox.StateStopping, sandbox.CauseIdle)
			f.driver.put(sandbox.StartRequest{ID: starting, Tenant: "acme"})
			f.bury("a", "b", b)
			f.Manager = b
			synctest.Wait()
			f.wantEnded(starting, sandbox.CauseStartFail)
			f.wantEnded(stopping, sandbox.CauseIdle)
		},
		"what a dead server had and the driver has not is lost": func(t *testing.T, f *fleet) {
			id := f.create(sandbox.Spec{}).ID
			b := f.server("b")
			f.Manager.Close()
			f.driver.vanish()
			f.bury("a", "b", b)
			f.Manager = b
			sleep(time.Second)
			f.wantEnded(id, sandbox.CauseMakerDied)
		},
		"an end that only others heard keeps its cause": func(t *testing.T, f *fleet) {
			id := f.create(sandbox.Spec{}).ID
			b := f.server("b")
			f.Manager.Close()
			f.driver.die(sandbox.Ended{ID: id, Cause: sandbox.CauseOOM, Message: "too much", At: time.Now()})
			synctest.Wait()
			f.bury("a", "b", b)
			f.Manager = b
			f.wantEnded(id, sandbox.CauseOOM)
			if f.driver.remembered() != 0 {
				t.Fatal("the driver was not told to forget it")
			}
		},
		"an end that its server recorded is forgotten by the others": func(t *testing.T, f *fleet) {
			id := f.create(sandbox.Spec{}).ID
			b := f.server("b")
			if _, err := f.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			for _, m := range []*sandbox.Manager{f.Manager, b} {
				if err := m.Reconcile(t.Context(), false); err != nil {
					t.Fatal(err)
				}
			}
			if f.driver.remembered() != 0 {
				t.Fatal("the driver remembers it")
			}
		},
		"a server that was taken for dead writes nothing more": func(t *testing.T, f *fleet) {
			id := f.create(sandbox.Spec{Lifetime: time.Minute}).ID
			a, b := f.Manager, f.server("b")
			f.bury("a", "b", b)
			_, err := a.SetLifetime(t.Context(), acme, id, time.Hour)
			if !errors.Is(err, sandbox.ErrMoved) || !fault.Is(err, fault.Unavailable) {
				t.Fatalf("error is %v", err)
			}
			if a.Has(id) || !b.Has(id) {
				t.Fatal("it is still the dead one's")
			}
			f.Manager = b
			f.wantRunning(id)
		},
		"a server that was taken for dead kills nothing": func(t *testing.T, f *fleet) {
			id := f.create(sandbox.Spec{}).ID
			a, b := f.Manager, f.server("b")
			f.bury("a", "b", b)
			a.Expelled("a2")
			if _, err := a.Kill(t.Context(), acme, id); err != nil { // it tells how the sandbox is
				t.Fatal(err)
			}
			f.Manager = b
			f.wantRunning(id)
			f.join("a2")
			f.Manager = a
			if made := f.create(sandbox.Spec{}); !a.Has(made.ID) {
				t.Fatal("it makes no more sandboxes")
			}
		},
		"a run at a server that was taken for dead ends and says why": func(t *testing.T, f *fleet) {
			id := f.create(sandbox.Spec{}).ID
			a, b := f.Manager, f.server("b")
			ended := make(chan error, 1)
			go func() {
				var last error
				for _, err := range a.Run(t.Context(), acme, id, agentapi.RunParams{Code: "hang"}) {
					last = err
				}
				ended <- last
			}()
			synctest.Wait()
			f.bury("a", "b", b)
			a.Expelled("a2")
			if err := <-ended; !errors.Is(err, sandbox.ErrMoved) {
				t.Fatalf("error is %v", err)
			}
			f.Manager = b
			f.wantRunning(id)
		},
		"two survivors never get the same": func(t *testing.T, f *fleet) {
			for range 20 {
				f.create(sandbox.Spec{})
			}
			f.server("b")
			f.server("c")
			f.Manager.Close()
			if err := f.db.LeaveServers(t.Context(), "a"); err != nil {
				t.Fatal(err)
			}
			var mu sync.Mutex
			seen, work := map[string]int{}, sync.WaitGroup{}
			for _, id := range []string{"b", "c", "b", "c"} {
				work.Go(func() {
					_, taken, err := f.db.Beat(t.Context(), id, dead)
					if err != nil {
						t.Error(err)
					}
					mu.Lock()
					defer mu.Unlock()
					for _, r := range taken {
						seen[r.ID]++
					}
				})
			}
			work.Wait()
			for id, n := range seen {
				if n != 1 {
					t.Errorf("%s was given away %d times", id, n)
				}
			}
			if len(seen) != 20 {
				t.Errorf("%d of 20 were taken over", len(seen))
			}
		},
		"a key means one sandbox on all servers": func(t *testing.T, f *fleet) {
			a, b := f.Manager, f.server("b")
			for round := range 50 {
				spec := sandbox.Spec{Key: fmt.Sprint("k", round)}
				ids, made, work := make([]string, 4), make([]bool, 4), sync.WaitGroup{}
				for i, m := range []*sandbox.Manager{a, b, a, b} {
					work.Go(func() {
						sb, created, err := m.Create(t.Context(), acme, spec)
						if err != nil {
							t.Error(err)
						}
						ids[i], made[i] = sb.ID, created
					})
				}
				work.Wait()
				n := 0
				for i := range ids {
					if made[i] {
						n++
					}
					if ids[i] != ids[0] {
						t.Fatalf("round %d: ids are %v", round, ids)
					}
				}
				if n != 1 {
					t.Fatalf("round %d: %d were made", round, n)
				}
			}
			if f.driver.size() != 50 {
				t.Fatalf("the driver has %d", f.driver.size())
			}
		},
		"an idempotency key with another request is refused on all servers": func(t *testing.T, f *fleet) {
			b := f.server("b")
			f.create(sandbox.Spec{IdempotencyKey: "once"})
			_, _, err := b.Create(t.Context(), acme, sandbox.Spec{IdempotencyKey: "once", Template: "base"})
			wantKind(t, err, fault.Conflict)
		},
		"whoever follows events hears of other servers'": func(t *testing.T, f *fleet) {
			b := f.server("b")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			heard := make(chan sandbox.LifecycleType, 8)
			go func() {
				for e := range b.Events(ctx, acme, sandbox.EventQuery{Follow: true}) {
					heard <- e.Type
				}
			}()
			synctest.Wait()
			f.create(sandbox.Spec{})
			if first := <-heard; first != sandbox.LifecycleCreated {
				t.Fatalf("heard %s", first)
			}
		},
		"an instance without a row is stopped by the leader, after a while": func(t *testing.T, f *fleet) {
			b := f.server("b")
			f.driver.put(sandbox.StartRequest{ID: "sbstray", Tenant: "acme"})
			look := func(m *sandbox.Manager, leads bool) {
				if err := m.Reconcile(t.Context(), leads); err != nil {
					t.Fatal(err)
				}
			}
			for range 6 {
				look(f.Manager, true)
				look(b, false)
				sleep(8 * time.Second)
			}
			if !f.driver.has("sbstray") {
				t.Fatal("it was stopped too soon")
			}
			look(b, false)
			if !f.driver.has("sbstray") {
				t.Fatal("who does not lead stopped it")
			}
			look(f.Manager, true)
			if f.driver.has("sbstray") {
				t.Fatal("it is still there")
			}
		},
		"what was given to a server that did not hear of it is taken over later": func(t *testing.T, f *fleet) {
			id := f.create(sandbox.Spec{}).ID
			b := f.server("b")
			f.Manager.Close()
			if err := f.db.LeaveServers(t.Context(), "a"); err != nil {
				t.Fatal(err)
			}
			if _, taken, err := f.db.Beat(t.Context(), "b", dead); err != nil || len(taken) != 1 {
				t.Fatalf("%d, %v", len(taken), err)
			}
			starting := f.leftBehindBy("b", sandbox.StateStarting, "") // as one whose insert was not heard of
			for range 2 {
				if b.Has(id) {
					t.Fatal("it was taken over at first sight")
				}
				if err := b.Reconcile(t.Context(), false); err != nil {
					t.Fatal(err)
				}
			}
			f.Manager = b
			f.wantRunning(id)
			if !b.Has(id) {
				t.Fatal("it is nobody's")
			}
			f.wantEnded(starting, sandbox.CauseStartFail)
		},
		"a sandbox whose instance vanished without a word is found out": func(t *testing.T, f *fleet) {
			id := f.create(sandbox.Spec{}).ID
			f.driver.vanish()
			for range 2 {
				if err := f.Reconcile(t.Context(), true); err != nil {
					t.Fatal(err)
				}
			}
			f.wantEnded(id, sandbox.CauseMakerDied)
		},
	})
	fleetClaims(t, sandbox.Config{MaxPerTenant: 3}, map[string]func(*testing.T, *fleet){
		"a tenant's limit counts the sandboxes of all servers": func(t *testing.T, f *fleet) {
			b := f.server("b")
			f.create(sandbox.Spec{})
			f.create(sandbox.Spec{})
			if _, _, err := b.Create(t.Context(), acme, sandbox.Spec{}); err != nil {
				t.Fatal(err)
			}
			for _, m := range []*sandbox.Manager{f.Manager, b} {
				_, _, err := m.Create(t.Context(), acme, sandbox.Spec{})
				wantKind(t, err, fault.Exhausted)
			}
			if f.driver.size() != 3 {
				t.Fatalf("the driver has %d", f.driver.size())
			}
			if _, _, err := b.Create(t.Context(), globex, sandbox.Spec{}); err != nil {
				t.Fatal(err)
			}
		},
	})
}

func TestAServerThatIsAloneAgainHasEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, sandbox.Config{Server: "a"})
		id := w.create(sandbox.Spec{}).ID
		w.cfg.Server = ""
		w.restart()
		w.wantRunning(id)
		if !w.Has(id) {
			t.Fatal("it is nobody's")
		}
		if _, err := w.SetLifetime(t.Context(), acme, id, time.Hour); err != nil {
			t.Fatal(err)
		}
	})
}
