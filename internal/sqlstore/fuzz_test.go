package sqlstore_test

import (
	"path/filepath"
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
)

// A cursor comes back from clients: whatever they make of it is a page or their own mistake.
func FuzzCursor(f *testing.F) {
	s, err := sqlstore.Open(filepath.Join(f.TempDir(), "cove.db"))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { s.Close() })
	for _, seed := range []string{"", "1.sb1", "zik0zj.", ".", "-1.sb1", "' OR 1=1 --", "1y2p0ij32e8e7.x", "1y2p0ij32e8e8.x"} {
		f.Add(seed, true)
	}
	f.Fuzz(func(t *testing.T, cursor string, ascending bool) {
		_, err := s.List(t.Context(), "acme", sandbox.ListQuery{Cursor: cursor, Ascending: ascending})
		if err != nil && !fault.Is(err, fault.Invalid) {
			t.Fatalf("cursor %q: %v", cursor, err)
		}
	})
}
