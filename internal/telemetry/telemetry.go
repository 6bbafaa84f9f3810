// Package telemetry shows an operator what the server does: log lines and metrics as a sandbox.Observer, read by Prometheus
// or sent over OTLP, and OpenTelemetry spans around the Manager and its driver. It decides nothing and holds no sandbox's content.
package telemetry

import (
	"context"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// Observer counts and logs. Make it with New.
type Observer struct {
	log    *slog.Logger
	shared func(template string) bool // see Sources

	created, adopted, ended  *counter
	forks, children          *counter
	pauses, resumes          *counter
	runs, requests, failures *counter
	received, sent           *counter
	create, fork, stall      *histogram
	pause, resume, run       *histogram
	kept                     kept
	families

	mu   sync.Mutex
	busy int // runs that have begun and not ended
}

// A create takes milliseconds, a pause a part of one, and a cell may take minutes.
var (
	createBuckets = []float64{.001, .002, .003, .005, .0075, .01, .015, .02, .03, .05, .1, .2, .5, 1, 2, 5, 10, 30}
	pauseBuckets  = []float64{.0001, .0002, .0005, .001, .002, .003, .005, .01, .02, .05, .1, .5, 1, 5, 30}
	runBuckets    = []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60, 300, 1800}
)

// outcomeOK is what came about; other outcomes are fault kinds.
const outcomeOK = "ok"

// outcomeLeft is a run whose client went first.
const outcomeLeft = "left"

// New makes an Observer that logs to log.
func New(log *slog.Logger) *Observer {
	o := &Observer{log: log, shared: func(string) bool { return true }}
	o.created = newCounter("cove_creates_total", "Creates that were not answered by an existing sandbox, forked children included.", "template", "outcome")
	o.create = newHistogram("cove_create_seconds", "How long a successful create took, forks apart.", createBuckets, "template")
	o.adopted = newCounter("cove_adopted_total", "Sandboxes of an earlier server that this one took over.")
	o.ended = newCounter("cove_ends_total", "Sandboxes that ended, by cause.", "cause")
	o.forks = newCounter("cove_forks_total", "Forks, each of one or more children.", "outcome")
	o.children = newCounter("cove_fork_children_total", "Sandboxes that were made by forks.")
	o.fork = newHistogram("cove_fork_seconds", "How long a successful fork took, all its children together.", createBuckets)
	o.stall = newHistogram("cove_fork_stall_seconds", "How long the parent's kernel took no cell during a fork.", createBuckets)
	o.pauses = newCounter("cove_pauses_total", "Pauses, by a caller, by the idle clock or by a deadline.", "outcome")
	o.pause = newHistogram("cove_pause_seconds", "How long a successful pause took.", pauseBuckets)
	o.resumes = newCounter("cove_resumes_total", "Resumes, by a caller or by a use.", "outcome")
	o.resume = newHistogram("cove_resume_seconds", "How long a successful resume took.", pauseBuckets)
	o.runs = newCounter("cove_runs_total", "Runs that ended; outcome is left when the client went first.", "kind", "outcome")
	o.run = newHistogram("cove_run_seconds", "How long a run took.", runBuckets, "kind")
	o.requests = newCounter("cove_requests_total", "HTTP requests that were answered.", "route", "status")
	o.failures = newCounter("cove_errors_total", "Failures that callers were told, by kind of fault.", "kind")
	o.received = newCounter("cove_received_bytes_total", "Bytes of request bodies.")
	o.sent = newCounter("cove_sent_bytes_total", "Bytes of answers.")
	o.add(o.created, o.create, o.adopted, o.ended, o.forks, o.children, o.fork, o.stall, o.pauses, o.pause, o.resumes, o.resume,
		newGauges(o.active, desc{name: "cove_runs_active", help: "Runs that go on now."}),
		o.runs, o.run, o.requests, o.failures, o.received, o.sent)
	o.kept = newKept()
	o.add(o.kept.families()...)
	o.expect()
	return o
}

// expect makes series known before their first time: a rate over one that appears at 1 would miss it.
func (o *Observer) expect() {
	for _, kind := range []sandbox.RunKind{sandbox.RunCell, sandbox.RunCommand, sandbox.RunSnippet} {
		for _, outcome := range []agentapi.Outcome{
			agentapi.OutcomeOK, agentapi.OutcomeError, agentapi.OutcomeTimeout, agentapi.OutcomeInterrupted, agentapi.OutcomeKilled,
			agentapi.OutcomeOOM, agentapi.OutcomeKernelDied, agentapi.OutcomeRefused, outcomeLeft,
		} {
			o.runs.add(0, string(kind), string(outcome))
		}
	}
	for _, kind := range fault.Kinds {
		o.failures.add(0, string(kind))
	}
	for _, c := range []*counter{o.forks, o.pauses, o.resumes} {
		c.add(0, outcomeOK)
	}
}

// Metrics serves the Prometheus text format.
func (o *Observer) Metrics() http.Handler { return &o.families }

func (o *Observer) active(r *reading) {
	o.mu.Lock()
	defer o.mu.Unlock()
	r.set("cove_runs_active", float64(o.busy))
}

// outcome is the label of how something went.
func outcome(err error) string {
	if err == nil {
		return outcomeOK
	}
	return string(fault.KindOf(err))
}

// template is a label that says no more than everybody may know: whoever reads the metrics is of no tenant, and what a
// tenant calls its own templates is neither theirs to read nor bounded in number.
func (o *Observer) template(name string) string {
	if name == "" || o.shared(name) {
		return name
	}
	return "snapshot"
}

// Created counts a create.
func (o *Observer) Created(sb sandbox.Sandbox, took time.Duration, err error) {
	if err != nil {
		// A template that failed to resolve was named by the caller: it must not become a label.
		name := sb.Template
		if fault.Is(err, fault.NotFound) || fault.Is(err, fault.Invalid) {
			name = ""
		}
		o.created.inc(o.template(name), outcome(err))
		o.log.Warn("sandbox not created", "sandbox", sb.ID, "tenant", sb.Tenant, "template", sb.Template, "took", took, "error", err)
		return
	}
	label := o.template(sb.Template)
	o.created.inc(label, outcomeOK)
	if sb.ForkedFrom != "" {
		o.log.Info("sandbox created", "sandbox", sb.ID, "tenant", sb.Tenant, "template", sb.Template, "forked_from", sb.ForkedFrom)
		return
	}
	o.create.observe(took, label)
	o.log.Info("sandbox created", "sandbox", sb.ID, "tenant", sb.Tenant, "template", sb.Template, "took", took)
}

// Forked counts a fork.
func (o *Observer) Forked(parent sandbox.Sandbox, n int, took, stall time.Duration, err error) {
	o.forks.inc(outcome(err))
	if err != nil {
		o.log.Warn("sandbox not forked", "sandbox", parent.ID, "tenant", parent.Tenant, "count", n, "took", took, "error", err)
		return
	}
	o.children.add(uint64(n))
	o.fork.observe(took)
	o.stall.observe(stall)
	o.log.Info("sandbox forked", "sandbox", parent.ID, "tenant", parent.Tenant, "count", n, "took", took, "stall", stall)
}

// Paused counts a pause.
func (o *Observer) Paused(sb sandbox.Sandbox, took time.Duration, err error) {
	o.changed(sb, took, err, o.pauses, o.pause, "sandbox paused", "sandbox not paused")
}

// Resumed counts a resume.
func (o *Observer) Resumed(sb sandbox.Sandbox, took time.Duration, err error) {
	o.changed(sb, took, err, o.resumes, o.resume, "sandbox resumed", "sandbox not resumed")
}

func (o *Observer) changed(sb sandbox.Sandbox, took time.Duration, err error, total *counter, times *histogram, done, failed string) {
	total.inc(outcome(err))
	if err != nil {
		o.log.Warn(failed, "sandbox", sb.ID, "tenant", sb.Tenant, "took", took, "error", err)
		return
	}
	times.observe(took)
	o.log.Info(done, "sandbox", sb.ID, "tenant", sb.Tenant, "took", took)
}

// Adopted counts a sandbox that outlived its server.
func (o *Observer) Adopted(sb sandbox.Sandbox) {
	o.adopted.inc()
	o.log.Info("sandbox adopted", "sandbox", sb.ID, "tenant", sb.Tenant, "template", sb.Template)
}

// Ended counts an end; the Manager has logged it.
func (o *Observer) Ended(sb sandbox.Sandbox) { o.ended.inc(string(sb.Cause)) }

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
		label = outcomeLeft
	}
	o.runs.inc(string(kind), label)
	o.run.observe(took, string(kind))
	if o.log.Enabled(context.Background(), slog.LevelDebug) { // logging is not work that stops: there is no caller to follow
		o.log.Debug("run ended", "sandbox", sb.ID, "tenant", sb.Tenant, "run", kind, "outcome", label, "took", took)
	}
}

// Failed counts a failure that a caller was told, and notes it on the request's span.
func (o *Observer) Failed(ctx context.Context, err error) {
	kind := fault.KindOf(err)
	o.failures.inc(string(kind))
	noteFailure(ctx, kind)
}

// Served counts a request that was answered, and completes its span. The request is the one that the routes saw.
func (o *Observer) Served(r *http.Request, id string, status int, received, sent int64) {
	route := r.Pattern
	switch {
	case forMachines(r.URL.Path):
		route = r.URL.Path
	case route == "" || route == "/":
		route = "other" // what others think up must not become a label
	}
	o.requests.inc(route, statusText(status))
	o.received.add(uint64(received))
	o.sent.add(uint64(sent))
	noteAnswer(r, id, status)
}

// forMachines are the pages that are asked for every few seconds.
func forMachines(path string) bool {
	return path == "/healthz" || path == "/readyz" || path == "/metrics"
}

// statusText is the number as text, without an allocation for the usual ones.
func statusText(status int) string {
	switch status {
	case 0: // nothing was answered: the connection was upgraded or cut
		return "none"
	case http.StatusOK:
		return "200"
	case http.StatusCreated:
		return "201"
	case http.StatusNoContent:
		return "204"
	}
	return strconv.Itoa(status)
}
