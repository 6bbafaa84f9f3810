// Package router brings requests with X-Sandbox-* headers to a port of the sandbox that they name: the runtime's port is answered
// by the server, every other is passed on as it is. It decides who may come, and knows nothing of what is behind a port.
package router

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/agentsandbox/place"
	"github.com/covehq/cove/internal/dialect/rawport"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

// Names finds the sandbox behind a name of the dialect, for the tenant of p; fault.NotFound when there is none.
type Names interface {
	Find(ctx context.Context, p auth.Principal, namespace, name string) (id string, err error)
}

// Keys turns a presented key into its owner.
type Keys interface {
	rawport.Keys
	Authenticate(ctx context.Context, presented string) (auth.Principal, error)
}

// Runtime answers for the port that clients ask for most.
type Runtime interface {
	Serve(w http.ResponseWriter, r *http.Request, p auth.Principal, id string)
}

// Domain is what the router asks of sandboxes.
type Domain interface {
	Agent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	PortAgent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
	// Stopped is closed once a sandbox that runs does so no more.
	Stopped(id string) <-chan struct{}
}

// Config is what a router is told.
type Config struct {
	// Secret is what the tokens of paths are derived from, at least 32 random bytes that hold over restarts.
	Secret []byte
}

// retryFor is how long a port that nobody listens on is tried again: a server that was just started may be about to listen.
const retryFor = time.Second

// Router is the handler of all of it.
type Router struct {
	names     Names
	keys      Keys
	tokens    auth.Tokens
	inside    Runtime
	sandboxes Domain
	raw       *rawport.Proxy
	own       *inProcess
	log       *slog.Logger
}

// New makes a router. Close ends what it keeps open.
func New(cfg Config, names Names, keys Keys, inside Runtime, m Domain, log *slog.Logger) *Router {
	rt := &Router{names: names, keys: keys, tokens: auth.NewTokens(cfg.Secret), inside: inside, sandboxes: m, log: log}
	rt.raw = rawport.New(rawport.Config{RetryFor: retryFor, Strip: strip, Keys: keys, Refuse: rt.portFailed}, m, log)
	rt.own = newInProcess(rt, log)
	return rt
}

// Close ends connections within this process, and those that are kept for the next request of a port.
func (rt *Router) Close() {
	rt.own.close()
	rt.raw.Close()
}

// Matches tells whether a request is the router's: it names a sandbox, or comes below the prefix of a tenant.
func (rt *Router) Matches(r *http.Request) bool {
	return len(r.Header.Values(headerID)) > 0 || underPrefix(r.URL.Path)
}

// Enters tells whether a request is for the inside of a sandbox, which has guards of its own: all are.
func (rt *Router) Enters(r *http.Request) bool { return rt.Matches(r) }

// ServeHTTP lets a request in and passes it on.
func (rt *Router) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	r.Pattern = "router" // for whoever counts requests: names must not become labels
	presented := takePrefix(r)
	if presented.token == "" && isHealth(r) {
		healthy(w)
		return
	}
	who, err := rt.identify(r, presented.token)
	if err != nil {
		rt.refuse(w, r, err)
		return
	}
	inner := presented.inside(r)
	if isHealth(inner) {
		healthy(w)
		return
	}
	t, err := parseTarget(inner.Header)
	if err != nil {
		rt.refuse(w, r, err)
		return
	}
	id, err := rt.names.Find(r.Context(), who, t.namespace, t.name)
	if err != nil {
		rt.refuse(w, r, rt.unknown(err, t))
		return
	}
	rt.serve(w, inner, who, id, t)
}

// Executes tells whether a request runs a command: whoever sends it twice runs it twice.
func Executes(r *http.Request) bool {
	path := r.URL.EscapedPath()
	if rest, ok := strings.CutPrefix(path, prefix); ok {
		_, rest, _ = strings.Cut(rest, "/")
		path = "/" + rest
	}
	t, err := parseTarget(r.Header)
	return err == nil && t.port == place.PortRuntime && r.Method == http.MethodPost && strings.HasPrefix(path+"/", "/execute/")
}

// unknown is a sandbox that there is not. It is no 5xx, as other routers say it: clients up to 0.5 would ask five times more.
func (rt *Router) unknown(err error, t target) error {
	if fault.Is(err, fault.NotFound) {
		return fault.Wrap(fault.NotFound, err, "there is no sandbox %q in namespace %q", t.name, t.namespace)
	}
	return err
}

func (rt *Router) serve(w http.ResponseWriter, r *http.Request, who auth.Principal, id string, t target) {
	if t.port == place.PortRuntime {
		rt.inside.Serve(w, r, who, id)
		return
	}
	visit := rawport.Visit{Who: who, Sandbox: id, Port: t.port, Origin: rawport.OriginShared}
	serve := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { rt.raw.Serve(w, r, visit) })
	stopped := rt.sandboxes.Stopped(id)
	if rawport.IsClosed(stopped) { // it is paused, and this request wakes it
		serve(w, r)
		return
	}
	rawport.UntilStopped(w, r, stopped, serve)
}

// strip takes out of a request what is between the caller and us. How long the caller waits is for whoever is behind the port.
func strip(h http.Header) {
	for _, name := range []string{headerID, headerNamespace, headerPort, headerIP, headerUID, "Origin"} {
		h.Del(name)
	}
}

func isHealth(r *http.Request) bool {
	return r.URL.Path == "/healthz" && (r.Method == http.MethodGet || r.Method == http.MethodHead)
}

func healthy(w http.ResponseWriter) {
	tell(w, http.StatusOK, map[string]string{"status": "ok"})
}

// portFailed answers for a port that did not.
func (rt *Router) portFailed(w http.ResponseWriter, r *http.Request, v rawport.Visit, err error) {
	var closed *rawport.ClosedError
	switch {
	case errors.As(err, &closed):
		err = &gatewayError{fault.New(fault.Unavailable, "the sandbox runs, but nothing listens on its port %d", v.Port)}
	case fault.KindOf(err) == fault.Internal:
		err = &gatewayError{fault.Wrap(fault.Unavailable, err, "port %d of the sandbox broke off the connection", v.Port)}
	}
	rt.refuse(w, r, err)
}

// gatewayError is a port that could not be reached, or broke off.
type gatewayError struct{ error }

func (e *gatewayError) Unwrap() error { return e.error }

// leftGrace is how long net/http may wait for what is left of a refused body.
const leftGrace = 5 * time.Second

// refuse says why a request was not passed on.
func (rt *Router) refuse(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil {
		panic(http.ErrAbortHandler) // nobody is there to be told
	}
	kind := fault.KindOf(err)
	if kind == fault.Internal {
		rt.log.ErrorContext(r.Context(), "request was not passed on", "error", err)
	}
	if r.Body != nil && r.Body != http.NoBody && r.ProtoMajor == 1 {
		w.Header().Set("Connection", "close")
		transfer.SetReadDeadline(w, time.Now().Add(leftGrace))
	}
	status := statusOf(kind)
	var unreached *gatewayError
	if errors.As(err, &unreached) {
		status = http.StatusBadGateway
	}
	if status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	w.Header().Set("Cache-Control", "no-store")
	tell(w, status, map[string]string{"detail": fault.Message(err)})
}

// statusOf is what a kind of failure is over HTTP: as the runtimes say it, but that what is too much here is requests and no
// bodies, and that it is a port that takes too long.
func statusOf(kind fault.Kind) int {
	if kind == fault.Exhausted {
		return http.StatusTooManyRequests
	}
	if kind == fault.Timeout {
		return http.StatusGatewayTimeout
	}
	return place.Status(kind)
}

func tell(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(value) // the client has gone: nobody to tell
}

// inside is the request as the port sees it. Its path was escaped by the caller and is passed on so: an escaped slash is not one.
func (p presented) inside(r *http.Request) *http.Request {
	if p.path == "" {
		return r
	}
	inner := r.WithContext(r.Context())
	u := *r.URL
	u.RawPath = p.path
	u.Path, _ = url.PathUnescape(p.path) // it was a part of a path that could be read
	inner.URL = &u
	return inner
}
