package execd_test

import (
	"context"
	"log/slog"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/dialect/opensandbox/execd"
)

func TestNothingOutlivesClose(t *testing.T) {
	w := newWorld(t)
	before := runtime.NumGoroutine()
	h := execd.New(w.manager, slog.New(slog.DiscardHandler))
	front := w.letIn(h)
	serve := func(ctx context.Context, method, path, body string) *httptest.ResponseRecorder {
		out := httptest.NewRecorder()
		func() {
			defer func() { _ = recover() }() // a request that was left
			front.ServeHTTP(out, httptest.NewRequest(method, path, strings.NewReader(body)).WithContext(ctx))
		}()
		return out
	}
	serve(t.Context(), "POST", "/command", `{"command":"sleep 60","background":true}`)
	gone, leave := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer leave()
	serve(gone, "POST", "/command", `{"command":"sleep 60"}`)
	if out := serve(t.Context(), "GET", "/command/status/nobody", ""); out.Code != 404 {
		t.Fatal(out.Code)
	}
	h.Close()
	for deadline := time.Now().Add(2 * time.Minute); runtime.NumGoroutine() > before+4; time.Sleep(time.Millisecond) { // the agent's own, of two commands
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			for line := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
				if strings.Contains(line, "opensandbox/execd.") {
					t.Errorf("left: %s", line)
				}
			}
			break
		}
		runtime.Gosched()
	}
}
