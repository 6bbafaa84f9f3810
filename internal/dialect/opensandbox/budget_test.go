package opensandbox_test

import (
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/transfer"
)

func TestBodies_OverBudget(t *testing.T) {
	w := newWorld(t)
	w.Config.Handler = transfer.NewBudget(0, 0).Handler(w.api)
	got := w.ask("POST", "/v1/sandboxes", strings.Repeat(" ", 100<<10)+"{}")
	if got.status != 429 || !strings.Contains(got.body, "SANDBOX::TOO_MANY_REQUESTS") {
		t.Errorf("%d %s", got.status, got.body)
	}
}
