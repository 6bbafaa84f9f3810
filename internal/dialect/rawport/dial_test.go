package rawport_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/rawport"
	"github.com/covehq/cove/internal/fault"
)

// unreachable is a sandbox whose agent cannot be reached, for one reason.
type unreachable struct{ why error }

func (u unreachable) PortAgent(context.Context, auth.Principal, string) (*agentapi.Client, error) {
	return agentapi.NewClient(func(context.Context) (net.Conn, error) { return nil, u.why }), nil
}

func TestOnlyAPortThatNobodyListensOnIsClosed(t *testing.T) {
	for kind, want := range map[fault.Kind]bool{fault.Unavailable: true, fault.Gone: false, fault.NotFound: false, fault.Internal: false} {
		var told error
		proxy := rawport.New(rawport.Config{
			Strip:  func(http.Header) {},
			Refuse: func(_ http.ResponseWriter, _ *http.Request, _ rawport.Visit, err error) { told = err },
		}, unreachable{fault.New(kind, "for this reason")}, slog.New(slog.DiscardHandler))
		proxy.Serve(httptest.NewRecorder(), httptest.NewRequest("GET", "/", nil), rawport.Visit{Sandbox: "a", Port: 80})
		proxy.Close()
		var closed *rawport.ClosedError
		if errors.As(told, &closed) != want || !fault.Is(told, kind) {
			t.Errorf("%v: %v", kind, told)
		}
	}
}
