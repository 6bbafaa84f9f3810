package interpreter_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/transfer"
)

func TestBodies_OverBudget(t *testing.T) {
	w := newWorld(t)
	long := object{"code": "1+1" + strings.Repeat(" ", 100<<10)}
	answered := make(chan http.Header, 1)
	next := w.Config.Handler
	for want, b := range map[int]*transfer.Budget{
		http.StatusTooManyRequests:    transfer.NewBudget(1<<20, 0),
		http.StatusServiceUnavailable: transfer.NewBudget(0, 1<<20),
		http.StatusOK:                 transfer.NewBudget(1<<20, 1<<20),
	} {
		h := b.Handler(next)
		w.Config.Handler = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			h.ServeHTTP(rw, r)
			answered <- rw.Header().Clone()
		})
		if status, body := w.do(t, http.MethodPost, "/execute", long); status != want {
			t.Errorf("%d, want %d: %.200s", status, want, body)
		}
		header := <-answered
		if advice := header.Get("Should-Retry") + header.Get("Retry-After"); (advice == "") != (want == http.StatusOK) {
			t.Errorf("%d comes with %v", want, header)
		}
	}
}
