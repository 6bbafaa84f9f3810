package telemetry_test

import (
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/telemetry"
)

func TestWhatHappensIsCounted(t *testing.T) {
	o := telemetry.New(slog.New(slog.DiscardHandler))
	var _ sandbox.Observer = o
	a := sandbox.Sandbox{ID: "a", Template: "python"}
	o.Created(a, 5*time.Millisecond, nil)
	o.Adopted(sandbox.Sandbox{ID: "b", Template: "python"})
	o.Created(sandbox.Sandbox{Template: "by\"caller\n"}, 0, fault.New(fault.NotFound, "no template"))
	o.RunStarted(a, sandbox.RunCell)
	o.RunEnded(a, sandbox.RunCell, agentapi.OutcomeOK, time.Millisecond)
	o.RunStarted(a, sandbox.RunCommand)
	o.RunEnded(a, sandbox.RunCommand, "", time.Hour)
	o.RunStarted(a, sandbox.RunCell)
	a.Cause = sandbox.CauseOOM
	o.Ended(a)

	w := httptest.NewRecorder()
	o.Metrics().ServeHTTP(w, nil)
	for _, line := range []string{
		`cove_sandboxes{state="running"} 1`,
		`cove_runs_active 1`,
		`cove_sandbox_creates_total{template="python",outcome="ok"} 1`,
		`cove_sandbox_creates_total{template="",outcome="not_found"} 1`,
		`cove_sandbox_create_seconds_bucket{template="python",le="0.002"} 0`,
		`cove_sandbox_create_seconds_bucket{template="python",le="0.005"} 1`,
		`cove_sandbox_create_seconds_bucket{template="python",le="+Inf"} 1`,
		`cove_sandbox_create_seconds_sum{template="python"} 0.005`,
		`cove_sandboxes_adopted_total 1`,
		`cove_sandbox_ends_total{cause="oom"} 1`,
		`cove_runs_total{kind="cell",outcome="ok"} 1`,
		`cove_runs_total{kind="command",outcome="left"} 1`,
		`cove_run_seconds_bucket{kind="command",le="1800"} 0`,
		`cove_run_seconds_count{kind="command"} 1`,
	} {
		if !strings.Contains(w.Body.String(), line+"\n") {
			t.Errorf("no %s in\n%s", line, w.Body)
		}
	}
}
