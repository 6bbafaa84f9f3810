// Package e2b is E2B's control plane as a dialect: the REST calls by which its SDKs make, find, pause and end sandboxes.
// It decodes, asks the domain and encodes; what happens inside a sandbox is served by the packages below it.
package e2b

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Sandboxes is what the control plane asks of the domain.
type Sandboxes interface {
	Caps() sandbox.Caps
	Create(ctx context.Context, p auth.Principal, spec sandbox.Spec) (sandbox.Sandbox, bool, error)
	Get(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	List(ctx context.Context, p auth.Principal, q sandbox.ListQuery) (sandbox.Page, error)
	Running(p auth.Principal, without string) int
	Kill(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	SetLifetime(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error)
	ExtendLifetime(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error)
	Expire(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	ChangeNetwork(ctx context.Context, p auth.Principal, id string, change sandbox.NetworkChange) (sandbox.Sandbox, error)
	Pause(ctx context.Context, p auth.Principal, id string, spec sandbox.PauseSpec) (sandbox.Sandbox, error)
	Resume(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error)
	Fork(ctx context.Context, p auth.Principal, id string, spec sandbox.ForkSpec) (sandbox.ForkResult, error)
	Snapshot(ctx context.Context, p auth.Principal, id, name, description string) (*template.Template, error)
	RemoveTemplate(ctx context.Context, p auth.Principal, name string) error
	Exec(ctx context.Context, p auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error)
	Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	Events(ctx context.Context, p auth.Principal, q sandbox.EventQuery) iter.Seq2[sandbox.LifecycleEvent, error]
	History(ctx context.Context, p auth.Principal, id string, from, to time.Time) ([]sandbox.Sample, error)
}

// Keys is what the control plane asks of authentication.
type Keys interface {
	Authenticate(ctx context.Context, presented string) (auth.Principal, error)
}

// Documents keeps the control plane's own small state: which snapshots there are.
type Documents interface {
	PutDocument(ctx context.Context, tenant, kind, id string, body []byte) error
	Document(ctx context.Context, tenant, kind, id string) ([]byte, error)
	Documents(ctx context.Context, tenant, kind string) ([]sandbox.Document, error)
	DeleteDocument(ctx context.Context, tenant, kind, id string) error
}

// Builder answers for templates.
type Builder interface {
	// Serve answers every template path, once its caller is known.
	Serve(w http.ResponseWriter, r *http.Request, who auth.Principal)
	// ServeUpload takes a file for a build; its URL says who may.
	ServeUpload(w http.ResponseWriter, r *http.Request)
	// Resolve finds what a templateID means to its caller, or fault.NotFound.
	Resolve(ctx context.Context, who auth.Principal, ref string) (build.Resolved, error)
}

// Config is what the control plane is told at its start.
type Config struct {
	Domain      string        // where sandboxes are reached by name; empty: by header alone
	Version     string        // of envd, as claimed; SDKs turn on by it what the data plane serves
	Secret      []byte        // what tokens are derived from
	MaxLifetime time.Duration // the longest timeout; zero: 30 days
	// OpenSandboxes lets a caller of the first create make a sandbox without a token, by secure: false.
	OpenSandboxes bool
	Facts         string // the directory of a sandbox with files that tell it of itself; empty: /run/e2b, where it is the sandbox's own
}

// API answers the requests of the control plane.
type API struct {
	cfg       Config
	tokens    target.Tokens
	facts     string
	sandboxes Sandboxes
	keys      Keys
	documents Documents
	builder   Builder
	book      *book
	log       *slog.Logger
	failed    func(context.Context, error)
	mux       *http.ServeMux

	naming sync.Mutex      // held while the name of a snapshot moves
	making map[string]bool // templates of snapshots that nothing names yet
	tidied map[string]bool // tenants whose snapshots were looked through for what an earlier server has left
}

// New makes the control plane in front of the domain.
func New(cfg Config, s Sandboxes, k Keys, d Documents, b Builder, log *slog.Logger) *API {
	a := &API{
		cfg: cfg, tokens: target.NewTokens(cfg.Secret), facts: cfg.Facts, sandboxes: s, keys: k, documents: d, builder: b, book: newBook(), log: log,
		failed: func(context.Context, error) {}, mux: http.NewServeMux(), making: map[string]bool{}, tidied: map[string]bool{},
	}
	if a.facts == "" && s.Caps().Isolation != isolationNone {
		a.facts = factsDir
	}
	for _, r := range routes {
		a.mux.HandleFunc(r.pattern, a.serve(r))
	}
	a.mux.HandleFunc("PUT /templates/{id}/files/{hash}/upload", b.ServeUpload)
	a.mux.HandleFunc("/", a.noRoute)
	return a
}

// OnFailure calls f with each failure that a caller is told, for whoever counts them. It is set before the API serves.
func (a *API) OnFailure(f func(context.Context, error)) { a.failed = f }

// Log is where the data plane tells what happens in a sandbox, for its owner to read.
func (a *API) Log(id string) func(target.Line) {
	return func(line target.Line) { a.book.write(id, line) }
}

// kruise is where OpenKruise's clients look for the control plane.
const kruise = "/kruise/api"

func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if strings.HasPrefix(r.URL.Path, kruise+"/") {
		http.StripPrefix(kruise, http.HandlerFunc(a.route)).ServeHTTP(w, r)
		return
	}
	a.route(w, r)
}

// route refuses what a ServeMux would redirect: the Python SDK follows no redirect.
func (a *API) route(w http.ResponseWriter, r *http.Request) {
	if p := r.URL.EscapedPath(); p == "" || p[0] != '/' || path.Clean(p) != p {
		a.noRoute(w, r)
		return
	}
	a.mux.ServeHTTP(w, r)
}

// call is one request and who makes it.
type call struct {
	w   http.ResponseWriter
	r   *http.Request
	who auth.Principal
	key string // that came with it
	id  string // of the sandbox that it is for
}

func (c *call) ctx() context.Context { return c.r.Context() }

func (a *API) serve(route route) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		c := &call{w: w, r: r, key: presented(r.Header)}
		if !route.streams {
			transfer.Await(w, r)
		}
		if err := a.admit(c, route); err != nil {
			a.refuse(c, err)
			return
		}
		if err := route.handle(a, c); err != nil {
			a.refuse(c, err)
		}
	}
}

// admit finds out who calls and for which sandbox.
func (a *API) admit(c *call, route route) (err error) {
	if route.public {
		return nil
	}
	if c.who, err = a.keys.Authenticate(c.ctx(), c.key); err != nil {
		return err
	}
	if id := c.r.PathValue("sandbox"); id != "" {
		c.id, err = sandboxID(id)
	}
	return err
}

// presented is the key that came with a request.
func presented(h http.Header) string {
	if key := h.Get("X-API-Key"); key != "" {
		return key
	}
	scheme, key, _ := strings.Cut(h.Get("Authorization"), " ")
	if strings.EqualFold(scheme, "Bearer") {
		return strings.TrimSpace(key)
	}
	return ""
}

func (a *API) noRoute(w http.ResponseWriter, r *http.Request) {
	transfer.Await(w, r)
	a.refuse(&call{w: w, r: r}, fault.New(fault.NotFound, "there is no %s %.200s in E2B's API; Cove's own is described by /cove/v1/openapi.json", r.Method, r.URL.Path))
}

// find is a sandbox that is there for E2B: one that has ended is not.
func (a *API) find(c *call) (sandbox.Sandbox, error) {
	sb, err := a.sandboxes.Get(c.ctx(), c.who, c.id)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	switch sb.State {
	case sandbox.StateRunning, sandbox.StatePaused:
		return sb, nil
	case sandbox.StateStarting, sandbox.StateStopping, sandbox.StateEnded:
	}
	return sandbox.Sandbox{}, fault.New(fault.NotFound, "Sandbox %s was not found", c.id)
}

// blame gives a kind to what ended because somebody stopped waiting, which is nobody's defect.
func blame(ctx context.Context, err error) error {
	if fault.KindOf(err) != fault.Internal || ctx.Err() == nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return fault.Wrap(fault.Unavailable, err, "the request was cancelled")
}
