package telemetry_test

import (
	"context"
	"errors"
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

var quiet = slog.New(slog.DiscardHandler)

// scrape is what Prometheus would read.
func scrape(o *telemetry.Observer) string {
	w := httptest.NewRecorder()
	o.Metrics().ServeHTTP(w, nil)
	return w.Body.String()
}

func wantLines(t *testing.T, text string, lines ...string) {
	t.Helper()
	for _, line := range lines {
		if !strings.Contains(text, "\n"+line+"\n") {
			t.Errorf("no %s in\n%s", line, text)
		}
	}
}

func TestWhatHappensIsCounted(t *testing.T) {
	o := telemetry.New(quiet)
	var _ sandbox.Observer = o
	a := sandbox.Sandbox{ID: "a", Template: "python"}
	o.Created(a, 5*time.Millisecond, nil)
	o.Created(sandbox.Sandbox{ID: "c", Template: "python", ForkedFrom: "a"}, time.Hour, nil)
	o.Adopted(sandbox.Sandbox{ID: "b", Template: "python"})
	o.Created(sandbox.Sandbox{Template: "by\"caller\n"}, 0, fault.New(fault.NotFound, "no template"))
	o.Forked(a, 10, 30*time.Millisecond, 4*time.Millisecond, nil)
	o.Forked(a, 10, time.Hour, time.Hour, fault.New(fault.Exhausted, "too many"))
	o.Paused(a, 150*time.Microsecond, nil)
	o.Resumed(a, 150*time.Microsecond, nil)
	o.Resumed(a, time.Hour, errors.New("a chain for the operator"))
	o.RunStarted(a, sandbox.RunCell)
	o.RunEnded(a, sandbox.RunCell, agentapi.OutcomeOK, time.Millisecond)
	o.RunStarted(a, sandbox.RunCommand)
	o.RunEnded(a, sandbox.RunCommand, "", time.Hour)
	o.RunStarted(a, sandbox.RunCell)
	a.Cause = sandbox.CauseOOM
	o.Ended(a)
	o.Failed(t.Context(), fault.New(fault.Gone, "it has ended"))
	r := httptest.NewRequest("POST", "/cove/v1/sandboxes", nil)
	r.Pattern = "POST /cove/v1/sandboxes"
	o.Served(r, "r1", 201, 20, 300)
	o.Served(httptest.NewRequest("GET", "/by/caller", nil), "r2", 404, 0, 7)
	o.Served(httptest.NewRequest("GET", "/metrics", nil), "r3", 200, 0, 0)

	wantLines(t, scrape(o),
		`cove_runs_active 1`,
		`cove_creates_total{template="python",outcome="ok"} 2`,
		`cove_creates_total{template="",outcome="not_found"} 1`,
		`cove_create_seconds_bucket{template="python",le="0.003"} 0`,
		`cove_create_seconds_bucket{template="python",le="0.005"} 1`,
		`cove_create_seconds_bucket{template="python",le="+Inf"} 1`,
		`cove_create_seconds_sum{template="python"} 0.005`,
		`cove_adopted_total 1`,
		`cove_ends_total{cause="oom"} 1`,
		`cove_forks_total{outcome="ok"} 1`,
		`cove_forks_total{outcome="exhausted"} 1`,
		`cove_fork_children_total 10`,
		`cove_fork_seconds_bucket{le="0.02"} 0`,
		`cove_fork_seconds_bucket{le="0.03"} 1`,
		`cove_fork_seconds_count 1`,
		`cove_fork_stall_seconds_sum 0.004`,
		`cove_pauses_total{outcome="ok"} 1`,
		`cove_pause_seconds_bucket{le="0.0001"} 0`,
		`cove_pause_seconds_bucket{le="0.0002"} 1`,
		`cove_resumes_total{outcome="ok"} 1`,
		`cove_resumes_total{outcome="internal"} 1`,
		`cove_resume_seconds_count 1`,
		`cove_runs_total{kind="cell",outcome="ok"} 1`,
		`cove_runs_total{kind="cell",outcome="timeout"} 0`,
		`cove_runs_total{kind="command",outcome="left"} 1`,
		`cove_run_seconds_bucket{kind="command",le="1800"} 0`,
		`cove_run_seconds_count{kind="command"} 1`,
		`cove_errors_total{kind="gone"} 1`,
		`cove_errors_total{kind="denied"} 0`,
		`cove_requests_total{route="POST /cove/v1/sandboxes",status="201"} 1`,
		`cove_requests_total{route="other",status="404"} 1`,
		`cove_requests_total{route="/metrics",status="200"} 1`,
		`cove_received_bytes_total 20`,
		`cove_sent_bytes_total 307`,
	)
}

// sources of every kind, for a server that has all of them.
func sources() telemetry.Sources {
	return telemetry.Sources{
		Version: "v1", Driver: "native",
		Census: func() map[sandbox.Standing]int {
			return map[sandbox.Standing]int{
				{State: sandbox.StateRunning, Template: "python"}: 3, {State: sandbox.StatePaused, Template: "python"}: 2,
				{State: sandbox.StateRunning, Template: "secret-project"}: 1, {State: sandbox.StateRunning, Template: "another-secret"}: 1,
			}
		},
		Shared: func(name string) bool { return name == "python" },
		Maker: func(context.Context) (telemetry.Maker, error) {
			return telemetry.Maker{Sandboxes: 5, Ending: 1, Pooled: 4, Slots: 10, FDs: 99, Goroutines: 12, Disk: &telemetry.Disk{Used: 3, Promised: 20, Reserve: 7}, Zygotes: []telemetry.Zygote{
				{Template: "python", Forks: 7, Children: 3, MemoryBytes: 100}, {Template: "python", Forks: 1, Children: 1, MemoryBytes: 100},
			}}, nil
		},
		DiskFree: func() (int64, bool) { return 1 << 30, true },
	}
}

func TestSourcesAreAskedWhenSomebodyLooks(t *testing.T) {
	o := telemetry.New(quiet)
	o.Watch(sources())
	text := scrape(o)
	wantLines(t, text,
		`cove_sandboxes{state="running",template="python"} 3`,
		`cove_sandboxes{state="paused",template="python"} 2`,
		`cove_sandboxes{state="running",template="snapshot"} 2`,
		`cove_maker_up 1`, `cove_maker_sandboxes 5`, `cove_maker_ending 1`, `cove_maker_slots 10`, `cove_maker_open_fds 99`, `cove_maker_goroutines 12`,
		`cove_pool_sandboxes 4`, `cove_disk_used_bytes 3`, `cove_disk_promised_bytes 20`, `cove_disk_reserve_bytes 7`,
		`cove_zygotes{template="python"} 2`,
		`cove_zygote_children{template="python"} 4`,
		`cove_zygote_forks{template="python"} 8`,
		`cove_zygote_memory_bytes{template="python"} 200`,
		`cove_host_disk_free_bytes 1.073741824e+09`,
	)
	if strings.Contains(text, "secret") {
		t.Error("the names of a tenant's templates are shown to everybody")
	}
	for _, name := range []string{
		`cove_build_info{version="v1",go_version="go`, "go_goroutines ", "process_cpu_seconds_total ", "process_resident_memory_bytes ",
		"process_open_fds ", "process_start_time_seconds ", "cove_host_cpus ", "cove_host_load1 ", "cove_host_memory_bytes ", "cove_host_memory_available_bytes ",
	} {
		if !strings.Contains(text, "\n"+name) {
			t.Errorf("no %s in\n%s", name, text)
		}
	}
}

func TestAMakerThatIsAwayIsTold(t *testing.T) {
	s := sources()
	s.Maker = func(context.Context) (telemetry.Maker, error) { return telemetry.Maker{}, errors.New("gone") }
	o := telemetry.New(quiet)
	o.Watch(s)
	text := scrape(o)
	wantLines(t, text, "cove_maker_up 0")
	if strings.Contains(text, "\ncove_pool_sandboxes ") {
		t.Error("what nobody could tell is told as zero")
	}
}

// What every run and every request pays, traced or not, must stay next to nothing.
func TestCountingAllocatesNothing(t *testing.T) {
	o := telemetry.New(quiet)
	sb := sandbox.Sandbox{ID: "a", Template: "python"}
	r := httptest.NewRequest("POST", "/cove/v1/sandboxes/a/run", nil)
	r.Pattern = "POST /cove/v1/sandboxes/{id}/run"
	for name, f := range map[string]func(){
		"a run": func() {
			o.RunStarted(sb, sandbox.RunCell)
			o.RunEnded(sb, sandbox.RunCell, agentapi.OutcomeOK, time.Millisecond)
		},
		"a request": func() { o.Served(r, "r1", 200, 10, 10) },
	} {
		f() // the first makes its series
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
}
