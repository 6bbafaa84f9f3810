package runtime_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/transfer"
)

func TestBodies_OverBudget(t *testing.T) {
	w := newWorld(t)
	w.Config.Handler = transfer.NewBudget(0, 0).Handler(w.Config.Handler)
	got := w.ask(http.MethodPost, "/execute", `{"command":"true # `+strings.Repeat("a", 100<<10)+`"}`)
	if got.status != http.StatusTooManyRequests || !strings.Contains(got.body, "large requests") || got.header.Get("Retry-After") == "" {
		t.Errorf("%d %v %.200s", got.status, got.header, got.body)
	}
}
