package egress_test

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/dialect/opensandbox/egress"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/sandbox"
)

func TestBodies_OverBudget(t *testing.T) {
	h := transfer.NewBudget(0, 0).Handler(egress.New(newOne(), slog.New(slog.DiscardHandler)))
	r := httptest.NewRequest("POST", "/policy", strings.NewReader(strings.Repeat(" ", 100<<10)+`{"defaultAction":"allow"}`))
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r.WithContext(access.With(r.Context(), &access.Target{Sandbox: sandbox.Sandbox{ID: "sb1"}, Port: access.PortEgress})))
	if w.Code != http.StatusTooManyRequests || !strings.Contains(w.Body.String(), "EGRESS::BUSY") || w.Header().Get("Retry-After") == "" {
		t.Errorf("%d %v %s", w.Code, w.Header(), w.Body)
	}
}
