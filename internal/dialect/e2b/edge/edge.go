// Package edge brings E2B's data plane to its sandboxes: it finds the sandbox of a request by host, header, path or
// signature, checks what guards it, and hands over to whoever answers for the port. It knows nothing of what they say.
package edge

import (
	"context"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/dialect/rawport"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// Sandboxes is what the edge asks of the domain.
type Sandboxes interface {
	// Lookup finds any tenant's sandbox: what guards it is its own token, not a key.
	Lookup(ctx context.Context, id string) (auth.Principal, sandbox.Sandbox, error)
	// Each yields the living sandboxes of every tenant until it is told to stop.
	Each(yield func(sandbox.Sandbox) bool)
	// Stopped is closed once a sandbox runs no more, and at once for one that does not.
	Stopped(id string) <-chan struct{}
	Resume(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error)
	Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	PortAgent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
}

// Config is what an edge has to know.
type Config struct {
	Domain string // of host names {port}-{id}.{Domain}; those below localhost are served too; empty: only those
	Tokens target.Tokens
	Keys   rawport.Keys                      // which no port may see; nil: all texts that look like one
	Lines  func(id string) func(target.Line) // where a sandbox's log is written; nil: nowhere
	// RetryFor is how long a port that nobody listens on is tried again: a server that was just started may be about to
	// listen. Zero: 1 s; negative: not at all.
	RetryFor time.Duration
	// MaxRequests is how many requests one sandbox may have open at once; zero: 2,500, as at E2B. Those that show neither
	// token nor signature have two fifths of that for themselves.
	MaxRequests int
}

// Edge answers requests for sandboxes.
type Edge struct {
	cfg         Config
	sandboxes   Sandboxes
	envd        http.Handler
	interpreter http.Handler
	raw         *rawport.Proxy
	searches    chan struct{} // a place for each search by signature that goes on
	queue       chan struct{} // and for each that waits, too
	log         *slog.Logger

	mu   sync.Mutex
	open map[string]int // requests by sandbox and whether they showed anything
}

// New makes an edge; envd and interpreter answer for the ports that a sandbox has without anybody listening there.
func New(cfg Config, s Sandboxes, envd, interpreter http.Handler, log *slog.Logger) *Edge {
	if cfg.RetryFor == 0 {
		cfg.RetryFor = time.Second
	}
	if cfg.MaxRequests == 0 {
		cfg.MaxRequests = 2500
	}
	if cfg.Lines == nil {
		cfg.Lines = func(string) func(target.Line) { return func(target.Line) {} }
	}
	e := &Edge{
		cfg: cfg, sandboxes: s, envd: envd, interpreter: interpreter, log: log,
		searches: make(chan struct{}, maxSearches), queue: make(chan struct{}, maxSearches+maxWaiting), open: map[string]int{},
	}
	e.raw = e.newProxy()
	return e
}

// Close lets go of connections that are kept for the next request.
func (e *Edge) Close() error {
	e.raw.Close()
	return nil
}

// Matches tells whether a request is for a sandbox.
func (e *Edge) Matches(r *http.Request) bool {
	_, ok, err := e.route(r)
	return ok || err != nil
}

// ByHost tells whether the host of a request names a port of a sandbox.
func (e *Edge) ByHost(r *http.Request) bool {
	_, _, ok := parseHost(r.Host, e.cfg.Domain)
	return ok
}

// ServeHTTP answers a request for a sandbox, and cuts it when the sandbox stops meanwhile.
func (e *Edge) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	at, ok, err := e.route(r)
	switch {
	case err != nil:
		refuse(w, r, at, &refusal{status: http.StatusBadRequest, message: fault.Message(err)})
		return
	case !ok:
		refuse(w, r, at, &refusal{status: http.StatusNotFound, message: "no sandbox is named by " + r.URL.Path})
		return
	}
	r.Pattern = at.pattern() // for whoever counts requests: ports and ids must not become labels
	if at.way == bySignature {
		if at.id, err = e.signed(r); err != nil {
			refuse(w, r, at, asRefusal(err))
			return
		}
	}
	t, no := e.admit(r, at)
	if no != nil {
		refuse(w, r, at, no)
		return
	}
	key, most := e.share(r, at, t.Options)
	if !e.enter(key, most) {
		refuse(w, r, at, &refusal{status: http.StatusTooManyRequests, message: "the sandbox has too many open requests"})
		return
	}
	defer e.leave(key)
	if no := e.wake(r, at, t); no != nil {
		refuse(w, r, at, no)
		return
	}
	e.serve(w, r, at, t)
}

// serve hands a request over to whoever answers for its port. One that only asks whether it may come is answered whatever
// the sandbox does.
func (e *Edge) serve(w http.ResponseWriter, r *http.Request, at route, t *target.Target) {
	r = at.inside(r.WithContext(target.With(r.Context(), t)))
	if at.answered() && preflight(r) {
		e.handler(at).ServeHTTP(w, r)
		return
	}
	stopped := e.sandboxes.Stopped(at.id)
	if rawport.IsClosed(stopped) {
		refuse(w, r, at, notFound)
		return
	}
	rawport.UntilStopped(w, r, stopped, e.handler(at))
}

func (e *Edge) handler(at route) http.Handler {
	switch at.port {
	case target.PortEnvd:
		return e.envd
	case target.PortInterpreter:
		return e.interpreter
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { e.serveRaw(w, r, at) })
}

// admit finds the sandbox of a request and checks what guards it. That comes before everything else: a stranger takes a
// place of it and wakes it only by what the guard must let anybody do.
func (e *Edge) admit(r *http.Request, at route) (*target.Target, *refusal) {
	who, sb, err := e.sandboxes.Lookup(r.Context(), at.id)
	if err != nil {
		return nil, e.unexpected(r, at, err)
	}
	o, err := target.Decode(sb)
	if err != nil {
		return nil, e.unexpected(r, at, err)
	}
	paused := false
	switch sb.State {
	case sandbox.StateRunning:
	case sandbox.StatePaused:
		if !sb.AutoResume || sb.Cold {
			return nil, notFound
		}
		paused = true
	case sandbox.StateStarting:
		return nil, &refusal{status: http.StatusConflict, message: "The sandbox is still starting"}
	case sandbox.StateStopping, sandbox.StateEnded:
		return nil, notFound
	}
	if no := e.guard(r, at, o, paused); no != nil {
		return nil, no
	}
	return &target.Target{Sandbox: sb, Who: who, Options: o, Log: e.cfg.Lines(at.id)}, nil
}

// wake resumes a paused sandbox for a request that was let in.
func (e *Edge) wake(r *http.Request, at route, t *target.Target) *refusal {
	if t.Sandbox.State != sandbox.StatePaused || at.answered() && preflight(r) {
		return nil
	}
	sb, err := e.sandboxes.Resume(r.Context(), t.Who, at.id, t.Sandbox.ResumeLifetime)
	if err != nil {
		return e.unexpected(r, at, err)
	}
	t.Sandbox = sb
	return nil
}

// share is what a request counts against, and how much that may be: strangers have a smaller part of their own, so that
// they cannot lock the owner out.
func (e *Edge) share(r *http.Request, at route, o target.Options) (key string, most int) {
	if e.known(r, at, o) {
		return at.id, e.cfg.MaxRequests
	}
	return at.id + "/public", max(1, e.cfg.MaxRequests*2/5)
}

// unexpected turns a failure of the domain into an answer; the operator hears of defects.
func (e *Edge) unexpected(r *http.Request, at route, err error) *refusal {
	switch fault.KindOf(err) {
	case fault.NotFound, fault.Gone:
		return notFound
	case fault.Conflict:
		return &refusal{status: http.StatusConflict, message: fault.Message(err)}
	case fault.Exhausted:
		return &refusal{status: http.StatusTooManyRequests, message: fault.Message(err)}
	case fault.DiskFull:
		return &refusal{status: http.StatusInsufficientStorage, message: fault.Message(err)}
	case fault.Denied:
		return &refusal{status: http.StatusForbidden, message: fault.Message(err)}
	case fault.Unavailable, fault.Timeout, fault.Unsupported, fault.Invalid, fault.Unauthed:
		return &refusal{status: http.StatusServiceUnavailable, message: fault.Message(err)}
	case fault.Internal:
	}
	if r.Context().Err() == nil {
		e.log.Error("request failed", "sandbox", at.id, "port", at.port, "error", err)
	}
	return &refusal{status: http.StatusInternalServerError, message: "internal error"}
}

func (e *Edge) enter(key string, most int) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.open[key] >= most {
		return false
	}
	e.open[key]++
	return true
}

func (e *Edge) leave(key string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.open[key]--; e.open[key] == 0 {
		delete(e.open, key)
	}
}
