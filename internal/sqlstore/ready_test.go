package sqlstore_test

import (
	"database/sql"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sqlstore"
)

func TestReady_NeedsADatabaseThatTakesChanges(t *testing.T) {
	// Each spoils the database and returns what repairs it.
	pragma := func(spoil, repair string) func(*testing.T, *sqlstore.Store, string) func() {
		return func(t *testing.T, s *sqlstore.Store, _ string) func() {
			run := func(set string) {
				if err := s.Exec(t.Context(), "PRAGMA "+set); err != nil {
					t.Fatal(err)
				}
			}
			run(spoil)
			return func() { run(repair) }
		}
	}
	lock := func(t *testing.T, _ *sqlstore.Store, path string) func() {
		other, err := sql.Open("sqlite", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { other.Close() })
		other.SetMaxOpenConns(1)
		exec(t, other, "BEGIN IMMEDIATE")
		return func() { exec(t, other, "ROLLBACK") }
	}
	for what, c := range map[string]struct {
		spoil func(*testing.T, *sqlstore.Store, string) func()
		kind  fault.Kind
		says  string
	}{
		"read-only": {pragma("query_only = 1", "query_only = 0"), fault.Unavailable, "read-only"},
		"full":      {pragma("max_page_count = 1", "max_page_count = 1000000"), fault.DiskFull, "disk is full"},
		"locked":    {lock, fault.Unavailable, "locked by another process"},
	} {
		t.Run(what, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "cove.db")
			s := open(t, path)
			if err := s.Ready(t.Context()); err != nil {
				t.Fatal(err)
			}
			repair := c.spoil(t, s, path)
			large := record("sb1")
			large.Metadata = map[string]string{"large": strings.Repeat("x", 1<<20)} // it needs new pages
			refused := map[string]error{"insert": s.Insert(t.Context(), large)}
			if c.kind != fault.DiskFull { // readiness needs no new page, and SQLite knows no free disk
				refused["ready"] = s.Ready(t.Context())
			}
			for what, err := range refused {
				if !fault.Is(err, c.kind) || !strings.Contains(fault.Message(err), c.says) {
					t.Errorf("%s: %v (%s: %s)", what, err, fault.KindOf(err), fault.Message(err))
				}
			}
			repair()
			until(t, "the database is ready after the repair", func() bool { return s.Ready(t.Context()) == nil })
		})
	}
}
