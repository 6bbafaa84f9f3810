package sqlstore_test

import (
	"database/sql"
	"path/filepath"
	"strings"
	"testing"
)

// TestSessionsAreCountedWithoutReadingThem: whoever scrapes needs no key, and a session's body may be long.
func TestSessionsAreCountedWithoutReadingThem(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cove.db")
	s := open(t, file)
	if _, err := s.SessionCensus(t.Context()); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", file)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var plan string
	var id, parent, unused int
	if err := db.QueryRow("EXPLAIN QUERY PLAN SELECT state, count(*) FROM sessions GROUP BY state").Scan(&id, &parent, &unused, &plan); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(plan, "COVERING INDEX") {
		t.Error(plan)
	}
}
