package sqlstore_test

import (
	"path/filepath"
	"testing"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/sqlstore/storetest"
)

func TestArtifacts(t *testing.T) {
	storetest.RunArtifacts(t, func(t *testing.T) artifact.Index { return open(t, filepath.Join(t.TempDir(), "cove.db")) })
}
