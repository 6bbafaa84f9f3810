// Package cove is our own API as a dialect: REST and NDJSON streams in front of the domain, without privileges of its
// own. It decodes, asks and encodes; it decides nothing and knows no driver and no store.
package cove

import (
	"context"
	_ "embed" // the OpenAPI file
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Prefix is where the API lives.
const Prefix = client.Prefix

// Sandboxes is what the API asks of the domain.
type Sandboxes interface {
	Create(ctx context.Context, p auth.Principal, spec sandbox.Spec) (sandbox.Sandbox, bool, error)
	Begin(ctx context.Context, p auth.Principal, id string, argv []string) error
	Get(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	List(ctx context.Context, p auth.Principal, q sandbox.ListQuery) (sandbox.Page, error)
	Kill(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	SetLifetime(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error)
	SetNetwork(ctx context.Context, p auth.Principal, id string, n policy.Network) (sandbox.Sandbox, error)
	Usage(ctx context.Context, p auth.Principal, id string) (sandbox.Usage, error)
	Fork(ctx context.Context, p auth.Principal, id string, spec sandbox.ForkSpec) (sandbox.ForkResult, error)
	Pause(ctx context.Context, p auth.Principal, id string, spec sandbox.PauseSpec) (sandbox.Sandbox, error)
	Resume(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error)
	SnapshotAs(ctx context.Context, p auth.Principal, id string, spec sandbox.SnapshotSpec) (*template.Template, error)
	RemoveTemplate(ctx context.Context, p auth.Principal, name string) error
	Run(ctx context.Context, p auth.Principal, id string, params agentapi.RunParams) iter.Seq2[agentapi.Event, error]
	Exec(ctx context.Context, p auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error)
	Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	// Explain turns the error of a stream that broke into why its sandbox ended.
	Explain(ctx context.Context, p auth.Principal, id string, err error) error
	StartKernel(ctx context.Context, p auth.Principal, id string, spec sandbox.KernelSpec) (agentapi.Kernel, error)
	StopKernel(ctx context.Context, p auth.Principal, id, name string) error
	RestartKernel(ctx context.Context, p auth.Principal, id, name string) (agentapi.Kernel, error)
	Events(ctx context.Context, p auth.Principal, q sandbox.EventQuery) iter.Seq2[sandbox.LifecycleEvent, error]
}

// Keys is what the API asks of authentication.
type Keys interface {
	Authenticate(ctx context.Context, presented string) (auth.Principal, error)
	Create(ctx context.Context, tenant, name string, admin bool) (auth.Secret, auth.KeyRecord, error)
	List(ctx context.Context, tenant string) ([]auth.KeyRecord, error)
	Revoke(ctx context.Context, tenant, id string) error
}

// Templates is what a tenant's sandbox can start from.
type Templates interface {
	List(tenant string) []template.Info
	Resolve(ctx context.Context, tenant, name string) (*template.Template, error)
}

// API answers requests below Prefix.
type API struct {
	sandboxes  Sandboxes
	keys       Keys
	templates  Templates
	images     Images     // nil: there are none
	volumes    Volumes    // nil: there are none
	kubernetes Kubernetes // nil: there is none
	snippets   Snippets   // nil: there are none
	artifacts  Artifacts  // nil: there are none
	runs       Runs       // nil: there are none
	sessions   Sessions   // nil: there are none

	datasets Datasets // nil: there are none

	log    *slog.Logger
	failed func(context.Context, error)
	mux    *http.ServeMux
}

// New makes the API in front of the domain.
func New(s Sandboxes, k Keys, t Templates, log *slog.Logger) *API {
	a := &API{sandboxes: s, keys: k, templates: t, log: log, failed: func(context.Context, error) {}, mux: http.NewServeMux()}
	methods := map[string][]string{}
	for _, r := range routes {
		a.mux.HandleFunc(r.method+" "+Prefix+r.path, a.serve(r))
		if !r.upgrades() {
			methods[r.path] = append(methods[r.path], r.method)
		}
	}
	for path, allowed := range methods {
		a.mux.HandleFunc(Prefix+path, a.noMethod(strings.Join(allowed, ", ")))
	}
	a.mux.HandleFunc("/", a.noRoute)
	return a
}

// OnFailure calls f with each failure that a caller is told, for whoever counts them. It is set before the API serves.
func (a *API) OnFailure(f func(context.Context, error)) { a.failed = f }

func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) { a.mux.ServeHTTP(w, r) }

// call is one request and who makes it.
type call struct {
	w     http.ResponseWriter
	r     *http.Request
	who   auth.Principal
	known []param // query parameters

	needsBody bool
}

func (c *call) ctx() context.Context { return c.r.Context() }
func (c *call) id() string           { return c.r.PathValue("id") }

func (a *API) serve(route route) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		c := &call{w: w, r: r, known: route.query, needsBody: route.required}
		await(w, r)
		if !route.public {
			var err error
			if c.who, err = a.keys.Authenticate(r.Context(), presented(r.Header)); err != nil {
				a.refuse(c, err)
				return
			}
		}
		if route.admin && !c.who.Admin {
			a.refuse(c, fault.New(fault.Denied, "this needs an admin key; the server's own is in server/api_key of its data directory"))
			return
		}
		if err := a.owns(route, c); err != nil {
			a.refuse(c, err)
			return
		}
		if err := route.handle(a, c); err != nil {
			a.refuse(c, err)
		}
	}
}

// owns refuses a request about a sandbox of another tenant before anything in the request is looked at.
func (a *API) owns(route route, c *call) error {
	if !strings.HasPrefix(route.path, "/sandboxes/{id}") {
		return nil
	}
	_, err := a.sandboxes.Get(c.ctx(), c.who, c.id())
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

// refuse answers with a failure: the caller gets kind and sentence, the operator the chain.
func (a *API) refuse(c *call, err error) {
	err = a.explain(c, err)
	a.failed(c.ctx(), err)
	kind := fault.KindOf(err)
	if kind == fault.Internal {
		a.log.Error("request failed", "request", c.w.Header().Get("X-Request-Id"), "tenant", c.who.Tenant,
			"sandbox", c.id(), "error", err)
	}
	if kind == fault.Unauthed {
		c.w.Header().Set("WWW-Authenticate", `Bearer realm="cove"`)
	}
	if kind == fault.Unavailable || kind == fault.Exhausted {
		c.w.Header().Set("Retry-After", "1")
	}
	_ = respond(c.w, Status(kind), client.ErrorBody{Error: *wireFault(err)}) // the client has gone: nobody to tell
}

// blame gives a kind to what ended because somebody stopped waiting, which is nobody's defect.
func blame(ctx context.Context, err error) error {
	if fault.KindOf(err) != fault.Internal || ctx.Err() == nil {
		return err
	}
	if errors.Is(context.Cause(ctx), ErrShutdown) {
		return fault.Wrap(fault.Unavailable, err, "the server is shutting down")
	}
	return fault.Wrap(fault.Unavailable, err, "the request was cancelled")
}

// explain gives a failure the kind and the sentence that the caller can act on.
func (a *API) explain(c *call, err error) error {
	if id := c.id(); id != "" && c.who.Tenant != "" {
		err = a.sandboxes.Explain(c.ctx(), c.who, id, err)
	}
	if errors.Is(err, policy.ErrForbidden) { // nothing is wrong with the request itself
		err = fault.Wrap(fault.Denied, err, "%s", fault.Message(err))
	}
	return blame(c.ctx(), err)
}

// ErrShutdown is the cause with which the server cancels requests that outlive its grace.
var ErrShutdown = errors.New("the server is shutting down")

func (a *API) noRoute(w http.ResponseWriter, r *http.Request) {
	await(w, r)
	a.refuse(&call{w: w, r: r}, fault.New(fault.NotFound, "no %s %s in this API; see %s/openapi.json", r.Method, r.URL.Path, Prefix))
}

// noMethod answers for a path of the API that is asked with another method than it has.
func (a *API) noMethod(allowed string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		await(w, r)
		w.Header().Set("Allow", allowed)
		a.refuseMethod(w, r, fmt.Sprintf("%s has no %s; its methods are %s", r.URL.Path, r.Method, allowed))
	}
}

func (a *API) refuseMethod(w http.ResponseWriter, r *http.Request, message string) {
	a.failed(r.Context(), fault.New(fault.NotFound, "%s", message))
	_ = respond(w, http.StatusMethodNotAllowed, client.ErrorBody{Error: client.Fault{Kind: client.NotFound, Message: message}})
}

func respond(w http.ResponseWriter, status int, value any) error {
	body, err := json.Marshal(value)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, err = w.Write(append(body, '\n'))
	return err
}

func (c *call) answer(status int, value any) error {
	// A write that fails means that the client has gone: there is nobody left to tell.
	_ = respond(c.w, status, value)
	return nil
}

func (c *call) nothing() error {
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}

//go:embed openapi.json
var document []byte

func serveDocument(_ *API, c *call) error {
	c.w.Header().Set("Content-Type", "application/json")
	_, _ = c.w.Write(document)
	return nil
}
