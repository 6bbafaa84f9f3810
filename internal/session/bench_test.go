package session_test

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/covehq/cove/internal/session"
	"github.com/covehq/cove/internal/sqlstore"
)

// BenchmarkStore is what the database adds to a run.
func BenchmarkStore(b *testing.B) {
	store, err := sqlstore.Open(filepath.Join(b.TempDir(), "cove.db"))
	if err != nil {
		b.Fatal(err)
	}
	defer store.Close()
	s := session.Session{ID: "s", Tenant: "acme", Key: "k", State: session.StateRunning, Created: time.Now()}
	for b.Loop() {
		s.Runs++
		r := session.Run{ID: "r" + time.Now().Format(time.RFC3339Nano), Session: "s", Tenant: "acme", Cell: s.Runs, Code: "x = 1", Started: time.Now()}
		if err := store.BeginRun(b.Context(), r); err != nil {
			b.Fatal(err)
		}
		r.Outcome, r.Ended = "ok", time.Now()
		if err := store.EndRun(b.Context(), r, s, session.Kept{Answers: 256, Bytes: 64 << 20, Runs: 10_000}); err != nil {
			b.Fatal(err)
		}
	}
}
