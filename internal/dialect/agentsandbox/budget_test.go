package agentsandbox_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/transfer"
)

func TestBodies_OverBudget(t *testing.T) {
	w := newWorld(t)
	w.Config.Handler = transfer.NewBudget(0, 0).Handler(w.api)
	resp := w.request(t.Context(), "POST", "/apis/agents.x-k8s.io/v1alpha1/namespaces/default/sandboxes", strings.Repeat(" ", 100<<10)+"{}")
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusTooManyRequests || !strings.Contains(string(text), `"reason":"TooManyRequests"`) {
		t.Errorf("%d %s, %v", resp.StatusCode, text, err)
	}
}
