package sqlstore_test

import (
	"path/filepath"
	"testing"

	"github.com/covehq/cove/internal/dataset"
	"github.com/covehq/cove/internal/sqlstore/storetest"
)

func TestDatasets(t *testing.T) {
	storetest.RunDatasets(t, func(t *testing.T) dataset.Index { return open(t, filepath.Join(t.TempDir(), "cove.db")) })
}
