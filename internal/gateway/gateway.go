// Package gateway brings a request to whom it is for: a dialect or the server's own pages. It looks at host, path and
// header and never at a body.
package gateway

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Config says who answers for what.
type Config struct {
	// Elsewhere finds another server that answers a request, before everybody here; nil, or a nil handler: there is none.
	Elsewhere func(*http.Request) http.Handler
	// Native is the beginning of the paths of Cove's own API. Only a host that names a sandbox comes before it: a header
	// of another dialect must not change who answers. Empty: headers come first everywhere.
	Native string
	// Inside answers for what is inside of sandboxes, before everybody else; nil: nobody does.
	Inside Ports
	// Router answers for the ports of sandboxes that headers name in agent-sandbox's way, right after Inside; nil: nobody does.
	Router Entrance
	// OpenSandbox answers for its API and for the ports of sandboxes by path; nil: nobody does.
	OpenSandbox Entrance
	// Guests lets people in without a key; nil: nobody.
	Guests *Guests
	// Prefixes maps the beginning of a path, such as /cove/v1/, to who answers.
	Prefixes map[string]http.Handler
	// Signed is the beginning of paths that are guarded by what they hold, so that guests pass; empty: none are.
	Signed string
	// Else answers for every other path; nil: nobody does.
	Else http.Handler
	// Checks are asked by /readyz.
	Checks Checks
	// Notes are sentences that /readyz tells although the server is ready; nil: there are none.
	Notes func() []string
	// ReadyFor is how long their answer holds; default one second.
	ReadyFor time.Duration
	Metrics  http.Handler
	// Served hears of each request once it has been answered; nil: nobody does.
	Served func(*http.Request, Answer)
	Log    *slog.Logger
}

// Inside brings requests into sandboxes, and knows from host, header and path which those are.
type Inside interface {
	http.Handler
	Matches(*http.Request) bool
}

// Ports is an Inside that also knows host names of sandboxes.
type Ports interface {
	Inside
	// ByHost tells whether the host of a request names a port of a sandbox.
	ByHost(*http.Request) bool
}

// Entrance knows from path and header which requests are its own, and which of those are for the inside of a sandbox.
type Entrance interface {
	Inside
	Enters(*http.Request) bool
}

// Answer is what became of a request.
type Answer struct {
	Request  string // its name, as in the log
	Status   int    // 0: none, because the connection was upgraded or cut
	Received int64  // bytes of its body that were read
	Sent     int64
}

// Gateway is the one handler behind a listener.
type Gateway struct {
	cfg      Config
	table    []entry
	draining atomic.Bool
	health   health
	inflight sync.WaitGroup
	log      *slog.Logger
}

// entry is one line of the precedence table; the first that matches wins.
type entry struct {
	name    string // as a 404 tells it
	matches func(*http.Request) bool
	handler http.Handler
}

// New makes a gateway.
func New(cfg Config) *Gateway {
	cfg.ReadyFor = cmp.Or(cfg.ReadyFor, defaultReadyFor)
	g := &Gateway{cfg: cfg, log: cfg.Log}
	if native := cfg.Prefixes[cfg.Native]; native != nil {
		g.table = append(g.table, entry{cfg.Native, g.native, native})
	}
	if cfg.Inside != nil {
		g.table = append(g.table, entry{"the ports of sandboxes", cfg.Inside.Matches, cfg.Inside})
	}
	if cfg.Router != nil {
		g.table = append(g.table, entry{"the router of agent-sandbox", cfg.Router.Matches, cfg.Router})
	}
	for _, prefix := range sortedByLength(cfg.Prefixes) {
		if prefix == cfg.Native {
			continue // the first of all
		}
		g.table = append(g.table, entry{prefix, under(prefix), cfg.Prefixes[prefix]})
	}
	if cfg.OpenSandbox != nil {
		g.table = append(g.table,
			entry{"OpenSandbox's API", cfg.OpenSandbox.Matches, cfg.OpenSandbox},
			entry{"/health", exactly("/health"), http.HandlerFunc(wholesome)},
		)
	}
	g.table = append(g.table,
		entry{pathHealth, exactly(pathHealth), http.HandlerFunc(healthy)},
		entry{pathReady, exactly(pathReady), http.HandlerFunc(g.ready)},
		entry{"/metrics", exactly("/metrics"), cfg.Metrics},
	)
	if cfg.Else != nil {
		g.table = append(g.table, entry{"everything else", func(*http.Request) bool { return true }, cfg.Else})
	}
	return g
}

func sortedByLength(m map[string]http.Handler) []string {
	var list []string
	for p := range m {
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b string) int { return len(b) - len(a) })
	return list
}

func under(prefix string) func(*http.Request) bool {
	return func(r *http.Request) bool {
		return strings.HasPrefix(r.URL.Path, prefix) || r.URL.Path == strings.TrimSuffix(prefix, "/")
	}
}

// native tells whether a request is for Cove's own API, whatever its headers say.
func (g *Gateway) native(r *http.Request) bool {
	return g.cfg.Native != "" && under(g.cfg.Native)(r) && (g.cfg.Inside == nil || !g.cfg.Inside.ByHost(r))
}

func exactly(path string) func(*http.Request) bool {
	return func(r *http.Request) bool { return r.URL.Path == path }
}

// ServeHTTP names the request, routes it and logs it. The body and the answer pass through untouched.
func (g *Gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g.inflight.Add(1)
	defer g.inflight.Done()
	begun := time.Now()
	id := requestID(r.Header.Get("X-Request-Id"))
	w.Header().Set("X-Request-Id", id)
	seen := watch(w, r)
	seen.keyless = own(r.URL.Path) || g.signed(r)
	defer seen.leave()
	defer g.logAccess(seen, r, id, begun)
	defer g.survive(seen, r, id)
	if g.insecure(r) {
		refuseInsecure(seen)
		return
	}
	if no := g.admit(r); no != "" {
		refuseGuest(seen, no)
		return
	}
	if g.cfg.Elsewhere != nil {
		if other := g.cfg.Elsewhere(r); other != nil {
			r.Header.Set("X-Request-Id", id) // so that it has one name in the logs of both
			r.Pattern = "elsewhere"          // for whoever counts requests: ids must not become labels
			other.ServeHTTP(seen, r)
			return
		}
	}
	for _, e := range g.table {
		if e.matches(r) {
			e.handler.ServeHTTP(seen, r)
			return
		}
	}
	g.notServed(seen, r)
}

// requestID keeps a caller's own name for a request when it is harmless in a log and a header.
func requestID(given string) string {
	ok := len(given) > 0 && len(given) <= 64 && !strings.ContainsFunc(given, func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' && c != '.'
	})
	if ok {
		return given
	}
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// logAccess tells that a request happened: no query, no header, no body, so no secret.
func (g *Gateway) logAccess(w *watched, r *http.Request, id string, begun time.Time) {
	if g.cfg.Served != nil {
		g.cfg.Served(r, Answer{Request: id, Status: w.status, Received: w.body.bytes.Load(), Sent: w.bytes})
	}
	level := slog.LevelInfo
	if own(r.URL.Path) {
		level = slog.LevelDebug
	}
	g.log.LogAttrs(r.Context(), level, "request", slog.String("request", id), slog.String("method", r.Method),
		slog.String("path", shown(r.URL.Path)), slog.Int("status", w.status), slog.Int64("bytes", w.bytes),
		slog.Duration("took", time.Since(begun)), slog.String("remote", r.RemoteAddr))
}

// Parts of paths let in whoever knows them: the router's token, and what signs an address of OpenSandbox. Who
// answers hides them; that may be another server, and then nobody here does.
var (
	routed = regexp.MustCompile(`^(/agents/)[^/]+`)
	signed = regexp.MustCompile(`^((?:/v1)?/sandboxes/[^/~]*~)[^/]+`)
)

// shown is a path without what is secret in it.
func shown(path string) string {
	return signed.ReplaceAllString(routed.ReplaceAllString(path, "${1}hidden"), "${1}signed")
}

// survive turns a defect in one request into one failed request.
func (g *Gateway) survive(w *watched, r *http.Request, id string) {
	v := recover()
	if v == nil {
		return
	}
	if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(v) // the handler cut the connection on purpose
	}
	g.log.Error("request panicked", "request", id, "method", r.Method, "path", shown(r.URL.Path), "panic", v, "stack", string(debug.Stack()))
	if w.status != 0 {
		panic(http.ErrAbortHandler) // too late for a status
	}
	fail(w, http.StatusInternalServerError, "internal", "internal error; the server's log has request "+id)
}

func (g *Gateway) notServed(w http.ResponseWriter, r *http.Request) {
	names := make([]string, len(g.table))
	for i, e := range g.table {
		names[i] = e.name
	}
	fail(w, http.StatusNotFound, "not_found", "nothing is served at "+shown(r.URL.Path)+"; this server answers "+strings.Join(names, ", "))
}

// admit lets guests in. The inside of a sandbox has guards of its own, which a guest may also pass by a token.
func (g *Gateway) admit(r *http.Request) (refusal string) {
	if g.cfg.Guests == nil || known(r) {
		return ""
	}
	if g.native(r) {
		return g.cfg.Guests.welcome(r)
	}
	if g.cfg.Inside != nil && g.cfg.Inside.Matches(r) || own(r.URL.Path) || g.signed(r) {
		return ""
	}
	refusal = g.cfg.Guests.welcome(r)
	for _, door := range []Entrance{g.cfg.Router, g.cfg.OpenSandbox} {
		if door != nil && door.Enters(r) {
			return ""
		}
	}
	return refusal
}

func (g *Gateway) signed(r *http.Request) bool {
	return g.cfg.Signed != "" && strings.HasPrefix(r.URL.Path, g.cfg.Signed)
}

// The paths of health and readiness.
const (
	pathHealth = "/healthz"
	pathReady  = "/readyz"
)

// own are the server's own pages, which ask nobody for a key.
func own(path string) bool {
	return path == "/health" || path == pathHealth || path == pathReady || path == "/metrics"
}

// refuseGuest says it in the words of every dialect.
func refuseGuest(w http.ResponseWriter, message string) {
	tell(w, http.StatusForbidden, map[string]any{
		"code": "ANONYMOUS_REFUSED", "message": message, "error": map[string]string{"kind": "denied", "message": message},
	})
}

// wholesome is /health as the clients of the dialects know it.
func wholesome(w http.ResponseWriter, _ *http.Request) {
	tell(w, http.StatusOK, map[string]string{"status": "healthy"})
}

func healthy(w http.ResponseWriter, _ *http.Request) {
	tell(w, http.StatusOK, map[string]string{"status": "ok"})
}

// Drain makes /readyz say no, so that a load balancer looks elsewhere.
func (g *Gateway) Drain() { g.draining.Store(true) }

// Wait returns when no request is left, upgraded ones included.
func (g *Gateway) Wait() { g.inflight.Wait() }

func fail(w http.ResponseWriter, status int, kind, message string) {
	tell(w, status, map[string]any{"error": map[string]string{"kind": kind, "message": message}})
}

func tell(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(value) // the client has gone: nobody to tell
}

// watched remembers what was answered. Flush and Hijack reach the real writer by Unwrap.
type watched struct {
	http.ResponseWriter
	sends   bool // an HTTP/1 request with a body
	keyless bool // a page that needs no key
	status  int
	bytes   int64
	body    counted
}

// watch wraps the body of r too.
func watch(w http.ResponseWriter, r *http.Request) *watched {
	seen := &watched{ResponseWriter: w}
	if r.Body != nil && r.Body != http.NoBody {
		seen.body.ReadCloser, r.Body = r.Body, &seen.body
		seen.sends = r.ProtoMajor == 1 // on HTTP/2, "Connection: close" would end the other streams too
	}
	return seen
}

// counted is a request's body that remembers how much of it was read. A proxied body is read while
// the answer begins.
type counted struct {
	io.ReadCloser
	bytes atomic.Int64
	whole atomic.Bool // it was read to its end
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.bytes.Add(int64(n))
	if err == io.EOF {
		c.whole.Store(true)
	}
	return n, err
}

func (w *watched) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// leftGrace is how long a client may go on sending a body that no handler reads. If the connection
// closed at once, the client would get a reset before it reads the answer.
const leftGrace = time.Second

// leave limits how long net/http drains a body that the handler did not read.
func (w *watched) leave() {
	if w.sends && !w.body.whole.Load() && w.status >= 200 { // else the connection was taken over
		_ = http.NewResponseController(w.ResponseWriter).SetReadDeadline(time.Now().Add(leftGrace)) // a test's writer has none
	}
}

// WriteHeader begins the answer. An error, and the answer to a client that needs no key, does not wait
// for a body of which nothing was read: net/http would drain it first, for as long as it takes to come.
func (w *watched) WriteHeader(status int) {
	first := w.status < 200
	if first {
		w.status = status
	}
	if first && (status >= 400 || w.keyless) && w.sends && w.body.bytes.Load() == 0 {
		w.Header().Set("Connection", "close")
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *watched) Write(b []byte) (int, error) {
	if w.status < 200 {
		w.WriteHeader(http.StatusOK)
	}
	n, err := w.ResponseWriter.Write(b)
	w.bytes += int64(n)
	return n, err
}
