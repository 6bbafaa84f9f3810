package app

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/dialect/transfer"
)

func TestNewBodies_Shares(t *testing.T) {
	for name, c := range map[string]struct{ memory, total int64 }{
		"a small host":   {1 << 30, 128 << 20},
		"a host":         {3 << 30, 384 << 20},
		"a large host":   {1 << 40, 512 << 20},
		"an unknown one": {0, 512 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			h := newBodies(c.memory).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				for i, want := range []error{nil, transfer.ErrShare} {
					if err := transfer.MemoryOf(r.Context(), "acme").Resize(c.total/2 + int64(i)); !errors.Is(err, want) {
						t.Errorf("acme: %v, want %v", err, want)
					}
				}
				if err := transfer.MemoryOf(r.Context(), "globex").Resize(c.total / 2); err != nil {
					t.Errorf("globex: %v", err)
				}
				if err := transfer.MemoryOf(r.Context(), "initech").Resize(1); !errors.Is(err, transfer.ErrTotal) {
					t.Errorf("initech: %v", err)
				}
			}))
			h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/", nil))
		})
	}
}

func TestNewHTTP_CountsBodies(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	s := &Server{log: log, limiter: newLimiter(config.Config{}, log), bodies: transfer.NewBudget(0, 0)}
	var got error
	h := s.newHTTP(t.Context(), http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, got = transfer.ReadJSON(r.Context(), "acme", io.LimitReader(r.Body, 1<<20))
	}))
	h.Handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("POST", "/", strings.NewReader(strings.Repeat(" ", 100<<10))))
	if !errors.Is(got, transfer.ErrShare) {
		t.Errorf("no request is counted: %v", got)
	}
}
