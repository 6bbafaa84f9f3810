package sqlstore_test

import (
	"path/filepath"
	"testing"

	"github.com/covehq/cove/internal/session"
	"github.com/covehq/cove/internal/sqlstore/storetest"
)

func TestSessions(t *testing.T) {
	storetest.RunSessions(t, func(t *testing.T) session.Store { return open(t, filepath.Join(t.TempDir(), "cove.db")) })
}
