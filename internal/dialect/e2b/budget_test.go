package e2b_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/transfer"
)

func TestBodies_OverBudget(t *testing.T) {
	w := newWorld(t)
	r := httptest.NewRequest("POST", "/sandboxes", strings.NewReader(strings.Repeat(" ", 100<<10)+"{}"))
	r.Header.Set("X-API-Key", w.key)
	got := httptest.NewRecorder()
	transfer.NewBudget(0, 0).Handler(w.api).ServeHTTP(got, r)
	if got.Code != http.StatusTooManyRequests || !strings.Contains(got.Body.String(), `"code":429`) {
		t.Errorf("%d %s", got.Code, got.Body)
	}
}
