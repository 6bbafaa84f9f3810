package execd_test

import (
	"context"
	"log/slog"
	"testing"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox/execd"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// asked answers a Get alone.
type asked struct {
	execd.Sandboxes
	state sandbox.State
	err   error
}

func (a asked) Get(context.Context, auth.Principal, string) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{State: a.state}, a.err
}

func TestOnlyASandboxThatIsGoneIsForgotten(t *testing.T) {
	for name, c := range map[string]struct {
		asked
		want bool
	}{
		"running":         {asked{state: sandbox.StateRunning}, false},
		"paused":          {asked{state: sandbox.StatePaused}, false},
		"ended":           {asked{state: sandbox.StateEnded}, true},
		"not there":       {asked{err: fault.New(fault.NotFound, "no")}, true},
		"gone":            {asked{err: fault.New(fault.Gone, "no")}, true},
		"nobody can tell": {asked{err: fault.New(fault.Unavailable, "no")}, false},
		"a broken store":  {asked{err: context.DeadlineExceeded}, false},
	} {
		h := execd.New(c.asked, slog.New(slog.DiscardHandler))
		if got := h.Ended(t.Context(), auth.Principal{}, "a"); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
		h.Close()
	}
}
