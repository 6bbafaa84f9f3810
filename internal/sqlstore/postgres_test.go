package sqlstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/sqlstore/pgtest"
)

// raw is a way around the store.
func raw(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func exec(t testing.TB, db *sql.DB, query string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), query, args...); err != nil {
		t.Fatal(err)
	}
}

// until waits for a condition.
func until(t testing.TB, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !done(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

func TestServersThatStartAtOnceMigrateOnce(t *testing.T) {
	dsn := pgtest.URL(t)
	stores := make([]*sqlstore.Store, 6)
	var all sync.WaitGroup
	for i := range stores {
		all.Go(func() {
			s, err := sqlstore.OpenPostgres(t.Context(), dsn)
			if err != nil {
				t.Errorf("server %d: %v", i, err)
				return
			}
			stores[i] = s
		})
	}
	all.Wait()
	for i, s := range stores {
		if s == nil {
			continue
		}
		if err := s.Insert(t.Context(), record(fmt.Sprintf("sb%d", i))); err != nil {
			t.Error(err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	if living, err := openPostgres(t, dsn).Living(t.Context()); err != nil || len(living) != len(stores) {
		t.Errorf("%d sandboxes, %v", len(living), err)
	}
}

func TestANewerSchemaOfPostgresIsRefused(t *testing.T) {
	dsn := pgtest.URL(t)
	openPostgres(t, dsn)
	exec(t, raw(t, dsn), "UPDATE cove_schema SET version = 999")
	_, err := sqlstore.OpenPostgres(t.Context(), dsn)
	if !fault.Is(err, fault.Unsupported) || !strings.Contains(fault.Message(err), "newer Cove: its schema is version 999") {
		t.Errorf("%v", err)
	}
}

func TestAMigrationThatFailsLeavesNothing(t *testing.T) {
	dsn := pgtest.URL(t)
	db := raw(t, dsn)
	exec(t, db, "CREATE TABLE datasets (mine TEXT)") // which a later step would make
	if _, err := sqlstore.OpenPostgres(t.Context(), dsn); err == nil || !strings.Contains(err.Error(), "migrate to schema version") {
		t.Errorf("%v", err)
	}
	var tables int
	if err := db.QueryRow("SELECT count(*) FROM information_schema.tables WHERE table_schema = current_schema()").Scan(&tables); err != nil || tables != 1 {
		t.Errorf("%d tables, %v", tables, err)
	}
}

// An event that appears later has a higher number than all of its tenant before it: who reads on after the last number would
// otherwise miss some.
func TestEventsOfATenantAreNumberedInTheOrderOfCommits(t *testing.T) {
	dsn := pgtest.URL(t)
	openPostgres(t, dsn)
	db := raw(t, dsn)
	insert := func(tx *sql.Tx, tenant string) (seq int64) {
		err := tx.QueryRowContext(t.Context(), "INSERT INTO events (sandbox, tenant, type, at, deadline, cause, message) VALUES ('sb', $1, 'x', 1, 0, '', '') RETURNING seq", tenant).Scan(&seq)
		if err != nil {
			t.Error(err)
		}
		return seq
	}
	begin := func() *sql.Tx {
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		return tx
	}
	first, second, other := begin(), begin(), begin()
	early := insert(first, "acme")
	late := make(chan int64)
	go func() {
		seq := insert(second, "acme")
		_ = second.Commit()
		late <- seq
	}()
	until(t, "the second transaction waits", func() bool {
		var waiting int
		if err := db.QueryRow("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").Scan(&waiting); err != nil {
			t.Fatal(err)
		}
		return waiting == 1
	})
	if insert(other, "umbrella") == 0 || other.Commit() != nil {
		t.Error("another tenant waits")
	}
	if err := first.Commit(); err != nil {
		t.Fatal(err)
	}
	if seq := <-late; seq <= early {
		t.Errorf("the later event has number %d, the earlier %d", seq, early)
	}
}

func TestAReaderOfEventsMissesNoneWhileServersWrite(t *testing.T) {
	dsn := pgtest.URL(t)
	stores := []*sqlstore.Store{openPostgres(t, dsn), openPostgres(t, dsn)}
	const writers, each = 6, 15
	var all sync.WaitGroup
	for w := range writers {
		all.Go(func() {
			s := stores[w%len(stores)]
			for i := range each {
				r := record(fmt.Sprintf("sb-%d-%d", w, i))
				e := sandbox.LifecycleEvent{Sandbox: r.ID, Tenant: r.Tenant, Type: sandbox.LifecycleCreated, At: r.CreatedAt}
				if err := s.Insert(t.Context(), r, e, e); err != nil {
					t.Error(err)
				}
			}
		})
	}
	written := make(chan struct{})
	go func() { all.Wait(); close(written) }()
	var last int64
	seen := 0
	read := func() {
		events, err := stores[0].Events(t.Context(), "acme", sandbox.EventQuery{After: last}, 1000)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			last, seen = e.Seq, seen+1
		}
	}
	for done := false; !done; {
		select {
		case <-written:
			done = true
		default:
		}
		read()
	}
	if want := writers * each * 2; seen != want {
		t.Errorf("%d events of %d were seen", seen, want)
	}
}

func TestTransactionsInEachOthersWayAreTriedAgain(t *testing.T) {
	dsn := pgtest.URL(t)
	a, b := openPostgres(t, dsn), openPostgres(t, dsn)
	x, y := record("x"), record("y")
	if err := a.InsertAll(t.Context(), []sandbox.Entry{{Record: x}, {Record: y}}); err != nil {
		t.Fatal(err)
	}
	db := raw(t, dsn)
	deadlocks := func() (n int) {
		if err := db.QueryRow("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := deadlocks()
	until(t, "a deadlock was counted", func() bool { // or this test shows nothing
		var all sync.WaitGroup
		for s, order := range map[*sqlstore.Store][]sandbox.Entry{a: {{Record: x}, {Record: y}}, b: {{Record: y}, {Record: x}}} {
			all.Go(func() {
				for range 50 {
					if err := s.SaveAll(t.Context(), order); err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		return deadlocks() > before
	})
}

func TestAConnectionThatWasLostIsMadeAnew(t *testing.T) {
	dsn := pgtest.URL(t)
	s, db := openPostgres(t, dsn), raw(t, dsn)
	if err := s.Insert(t.Context(), record("sb1")); err != nil {
		t.Fatal(err)
	}
	// As a restart of Postgres does. Nobody has to hear of it: nothing was under way.
	for range 5 {
		exec(t, db, "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'cove' AND datname = current_database()")
		_, get := s.Get(t.Context(), "sb1")
		_, list := s.List(t.Context(), "acme", sandbox.ListQuery{})
		_, key := s.KeyByHash(t.Context(), "x")
		if fault.Is(key, fault.NotFound) {
			key = nil
		}
		for what, err := range map[string]error{
			"get": get, "list": list, "key": key, "save": s.Save(t.Context(), record("sb1")), "ready": s.Ready(t.Context()),
			"document": s.PutDocument(t.Context(), "acme", "x", "y", nil),
		} {
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
}

func TestATransactionThatLosesItsConnectionIsUnavailable(t *testing.T) {
	dsn := pgtest.URL(t)
	s, db := openPostgres(t, dsn), raw(t, dsn)
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.Exec("LOCK TABLE documents"); err != nil {
		t.Fatal(err)
	}
	told := make(chan error)
	go func() { told <- s.PutDocument(t.Context(), "acme", "x", "y", nil) }()
	until(t, "the server waits and is cut off", func() bool {
		var cut bool
		err := db.QueryRow("SELECT count(pg_terminate_backend(pid)) > 0 FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())").Scan(&cut)
		if err != nil {
			t.Fatal(err)
		}
		return cut
	})
	if err := <-told; !fault.Is(err, fault.Unavailable) {
		t.Errorf("%v (%s)", err, fault.KindOf(err))
	}
}

func TestAPostgresThatEndsIsUnavailable(t *testing.T) {
	server, err := pgtest.Start()
	if err != nil {
		t.Fatal(err)
	}
	dsn, err := server.Create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := openPostgres(t, dsn)
	if err := s.Insert(t.Context(), record("sb1")); err != nil {
		t.Fatal(err)
	}
	server.Close()
	_, get := s.Get(t.Context(), "sb1")
	_, list := s.List(t.Context(), "acme", sandbox.ListQuery{})
	for what, err := range map[string]error{
		"get": get, "list": list, "save": s.Save(t.Context(), record("sb1")), "insert": s.Insert(t.Context(), record("sb2")),
		"touch": s.TouchKey(t.Context(), "k", time.Now()), "document": s.PutDocument(t.Context(), "acme", "x", "y", nil), "ready": s.Ready(t.Context()),
	} {
		if !fault.Is(err, fault.Unavailable) || !strings.Contains(fault.Message(err), "database does not answer") {
			t.Errorf("%s: %v (%s: %s)", what, err, fault.KindOf(err), fault.Message(err))
		}
	}
}

func TestWhyPostgresDoesNotOpen(t *testing.T) {
	good, err := url.Parse(pgtest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	at := func(change func(*url.URL, url.Values)) string {
		u, q := *good, good.Query()
		q.Set("user", "cove")
		q.Set("password", "hunter2")
		change(&u, q)
		u.RawQuery = q.Encode()
		return u.String()
	}
	guest := "guest_" + good.Query().Get("search_path")
	exec(t, raw(t, good.String()), "CREATE ROLE "+guest+" LOGIN")
	for what, c := range map[string]struct {
		dsn  string
		kind fault.Kind
		says string
	}{
		"no database of that name":  {at(func(u *url.URL, _ url.Values) { u.Path = "/nope" }), fault.Invalid, "CREATE DATABASE"},
		"nobody there":              {at(func(_ *url.URL, q url.Values) { q.Set("host", "/nonexistent") }), fault.Unavailable, "see whether it runs"},
		"no such user":              {at(func(_ *url.URL, q url.Values) { q.Set("user", "nobody") }), fault.Denied, "refuses the user"},
		"a user who may not":        {at(func(_ *url.URL, q url.Values) { q.Set("user", guest) }), fault.Denied, "may not make tables"},
		"another scheme":            {"mysql://root:hunter2@host/db", fault.Invalid, "postgres://USER"},
		"words and not a URL":       {"host=x password=hunter2", fault.Invalid, "postgres://USER"},
		"a password with a slash":   {"postgres://u:hunter2/%zz@host/db", fault.Invalid, "special characters"},
		"a port that is no number":  {"postgres://u:hunter2@host:many/db", fault.Invalid, "postgres://USER"},
		"a setting that is unknown": {"postgres://u:p@host/db?sslmode=hunter2", fault.Invalid, "postgres://USER"},
	} {
		t.Run(what, func(t *testing.T) {
			_, err := sqlstore.OpenPostgres(t.Context(), c.dsn)
			if !fault.Is(err, c.kind) || !strings.Contains(fault.Message(err), c.says) {
				t.Errorf("%v (%s)", err, fault.KindOf(err))
			}
			if strings.Contains(fmt.Sprintf("%v %+v %#v", err, err, fault.Message(err)), "hunter2") {
				t.Errorf("the password is told: %v", err)
			}
			if _, err := sqlstore.PostgresVersion(t.Context(), c.dsn); (err == nil) != (what == "a user who may not") || err != nil && strings.Contains(err.Error(), "hunter2") {
				t.Errorf("asked for its version: %v", err)
			}
		})
	}
}

func TestTextThatPostgresCannotKeep(t *testing.T) {
	s := openPostgres(t, pgtest.URL(t))
	bad := record("sb1")
	bad.CauseMessage, bad.Metadata = "a\x00b\xff", map[string]string{"k\x00": "v\x00\xff", "plain": `\u0000`}
	if err := s.Insert(t.Context(), bad); err != nil {
		t.Fatal(err)
	}
	got, err := s.Get(t.Context(), "sb1")
	if err != nil || got.CauseMessage != "a\uFFFDb\uFFFD" || got.Metadata["k\uFFFD"] != "v\uFFFD\uFFFD" {
		t.Errorf("%q %q, %v", got.CauseMessage, got.Metadata, err)
	}
	// One such row must not spoil the listings of its tenant.
	if page, err := s.List(t.Context(), "acme", sandbox.ListQuery{Metadata: map[string]string{"plain": `\u0000`}, Without: "x\x00"}); err != nil || len(page.Items) != 1 {
		t.Errorf("%+v, %v", page, err)
	}
	if _, err := s.Document(t.Context(), "acme", "kind", "\x00\xff"); !fault.Is(err, fault.NotFound) {
		t.Errorf("%v", err)
	}
}

func TestACallerWhoLeavesIsNotTheDatabasesFault(t *testing.T) {
	s := openPostgres(t, pgtest.URL(t))
	ctx, leave := context.WithCancel(t.Context())
	leave()
	if err := s.Insert(ctx, record("sb1")); err == nil || fault.Is(err, fault.Unavailable) {
		t.Errorf("%v", err)
	}
}
