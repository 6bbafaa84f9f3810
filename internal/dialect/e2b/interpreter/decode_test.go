package interpreter_test

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/dialect/e2b/interpreter"
	"github.com/covehq/cove/internal/dialect/e2b/target"
)

// stalled is a connection of a client that sends no more.
type stalled struct {
	*httptest.ResponseRecorder
	t        *testing.T
	deadline time.Time
}

func (s *stalled) SetReadDeadline(t time.Time) error { s.deadline = t; return nil }
func (s *stalled) Close() error                      { return nil }

func (s *stalled) Read([]byte) (int, error) {
	if s.deadline.IsZero() {
		s.t.Error("the body is waited for without end")
	}
	return 0, os.ErrDeadlineExceeded
}

func TestABodyIsNotWaitedForWithoutEnd(t *testing.T) {
	h := interpreter.New(nil, slog.New(slog.DiscardHandler))
	for _, path := range []string{"/execute", "/contexts"} {
		w := &stalled{ResponseRecorder: httptest.NewRecorder(), t: t}
		r := httptest.NewRequest("POST", path, nil)
		r.Body = w
		h.ServeHTTP(w, r.WithContext(target.With(r.Context(), &target.Target{Who: acme, Log: func(target.Line) {}})))
		if w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), "in time") {
			t.Errorf("%s: %d %s", path, w.Code, w.Body)
		}
	}
}
