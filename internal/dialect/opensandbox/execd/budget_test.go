package execd_test

import (
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/transfer"
)

func TestBodies_OverBudget(t *testing.T) {
	w := newWorld(t)
	w.Config.Handler = transfer.NewBudget(0, 0).Handler(w.Config.Handler)
	for path, body := range map[string]string{
		"/command": `{"command":"true # ` + strings.Repeat("a", 100<<10) + `"}`,
		"/code":    `{"code":"` + strings.Repeat("a", 2<<20) + `","context":{"language":"bash"}}`,
	} {
		if got := w.ask("POST", path, body); got.status != 429 || !strings.Contains(got.body, "RUNTIME_ERROR") {
			t.Errorf("%s: %d %.200s", path, got.status, got.body)
		}
	}
}
