package telemetry

import (
	"context"
	"iter"
	"maps"
	"net/http"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// What a span may say is decided here: ids, names, counts, kinds and times. Code, commands, output, environments, file
// names and metadata are the caller's and never enter one; the beginning of what a run wrote to stderr does where an
// operator asked for it.
const (
	keyFault    = attribute.Key("error.type") // a fault's kind, or a run's outcome
	keyRequest  = attribute.Key("cove.request")
	keySandbox  = attribute.Key("cove.sandbox.id")
	keyTenant   = attribute.Key("cove.tenant")
	keyTemplate = attribute.Key("cove.template")
	keyCreated  = attribute.Key("cove.created") // false: a living sandbox answered
	keyCause    = attribute.Key("cove.cause")
	keyCount    = attribute.Key("cove.fork.count")
	keyStall    = attribute.Key("cove.fork.stall_ms")
	keyMemory   = attribute.Key("cove.fork.memory_bytes")
	keyMethod   = attribute.Key("http.request.method")
	keyRoute    = attribute.Key("http.route")
	keyStatus   = attribute.Key("http.response.status_code")
)

// w3c reads and writes traceparent and tracestate. Baggage is not for us: it would carry what others say into spans.
var w3c propagation.TraceContext

// asked is in the context of a request that came with a traceparent of its own.
type asked struct{}

// Handler makes a span of every request, below the caller's if it sent one. Observer.Served completes it. A nil Tracing only
// remembers the caller's, for what runs inside.
func (t *Tracing) Handler(next http.Handler) http.Handler {
	if t == nil {
		return passing(next)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if forMachines(r.URL.Path) {
			next.ServeHTTP(w, r)
			return
		}
		ctx := callers(r)
		method := methodOf(r)
		ctx, span := t.tracer.Start(ctx, method, trace.WithSpanKind(trace.SpanKindServer), trace.WithAttributes(keyMethod.String(method)))
		defer span.End()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// callers is the context of a request with the span of its caller, if it sent one.
func callers(r *http.Request) context.Context {
	ctx := w3c.Extract(r.Context(), propagation.HeaderCarrier(r.Header))
	if trace.SpanContextFromContext(ctx).IsRemote() {
		ctx = context.WithValue(ctx, asked{}, true)
	}
	return ctx
}

func passing(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Traceparent") != "" {
			r = r.WithContext(callers(r))
		}
		next.ServeHTTP(w, r)
	})
}

// methodOf is _OTHER for what HTTP does not know: a name that a stranger thought up is no name for a span.
func methodOf(r *http.Request) string {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
		return r.Method
	}
	return "_OTHER"
}

// noteAnswer completes the span of a request whose route is known now.
func noteAnswer(r *http.Request, id string, status int) {
	span := trace.SpanFromContext(r.Context())
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(keyRequest.String(id), keyStatus.Int(status))
	if _, path, ok := strings.Cut(r.Pattern, " "); ok { // "POST /path/{id}"
		span.SetName(r.Pattern)
		span.SetAttributes(keyRoute.String(path))
	}
	if sb := r.PathValue("id"); sb != "" && validID(sb) {
		span.SetAttributes(keySandbox.String(sb))
	}
	if status >= http.StatusInternalServerError {
		span.SetStatus(codes.Error, "")
	}
}

// validID keeps what a stranger writes into a path out of spans.
func validID(id string) bool {
	return len(id) <= 64 && !strings.ContainsFunc(id, func(c rune) bool { return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' })
}

// noteFailure tells the span of a request what its caller is told. The sentence is on the span of what failed, if any.
func noteFailure(ctx context.Context, kind fault.Kind) {
	if span := trace.SpanFromContext(ctx); span.IsRecording() {
		span.SetAttributes(keyFault.String(string(kind)))
	}
}

// fail gives a span the kind of a fault and the sentence that the caller gets, never the chain below it. What is invalid or
// not found is told by its kind only: the sentence quotes the request.
func fail(span trace.Span, err error) {
	if err == nil {
		return
	}
	kind, sentence := fault.KindOf(err), ""
	if kind != fault.Invalid && kind != fault.NotFound {
		sentence = fault.Message(err)
	}
	span.SetStatus(codes.Error, sentence)
	span.SetAttributes(keyFault.String(string(kind)))
}

// Manager is a sandbox.Manager whose work for callers shows in traces.
type Manager struct {
	*sandbox.Manager
	tracer  trace.Tracer
	driver  string
	capture bool
}

// Manager wraps m. With capture, spans of runs hold the beginning of what was written to stderr.
func (t *Tracing) Manager(m *sandbox.Manager, capture bool) *Manager {
	return &Manager{m, t.tracer, m.Caps().Name, capture}
}

// start begins a span for what a caller asks of a sandbox; the id is empty for one that is not there yet.
func (m *Manager) start(ctx context.Context, name string, p auth.Principal, id string) (context.Context, trace.Span) {
	ctx, span := m.tracer.Start(ctx, name)
	if span.IsRecording() {
		span.SetAttributes(keyTenant.String(p.Tenant))
		if id != "" && validID(id) {
			span.SetAttributes(keySandbox.String(id))
		}
	}
	return ctx, span
}

// Create is sandbox.create.
func (m *Manager) Create(ctx context.Context, p auth.Principal, spec sandbox.Spec) (sandbox.Sandbox, bool, error) {
	ctx, span := m.start(ctx, "sandbox.create", p, "")
	defer span.End()
	sb, created, err := m.Manager.Create(ctx, p, spec)
	fail(span, err)
	if err == nil {
		span.SetAttributes(keySandbox.String(sb.ID), keyTemplate.String(sb.Template), keyCreated.Bool(created))
	}
	return sb, created, err
}

// Fork is sandbox.fork.
func (m *Manager) Fork(ctx context.Context, p auth.Principal, id string, spec sandbox.ForkSpec) (sandbox.ForkResult, error) {
	ctx, span := m.start(ctx, "sandbox.fork", p, id)
	defer span.End()
	span.SetAttributes(keyCount.Int(spec.Count))
	result, err := m.Manager.Fork(ctx, p, id, spec)
	fail(span, err)
	if err == nil {
		span.SetAttributes(keyStall.Float64(milliseconds(result.Stall)), keyMemory.Int64(result.Memory))
	}
	return result, err
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// Pause is sandbox.pause.
func (m *Manager) Pause(ctx context.Context, p auth.Principal, id string, spec sandbox.PauseSpec) (sandbox.Sandbox, error) {
	ctx, span := m.start(ctx, "sandbox.pause", p, id)
	defer span.End()
	sb, err := m.Manager.Pause(ctx, p, id, spec)
	fail(span, err)
	return sb, err
}

// Resume is sandbox.resume.
func (m *Manager) Resume(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error) {
	ctx, span := m.start(ctx, "sandbox.resume", p, id)
	defer span.End()
	sb, err := m.Manager.Resume(ctx, p, id, lifetime)
	fail(span, err)
	return sb, err
}

// Snapshot is sandbox.snapshot.
func (m *Manager) Snapshot(ctx context.Context, p auth.Principal, id, name, description string) (*template.Template, error) {
	return m.SnapshotAs(ctx, p, id, sandbox.SnapshotSpec{Name: name, Description: description})
}

// SnapshotAs is sandbox.snapshot too.
func (m *Manager) SnapshotAs(ctx context.Context, p auth.Principal, id string, spec sandbox.SnapshotSpec) (*template.Template, error) {
	ctx, span := m.start(ctx, "sandbox.snapshot", p, id)
	defer span.End()
	t, err := m.Manager.SnapshotAs(ctx, p, id, spec)
	fail(span, err)
	if err == nil {
		span.SetAttributes(keyTemplate.String(t.Name))
	}
	return t, err
}

// Kill is sandbox.kill.
func (m *Manager) Kill(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error) {
	ctx, span := m.start(ctx, "sandbox.kill", p, id)
	defer span.End()
	sb, err := m.Manager.Kill(ctx, p, id)
	fail(span, err)
	if err == nil {
		span.SetAttributes(keyCause.String(string(sb.Cause)))
	}
	return sb, err
}

// Passing is a sandbox.Manager that makes no spans, and tells what runs inside the span of its caller all the same.
type Passing struct{ *sandbox.Manager }

// Run tells a cell.
func (m Passing) Run(ctx context.Context, p auth.Principal, id string, params agentapi.RunParams) iter.Seq2[agentapi.Event, error] {
	params.Env = withParent(ctx, params.Env)
	return m.Manager.Run(ctx, p, id, params)
}

// Exec tells a command, unless its environment is to be clean.
func (m Passing) Exec(ctx context.Context, p auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error) {
	if !params.CleanEnv {
		params.Env = withParent(ctx, params.Env)
	}
	return m.Manager.Exec(ctx, p, id, params)
}

// withParent tells what runs inside the span that it belongs to, if the caller's request belonged to one: a program
// that makes spans of its own then hangs them below.
func withParent(ctx context.Context, env map[string]string) map[string]string {
	if ctx.Value(asked{}) == nil || env["TRACEPARENT"] != "" {
		return env
	}
	parent := propagation.MapCarrier{}
	w3c.Inject(ctx, parent)
	env = maps.Clone(env)
	if env == nil {
		env = map[string]string{}
	}
	for name, value := range parent {
		env[strings.ToUpper(name)] = value
	}
	return env
}
