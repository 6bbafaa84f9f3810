package sqlstore_test

import (
	"testing"

	"github.com/covehq/cove/internal/sqlstore/storetest"
)

func TestArtifacts(t *testing.T) { onEach(t, storetest.RunArtifacts) }
