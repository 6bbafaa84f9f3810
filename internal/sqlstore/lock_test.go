package sqlstore_test

import (
	"database/sql"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"modernc.org/sqlite"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sqlstore"
)

// TestLimits_AddUp: a request that finds the database in trouble is refused within two seconds, also
// if it makes a second call after the one that found out.
func TestLimits_AddUp(t *testing.T) {
	const promise = 2 * time.Second
	for database, first := range map[string]time.Duration{"Postgres": sqlstore.PostgresLimit, "SQLite": sqlstore.LockLimit} {
		if most := first + sqlstore.SuspectLimit; most > promise {
			t.Errorf("two calls of %s take up to %v; the limit is %v", database, most, promise)
		}
	}
}

// TestSQLite_LockedQueue has changes queue behind one that waits for the lock of another process.
// They fail with the first and do not wait in turn, so all of them carry SQLite's one answer.
func TestSQLite_LockedQueue(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cove.db")
	s := open(t, path)
	other, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	other.SetMaxOpenConns(1)
	exec(t, other, "BEGIN IMMEDIATE")
	put := func() error { return s.PutDocument(t.Context(), "acme", "x", "y", nil) }
	const queue = 8
	failures := make(chan error, queue)
	for range queue {
		go func() { failures <- put() }()
	}
	answers := map[*sqlite.Error]bool{}
	refused := func(err error) {
		t.Helper()
		var answer *sqlite.Error
		if !fault.Is(err, fault.Unavailable) || !strings.Contains(fault.Message(err), "locked by another process") || !errors.As(err, &answer) {
			t.Errorf("a change: %v (%s: %s)", err, fault.KindOf(err), fault.Message(err))
		}
		answers[answer] = true
	}
	for range queue {
		refused(<-failures)
	}
	refused(put())
	if len(answers) != 1 {
		t.Errorf("SQLite was asked %d times", len(answers))
	}
	if _, err := s.Documents(t.Context(), "acme", "x"); err != nil {
		t.Errorf("a read while the database is locked: %v", err)
	}
	exec(t, other, "ROLLBACK")
	until(t, "the database takes changes again", func() bool { return put() == nil })
}
