package sqlstore_test

import (
	"testing"

	"github.com/covehq/cove/internal/sqlstore/storetest"
)

func TestSessions(t *testing.T) { onEach(t, storetest.RunSessions) }
