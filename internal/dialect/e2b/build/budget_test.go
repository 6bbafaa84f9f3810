package build_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/transfer"
)

func TestBodies_OverBudget(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		got := httptest.NewRecorder()
		h := transfer.NewBudget(0, 0).Handler(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { w.builder.Serve(rw, r, w.who) }))
		h.ServeHTTP(got, httptest.NewRequest("POST", "/v3/templates", strings.NewReader(strings.Repeat(" ", 100<<10)+"{}")))
		if got.Code != http.StatusTooManyRequests || !strings.Contains(got.Body.String(), `"code":429`) {
			t.Errorf("%d %s", got.Code, got.Body)
		}
	})
}
