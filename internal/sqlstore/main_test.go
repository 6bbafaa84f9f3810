package sqlstore_test

import (
	"path/filepath"
	"testing"

	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/sqlstore/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// databases are what every claim about a store holds for.
var databases = map[string]func(testing.TB) *sqlstore.Store{
	"sqlite":   func(t testing.TB) *sqlstore.Store { return open(t, filepath.Join(t.TempDir(), "cove.db")) },
	"postgres": func(t testing.TB) *sqlstore.Store { return openPostgres(t, pgtest.URL(t)) },
}

// onEach runs a suite on every database.
func onEach[S any](t *testing.T, suite func(*testing.T, func(*testing.T) S)) {
	for name, open := range databases {
		t.Run(name, func(t *testing.T) {
			suite(t, func(t *testing.T) S { return any(open(t)).(S) })
		})
	}
}

func openPostgres(t testing.TB, dsn string) *sqlstore.Store {
	t.Helper()
	s, err := sqlstore.OpenPostgres(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}
