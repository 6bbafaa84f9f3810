// Package telemetry is a sandbox.Observer that turns what the Manager does into log lines and Prometheus metrics. It
// decides nothing and holds no sandbox's content.
package telemetry

import (
	"context"
	"log/slog"
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// Observer counts and logs. Make it with New.
type Observer struct {
	log *slog.Logger

	created *counter
	create  *histogram
	adopted *counter
	ended   *counter
	runs    *counter
	run     *histogram
	families

	mu   sync.Mutex
	live map[string]bool // sandboxes that run, by id: a set, because adoption and creation may both tell of one
	busy int             // runs that have begun and not ended
}

// A create takes milliseconds and a cell may take minutes.
var (
	createBuckets = []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30}
	runBuckets    = []float64{.0005, .001, .002, .005, .01, .05, .1, .5, 1, 5, 10, 60, 300, 1800}
)

// New makes an Observer that logs to log.
func New(log *slog.Logger) *Observer {
	o := &Observer{log: log, live: map[string]bool{}}
	o.add(newGauge("cove_sandboxes", "Sandboxes that live now, by state.", "state", o.states))
	o.add(newGauge("cove_runs_active", "Runs that go on now.", "", o.active))
	o.add(newGauge("go_goroutines", "Goroutines of the server.", "", goroutines))
	o.created = newCounter("cove_sandbox_creates_total", "Creates that were not answered by an existing sandbox.", "template", "outcome")
	o.create = newHistogram("cove_sandbox_create_seconds", "How long a successful create took.", createBuckets, "template")
	o.adopted = newCounter("cove_sandboxes_adopted_total", "Sandboxes of an earlier server that this one took over.")
	o.ended = newCounter("cove_sandbox_ends_total", "Sandboxes that ended, by cause.", "cause")
	o.runs = newCounter("cove_runs_total", "Runs that ended; outcome is left when the client went first.", "kind", "outcome")
	o.run = newHistogram("cove_run_seconds", "How long a run took.", runBuckets, "kind")
	o.add(o.created, o.create, o.adopted, o.ended, o.runs, o.run)
	return o
}

// Metrics serves the Prometheus text format.
func (o *Observer) Metrics() http.Handler { return &o.families }

func (o *Observer) states() map[string]float64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return map[string]float64{string(sandbox.StateRunning): float64(len(o.live))}
}

func (o *Observer) active() map[string]float64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return map[string]float64{"": float64(o.busy)}
}

func goroutines() map[string]float64 {
	return map[string]float64{"": float64(runtime.NumGoroutine())}
}

func (o *Observer) lives(id string, lives bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if lives {
		o.live[id] = true
	} else {
		delete(o.live, id)
	}
}

// Created counts a create.
func (o *Observer) Created(sb sandbox.Sandbox, took time.Duration, err error) {
	if err != nil {
		// A template that failed to resolve was named by the caller: it must not become a label.
		name := sb.Template
		if fault.Is(err, fault.NotFound) || fault.Is(err, fault.Invalid) {
			name = ""
		}
		o.created.inc(name, string(fault.KindOf(err)))
		o.log.Warn("sandbox not created", "sandbox", sb.ID, "tenant", sb.Tenant, "template", sb.Template, "took", took, "error", err)
		return
	}
	o.lives(sb.ID, true)
	o.created.inc(sb.Template, "ok")
	o.create.observe(took, sb.Template)
	o.log.Info("sandbox created", "sandbox", sb.ID, "tenant", sb.Tenant, "template", sb.Template, "took", took)
}

// Adopted counts a sandbox that outlived its server.
func (o *Observer) Adopted(sb sandbox.Sandbox) {
	o.lives(sb.ID, true)
	o.adopted.inc()
	o.log.Info("sandbox adopted", "sandbox", sb.ID, "tenant", sb.Tenant, "template", sb.Template)
}

// Ended counts an end; the Manager has logged it.
func (o *Observer) Ended(sb sandbox.Sandbox) {
	o.lives(sb.ID, false)
	o.ended.inc(string(sb.Cause))
}

// RunStarted counts a run that begins.
func (o *Observer) RunStarted(sandbox.Sandbox, sandbox.RunKind) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.busy++
}

// RunEnded counts a run that ended.
func (o *Observer) RunEnded(sb sandbox.Sandbox, kind sandbox.RunKind, outcome agentapi.Outcome, took time.Duration) {
	o.mu.Lock()
	o.busy--
	o.mu.Unlock()
	label := string(outcome)
	if label == "" {
		label = "left"
	}
	o.runs.inc(string(kind), label)
	o.run.observe(took, string(kind))
	if o.log.Enabled(context.Background(), slog.LevelDebug) { // logging is not work that stops: there is no caller to follow
		o.log.Debug("run ended", "sandbox", sb.ID, "tenant", sb.Tenant, "run", kind, "outcome", label, "took", took)
	}
}
