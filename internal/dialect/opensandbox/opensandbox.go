// Package opensandbox is OpenSandbox's lifecycle API as a dialect, and the way by path to the ports of its sandboxes. It
// decodes, asks the domain and encodes; what execd and the egress sidecar answer is for the packages below it.
package opensandbox

import (
	"context"
	"iter"
	"log/slog"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/dialect/rawport"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Sandboxes is what the dialect asks of the domain.
type Sandboxes interface {
	Create(ctx context.Context, p auth.Principal, spec sandbox.Spec) (sandbox.Sandbox, bool, error)
	Get(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	List(ctx context.Context, p auth.Principal, q sandbox.ListQuery) (sandbox.Page, error)
	Lookup(ctx context.Context, id string) (auth.Principal, sandbox.Sandbox, error)
	Each(yield func(sandbox.Sandbox) bool)
	Stopped(id string) <-chan struct{}
	Kill(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	End(ctx context.Context, p auth.Principal, id string, cause sandbox.Cause, message string) (sandbox.Sandbox, error)
	SetLifetime(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error)
	ExtendLifetime(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error)
	SetMetadata(ctx context.Context, p auth.Principal, id string, merge func(map[string]string) (map[string]string, error)) (sandbox.Sandbox, error)
	Pause(ctx context.Context, p auth.Principal, id string, spec sandbox.PauseSpec) (sandbox.Sandbox, error)
	Resume(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error)
	Snapshot(ctx context.Context, p auth.Principal, id, name, description string) (*template.Template, error)
	RemoveTemplate(ctx context.Context, p auth.Principal, name string) error
	CreateVolume(ctx context.Context, p auth.Principal, name string, bytes int64) (sandbox.Volume, error)
	RemoveVolume(ctx context.Context, p auth.Principal, name string) error
	Volumes(ctx context.Context, p auth.Principal) ([]sandbox.Volume, error)
	Exec(ctx context.Context, p auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error)
	Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	PortAgent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	Events(ctx context.Context, p auth.Principal, q sandbox.EventQuery) iter.Seq2[sandbox.LifecycleEvent, error]
	Usage(ctx context.Context, p auth.Principal, id string) (sandbox.Usage, error)
}

// Keys is what the dialect asks of authentication.
type Keys interface {
	rawport.Keys
	Authenticate(ctx context.Context, presented string) (auth.Principal, error)
}

// Images finds the template that a name of an image stands for; what is not here is pulled.
type Images interface {
	Ensure(ctx context.Context, tenant string, r template.PullRequest) (*template.Template, error)
}

// Documents keeps the dialect's own small state: which snapshots there are, and what was removed.
type Documents interface {
	PutDocument(ctx context.Context, tenant, kind, id string, body []byte) error
	Document(ctx context.Context, tenant, kind, id string) ([]byte, error)
	Documents(ctx context.Context, tenant, kind string) ([]sandbox.Document, error)
	DocumentOwners(ctx context.Context, kind string) ([]string, error)
	DeleteDocument(ctx context.Context, tenant, kind, id string) error
}

// Config is what the dialect is told at its start.
type Config struct {
	Secret    []byte          // what tokens are derived from
	MaxLimits template.Limits // of a sandbox; zero fields: unknown
	// Hold is how long a create may hold its request before it is answered with a sandbox that is pending. Zero: 20 s, which
	// leaves the clients ten of the thirty that they wait.
	Hold time.Duration
	// Retention is how long a sandbox whose create failed after its answer stays visible. Zero: 10 minutes.
	Retention time.Duration
	// RetryFor is how long a port that nobody listens on is tried again. Zero: 1 s; negative: not at all.
	RetryFor time.Duration
	// Sweep is how often volumes are looked for that have outlived their sandboxes. Zero: 10 minutes.
	Sweep time.Duration
}

func (c Config) withDefaults() Config {
	if c.Hold == 0 {
		c.Hold = 20 * time.Second
	}
	if c.Retention == 0 {
		c.Retention = 10 * time.Minute
	}
	if c.Sweep == 0 {
		c.Sweep = 10 * time.Minute
	}
	if c.RetryFor == 0 {
		c.RetryFor = time.Second
	}
	return c
}

// API answers the requests of OpenSandbox's clients.
type API struct {
	cfg       Config
	tokens    auth.Tokens
	sandboxes Sandboxes
	keys      Keys
	images    Images
	documents Documents
	execd     http.Handler
	egress    http.Handler
	raw       *rawport.Proxy
	log       *slog.Logger
	failed    func(context.Context, error)
	mux       *http.ServeMux

	creations *creations
	mains     *mains
	renewals  *renewals
	shots     *shots
	tenants   *tenants

	life   context.Context // of work that outlives its caller; ends with Close
	cancel context.CancelFunc
	work   sync.WaitGroup
}

// New makes the dialect in front of the domain; execd and egress answer for the ports that a sandbox has without anybody
// listening there. Close it.
func New(cfg Config, s Sandboxes, k Keys, i Images, d Documents, execd, egress http.Handler, log *slog.Logger) *API {
	cfg = cfg.withDefaults()
	// Owned by the API and ended by Close: creates that go on after their answer, and whoever watches entrypoints.
	life, cancel := context.WithCancel(context.Background())
	a := &API{
		cfg: cfg, tokens: auth.NewTokens(cfg.Secret), sandboxes: s, keys: k, images: i, documents: d, execd: execd, egress: egress,
		log: log, failed: func(context.Context, error) {}, mux: http.NewServeMux(),
		creations: newCreations(cfg.Retention), mains: newMains(), renewals: newRenewals(), shots: newShots(), tenants: newTenants(), life: life, cancel: cancel,
	}
	a.raw = rawport.New(rawport.Config{RetryFor: cfg.RetryFor, Keys: k, Refuse: a.rawFailed}, s, log)
	for _, r := range routes {
		a.mux.HandleFunc(r.pattern, a.serve(r))
	}
	a.mux.HandleFunc("/", a.noRoute)
	return a
}

// OnFailure calls f with each failure that a caller is told, for whoever counts them. It is set before the API serves.
func (a *API) OnFailure(f func(context.Context, error)) { a.failed = f }

// Open watches the entrypoints of the sandboxes that an earlier server has left running, and removes the volumes of those
// that have ended since.
func (a *API) Open() {
	a.Adopt()
	a.work.Go(a.sweepVolumes)
}

// Adopt sees to sandboxes that the domain has got from others.
func (a *API) Adopt() {
	a.sandboxes.Each(func(sb sandbox.Sandbox) bool {
		if _, ours := sb.Annotations[access.Annotation]; ours {
			a.attend(sb.Tenant)
			a.chill(sb)
			a.adopt(sb)
		}
		return true
	})
}

// Close ends the work that outlives its callers and waits for it. Sandboxes and their entrypoints go on.
func (a *API) Close() {
	a.cancel()
	a.work.Wait()
	a.raw.Close()
}

// prefix is where the lifecycle API is.
const prefix = "/v1"

// roots are where the API's paths begin behind the prefix.
var roots = []string{"/sandboxes", "/snapshots", "/pools", "/templates"}

// unprefixed tells whether a request leaves the prefix out, which OpenSandbox allows. Such paths are another dialect's, unless
// the key comes under OpenSandbox's own name.
func unprefixed(r *http.Request) bool {
	return r.Header.Get(headerKey) != "" && slices.ContainsFunc(roots, func(root string) bool {
		rest, ok := strings.CutPrefix(r.URL.Path, root)
		return ok && (rest == "" || rest[0] == '/')
	})
}

// Matches tells whether a request is for this dialect.
func (a *API) Matches(r *http.Request) bool {
	return r.URL.Path == prefix || strings.HasPrefix(r.URL.Path, prefix+"/") || a.Enters(r) || unprefixed(r)
}

// Enters tells whether a request is for a port of a sandbox.
func (a *API) Enters(r *http.Request) bool { return isProxy(r.URL.EscapedPath()) }

// ServeHTTP answers a request. One that a ServeMux would redirect is refused: the clients follow no redirect.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if a.Enters(r) {
		a.serveProxy(w, r)
		return
	}
	allowOrigins(w.Header())
	if preflight(r) {
		answerPreflight(w, r)
		return
	}
	if unprefixed(r) {
		u := *r.URL
		u.Path = prefix + u.Path
		if u.RawPath != "" {
			u.RawPath = prefix + u.RawPath
		}
		r.URL = &u
	}
	if p := r.URL.EscapedPath(); path.Clean(p) != p && path.Clean(p)+"/" != p {
		a.noRoute(w, r)
		return
	}
	a.mux.ServeHTTP(w, r)
}

// Pages of every origin may use the API: what guards it is a key that a browser sends for nobody.
func allowOrigins(h http.Header) {
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Expose-Headers", "*")
}

// preflight is a browser that asks whether it may ask.
func preflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Origin") != "" && r.Header.Get("Access-Control-Request-Method") != ""
}

func answerPreflight(w http.ResponseWriter, r *http.Request) {
	allowOrigins(w.Header())
	w.Header().Set("Access-Control-Allow-Methods", "GET, POST, PUT, PATCH, DELETE, OPTIONS")
	if asked := r.Header.Get("Access-Control-Request-Headers"); asked != "" {
		w.Header().Set("Access-Control-Allow-Headers", asked)
	}
	w.Header().Set("Access-Control-Max-Age", "600")
	w.WriteHeader(http.StatusNoContent)
}

// call is one request and who makes it.
type call struct {
	w   http.ResponseWriter
	r   *http.Request
	who auth.Principal
	id  string // of the sandbox that it is for
}

func (c *call) ctx() context.Context { return c.r.Context() }

func (a *API) serve(route route) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		c := &call{w: w, r: r}
		transfer.Await(w, r)
		if err := a.admit(c); err != nil {
			a.refuse(c, err)
			return
		}
		if err := route.handle(a, c); err != nil {
			a.refuse(c, err)
		}
	}
}

// admit finds out who calls and for which sandbox.
func (a *API) admit(c *call) (err error) {
	key := presented(c.r.Header)
	if key == "" {
		return missingKey()
	}
	if c.who, err = a.keys.Authenticate(c.ctx(), key); err != nil {
		return wrongKey(err)
	}
	a.attend(c.who.Tenant)
	if id := c.r.PathValue("sandbox"); id != "" {
		if !idForm.MatchString(id) {
			return noSandbox(id)
		}
		c.id = id
	}
	return nil
}

// presented is the key that came with a request. Some clients are told to send it under another name.
func presented(h http.Header) string {
	for _, name := range []string{headerKey, "X-Api-Key"} {
		if key := h.Get(name); key != "" {
			return key
		}
	}
	scheme, key, _ := strings.Cut(h.Get("Authorization"), " ")
	if strings.EqualFold(scheme, "Bearer") {
		return strings.TrimSpace(key)
	}
	return ""
}

func (a *API) noRoute(w http.ResponseWriter, r *http.Request) {
	transfer.Await(w, r)
	c := &call{w: w, r: r}
	if err := a.admit(c); err != nil {
		a.refuse(c, err)
		return
	}
	a.refuse(c, told(http.StatusNotFound, "NOT_FOUND", "there is no %s %.200s in OpenSandbox's API", r.Method, r.URL.Path))
}
