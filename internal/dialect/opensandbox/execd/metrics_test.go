package execd_test

import (
	"bufio"
	"context"
	"log/slog"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/dialect/opensandbox/execd"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func TestWatchMetrics_ShareOfATenant(t *testing.T) {
	w := newWorldOf(t, sandbox.Config{MaxOperations: 2}, nil)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	for range 2 {
		resp := w.send(ctx, "GET", "/metrics/watch", nil)
		defer resp.Body.Close()
		if line, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil || resp.StatusCode != 200 {
			t.Fatalf("%d %s %v", resp.StatusCode, line, err)
		}
	}
	third := w.send(ctx, "GET", "/metrics/watch", nil)
	defer third.Body.Close()
	if third.StatusCode != 429 || third.Header.Get("Retry-After") == "" {
		t.Fatalf("the third stream of two: %d %v", third.StatusCode, third.Header)
	}
	leave()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		ctx, leave := context.WithCancel(t.Context())
		resp := w.send(ctx, "GET", "/metrics/watch", nil)
		leave()
		resp.Body.Close()
		if resp.StatusCode == 200 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("after both have left: %d", resp.StatusCode)
		}
	}
}

// late is a store that does not answer.
type late struct{ asked }

func (late) Usage(context.Context, auth.Principal, string) (sandbox.Usage, error) {
	return sandbox.Usage{}, fault.New(fault.Unavailable, "the database does not answer")
}

func (late) Explain(_ context.Context, _ auth.Principal, _ string, err error) error { return err }

func TestMetrics_DatabaseAway(t *testing.T) {
	h := execd.New(late{asked{state: sandbox.StateRunning}}, slog.New(slog.DiscardHandler))
	defer h.Close()
	r := httptest.NewRequest("GET", "/metrics", nil)
	r = r.WithContext(access.With(r.Context(), &access.Target{Who: acme, Sandbox: sandbox.Sandbox{ID: "a"}}))
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if w.Code != 503 || w.Header().Get("Retry-After") == "" {
		t.Errorf("%d %v %s", w.Code, w.Header(), w.Body)
	}
}
