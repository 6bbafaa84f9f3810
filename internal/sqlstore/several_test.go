package sqlstore_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/sqlstore/pgtest"
)

// several are servers on one database.
func several(t *testing.T, n int) []*sqlstore.Store {
	t.Helper()
	dsn := pgtest.URL(t)
	all := make([]*sqlstore.Store, n)
	for i := range all {
		all[i] = openPostgres(t, dsn)
	}
	return all
}

// atOnce does something on every server.
func atOnce(t *testing.T, servers []*sqlstore.Store, do func(i int, s *sqlstore.Store) error) {
	t.Helper()
	var all sync.WaitGroup
	for i, s := range servers {
		all.Go(func() {
			if err := do(i, s); err != nil {
				t.Errorf("server %d: %v", i, err)
			}
		})
	}
	all.Wait()
}

func TestServersThatStartAtOnceHaveOneLinkKey(t *testing.T) {
	servers := several(t, 4)
	atOnce(t, servers, func(i int, s *sqlstore.Store) error {
		return s.RotateLinkKey(t.Context(), artifact.LinkKey{ID: fmt.Sprint(i), Secret: "s", Created: time.Now()}, time.Time{}, true)
	})
	if keys, err := servers[0].LinkKeys(t.Context()); err != nil || len(keys) != 1 {
		t.Errorf("%d keys, %v", len(keys), err)
	}
}

func TestOneServerWinsAKey(t *testing.T) {
	servers := several(t, 4)
	var mu sync.Mutex
	won := 0
	atOnce(t, servers, func(i int, s *sqlstore.Store) error {
		for n := range 10 {
			r := record(fmt.Sprintf("sb-%d-%d", i, n))
			r.Key = fmt.Sprintf("key-%d", n)
			if s.Insert(t.Context(), r) == nil {
				mu.Lock()
				won++
				mu.Unlock()
			}
		}
		return nil
	})
	if living, err := servers[0].Living(t.Context()); err != nil || won != 10 || len(living) != 10 {
		t.Errorf("%d were told that they have the key, %d have it, %v", won, len(living), err)
	}
}

func TestListsAndSumsAreRightWhileServersAddAndRemove(t *testing.T) {
	servers := several(t, 3)
	from := []artifact.Dataset{{ID: "d", SHA256: "bb"}}
	const rounds = 25
	atOnce(t, servers, func(i int, s *sqlstore.Store) error {
		for n := range rounds {
			a := artifact.Artifact{ID: fmt.Sprintf("a-%d-%d", i, n), Tenant: "acme", Name: "x", Size: 10, SHA256: "aa", Created: time.Now(),
				Origin: artifact.Origin{Session: fmt.Sprint("s", n%2)}}
			if err := s.AddArtifacts(t.Context(), []artifact.Artifact{a}, from); err != nil {
				return err
			}
			if got, err := s.ArtifactDatasets(t.Context(), "acme", a.ID); err != nil || len(got) != 1 {
				t.Errorf("artifact %s was made from %v, %v", a.ID, got, err)
			}
			if n < rounds-1 {
				if err := s.RemoveArtifact(t.Context(), "acme", a.ID); err != nil {
					return err
				}
			}
		}
		return nil
	})
	want := artifact.Held{Tenant: 30, TenantFiles: 3, Session: 30, Files: 3}
	if held, err := servers[0].ArtifactsHeld(t.Context(), "acme", "s0"); err != nil || held != want {
		t.Errorf("held is %+v, %v", held, err)
	}
}

func TestAServerAloneInItsDatabaseMeetsNoOther(t *testing.T) {
	servers := several(t, 4)
	refused := func(claim string, err error) {
		t.Helper()
		if !fault.Is(err, fault.Conflict) || !strings.Contains(fault.Message(err), "another server uses this database") {
			t.Errorf("%s: %v", claim, err)
		}
	}
	allowed := func(claim string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", claim, err)
		}
	}
	allowed("the first, alone", servers[0].Claim(t.Context(), false))
	var all sync.WaitGroup // each waits for a moment
	all.Go(func() { refused("a second, alone", servers[1].Claim(t.Context(), false)) })
	all.Go(func() { refused("a second that would share", servers[2].Claim(t.Context(), true)) })
	all.Wait()
	allowed("the first is ready", servers[0].Ready(t.Context()))
	allowed("the first, again", servers[0].Claim(t.Context(), true)) // it shares from now on
	allowed("one that shares", servers[2].Claim(t.Context(), true))
	refused("one alone beside them", servers[1].Claim(t.Context(), false))

	// A claim ends with its connection and is made again, unless somebody else was faster.
	exec(t, raw(t, pgtest.URL(t)), "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory'")
	allowed("now alone", servers[3].Claim(t.Context(), false))
	refused("whose claim was lost", servers[0].Ready(t.Context()))
	allowed("who has it now", servers[3].Ready(t.Context()))
	exec(t, raw(t, pgtest.URL(t)), "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory'")
	allowed("who lost it and has it again", servers[0].Ready(t.Context()))
}

func TestServersPruneTheSameRowsOnce(t *testing.T) {
	servers := several(t, 3)
	at := time.Now().Add(-time.Hour).UTC()
	for i := range 40 {
		r := record(fmt.Sprintf("sb%d", i))
		r.State, r.EndedAt = sandbox.StateEnded, at
		if err := servers[0].Insert(t.Context(), r, sandbox.LifecycleEvent{Sandbox: r.ID, Tenant: r.Tenant, Type: sandbox.LifecycleCreated, At: at}); err != nil {
			t.Fatal(err)
		}
	}
	var mu sync.Mutex
	total := 0
	atOnce(t, servers, func(_ int, s *sqlstore.Store) error {
		n, err := s.Prune(t.Context(), time.Now())
		mu.Lock()
		defer mu.Unlock()
		total += n
		return err
	})
	events, err := servers[0].Events(t.Context(), "acme", sandbox.EventQuery{}, 100)
	if total != 40 || err != nil || len(events) != 0 {
		t.Errorf("%d were removed, %d events are left, %v", total, len(events), err)
	}
}

func TestAKeysLastUseNeverGoesBack(t *testing.T) {
	servers := several(t, 2)
	key := auth.KeyRecord{ID: "k1", Tenant: "acme", Hash: "h1", CreatedAt: time.Now()}
	if err := servers[0].InsertKey(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	now := time.Now().UTC().Truncate(time.Microsecond)
	for i, at := range []time.Time{now, now.Add(-time.Minute)} {
		if err := servers[i].TouchKey(t.Context(), key.ID, at); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := servers[1].KeyByHash(t.Context(), key.Hash); err != nil || !got.LastUsed.Equal(now) {
		t.Errorf("last used %v, %v", got.LastUsed, err)
	}
}
