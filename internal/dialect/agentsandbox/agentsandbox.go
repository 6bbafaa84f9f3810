// Package agentsandbox is the part of Kubernetes' API that the clients of agent-sandbox use, as a dialect: objects that are
// posted, watched and deleted, and sandboxes that follow them. There is no cluster behind it; what answers inside of a sandbox
// is for the packages below.
package agentsandbox

import (
	"context"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Sandboxes is what the dialect asks of the domain.
type Sandboxes interface {
	Create(ctx context.Context, p auth.Principal, spec sandbox.Spec) (sandbox.Sandbox, bool, error)
	Get(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	Each(yield func(sandbox.Sandbox) bool)
	Kill(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	SetLifetime(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error)
	Pause(ctx context.Context, p auth.Principal, id string, spec sandbox.PauseSpec) (sandbox.Sandbox, error)
	Resume(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error)
	Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	PortAgent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	Events(ctx context.Context, p auth.Principal, q sandbox.EventQuery) iter.Seq2[sandbox.LifecycleEvent, error]
}

// Keys is what the dialect asks of authentication.
type Keys interface {
	Authenticate(ctx context.Context, presented string) (auth.Principal, error)
}

// Images finds the template that a name of an image stands for; what is not here is pulled.
type Images interface {
	Ensure(ctx context.Context, tenant string, r template.PullRequest) (*template.Template, error)
}

// Templates are what sandboxes start from, whoever asks.
type Templates interface {
	List(tenant string) []template.Info
	Resolve(ctx context.Context, tenant, name string) (*template.Template, error)
}

// Documents keeps the objects over the life of a server.
type Documents interface {
	PutDocument(ctx context.Context, tenant, kind, id string, body []byte) error
	Documents(ctx context.Context, tenant, kind string) ([]sandbox.Document, error)
	DocumentOwners(ctx context.Context, kind string) ([]string, error)
	DeleteDocument(ctx context.Context, tenant, kind, id string) error
}

// Runtime is what answers on port 8888 of every sandbox.
type Runtime interface {
	// Prepare makes a sandbox ready for it.
	Prepare(ctx context.Context, p auth.Principal, id string) error
	Serve(w http.ResponseWriter, r *http.Request, p auth.Principal, id string)
}

// Router is what the service sandbox-router-svc stands for.
type Router interface {
	// Dial connects to it for somebody whose tunnel has shown who they are.
	Dial(ctx context.Context, p auth.Principal) (net.Conn, error)
}

// Daemon is the newer runtime, which sandboxes seem to have on ports of their own.
type Daemon interface {
	Serve(w http.ResponseWriter, r *http.Request, p auth.Principal, id string)
}

// Config is what the dialect is told at its start.
type Config struct {
	Version     string              // of this server
	Templates   map[string]string   // the dialect's name of a template → ours
	Namespaces  map[string][]string // tenant → namespaces that it may use; a tenant that is not named: any
	MaxLifetime time.Duration       // of a sandbox; zero: none
	Networks    policy.Rules        // which private networks templates may open
	MaxWatches  int                 // of one tenant at a time; zero: 500
	MaxTunnels  int                 // of one tenant at a time; zero: 100
	History     int                 // how many changes of one kind a tenant can look back; zero: 1000
	RetryAfter  time.Duration       // before the first new attempt to make a sandbox; zero: 1 s
	Space       diskspace.Check     // before an object is added; nil refuses nothing
}

func (c Config) withDefaults() Config {
	if c.MaxWatches == 0 {
		c.MaxWatches = 500
	}
	if c.MaxTunnels == 0 {
		c.MaxTunnels = 100
	}
	if c.History == 0 {
		c.History = 1000
	}
	if c.RetryAfter == 0 {
		c.RetryAfter = time.Second
	}
	return c
}

// API answers the requests of kubectl and of agent-sandbox's clients.
type API struct {
	cfg       Config
	sandboxes Sandboxes
	keys      Keys
	images    Images
	templates Templates
	runtime   Runtime
	router    Router
	daemon    Daemon
	store     *store
	log       *slog.Logger
	failed    func(context.Context, error)

	workers *workers
	hearing *hearing
	tunnels tunnels

	life   context.Context // of work that outlives its caller; ends with Close
	cancel context.CancelFunc
	work   sync.WaitGroup
	quit   chan struct{} // closed when streams should end in peace
	once   sync.Once
}

// New makes the dialect in front of the domain. Open it before it serves, and Close it.
func New(cfg Config, s Sandboxes, k Keys, i Images, t Templates, d Documents, r Runtime, log *slog.Logger) *API {
	cfg = cfg.withDefaults()
	// Owned by the API and ended by Close: sandboxes are made and ended after their requests were answered.
	life, cancel := context.WithCancel(context.Background())
	a := &API{
		cfg: cfg, sandboxes: s, keys: k, images: i, templates: t, runtime: r, log: log, failed: func(context.Context, error) {},
		store: newStore(d, cfg.Space, cfg.History, log), hearing: &hearing{all: map[string]bool{}}, life: life, cancel: cancel, quit: make(chan struct{}),
	}
	a.workers = newWorkers(a)
	return a
}

// Connect sets who answers for port-forwards: the router, which finds sandboxes through the API, and the newer runtime. It is
// called before the API serves.
func (a *API) Connect(r Router, d Daemon) { a.router, a.daemon = r, d }

// OnFailure calls f with each failure that a caller is told, for whoever counts them. It is set before the API serves.
func (a *API) OnFailure(f func(context.Context, error)) { a.failed = f }

// Open reads the objects of an earlier server and brings sandboxes and objects together again.
func (a *API) Open(ctx context.Context) error {
	tenants, err := a.store.open(ctx)
	if err != nil {
		return err
	}
	for _, tenant := range tenants {
		a.hear(tenant)
		a.wakeAll(tenant)
	}
	a.endOrphans()
	return nil
}

// endOrphans ends sandboxes whose objects were deleted while no server could end them.
func (a *API) endOrphans() {
	a.sandboxes.Each(func(sb sandbox.Sandbox) bool {
		f, ours := readFacts(sb)
		if !ours {
			return true
		}
		r := a.store.realm(sb.Tenant)
		if o := r.get(sandboxKind, f.Namespace, f.Name); (o == nil || o.uid() != f.UID) && !r.unreadable(path{f.Namespace, f.Name}) {
			a.end(sb.Tenant, sb.ID)
		}
		return true
	})
}

// Quit ends watches, which would otherwise go on for as long as their clients like.
func (a *API) Quit() { a.once.Do(func() { close(a.quit) }) }

// Close ends the work that outlives its callers and waits for it. Sandboxes live on.
func (a *API) Close() {
	a.Quit()
	a.cancel()
	a.workers.stop()
	a.work.Wait()
}
