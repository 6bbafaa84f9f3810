package sqlstore_test

import (
	"testing"

	"github.com/covehq/cove/internal/sqlstore/storetest"
)

func TestDatasets(t *testing.T) { onEach(t, storetest.RunDatasets) }
