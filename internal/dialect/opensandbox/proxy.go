package opensandbox

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/dialect/rawport"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// serveProxy answers a request for a port of a sandbox.
func (a *API) serveProxy(w http.ResponseWriter, r *http.Request) {
	v, ok := parseProxy(r.URL.EscapedPath())
	c := &call{w: w, r: r, id: v.id}
	if !ok {
		a.turnAway(c, 0, told(http.StatusNotFound, codeNotFound, "want /sandboxes/{sandbox}/proxy/{port}"))
		return
	}
	r.Pattern = v.pattern() // for whoever counts requests: ports and ids must not become labels
	if answered(v.port) && preflight(r) {
		answerPreflight(w, r)
		return
	}
	who, err := a.identify(r, v)
	inner := v.inside(r)
	if v.sign != "" { // whoever logs the request must not learn what would let him in
		hidden := *r.URL
		hidden.Path, hidden.RawPath = strings.Replace(hidden.Path, v.end+mark+v.sign, "signed", 1), ""
		r.URL = &hidden
	}
	if err != nil {
		a.turnAway(c, v.port, err)
		return
	}
	t, err := a.admitVisitor(r.Context(), who, v)
	if err != nil {
		a.turnAway(c, v.port, err)
		return
	}
	a.dispatch(w, inner, t, v.prefix)
}

// answered tells whether the server itself answers for a port.
func answered(port int) bool { return port == access.PortExecd || port == access.PortEgress }

func (v visitor) pattern() string {
	switch v.port {
	case access.PortExecd:
		return "execd"
	case access.PortEgress:
		return "egress"
	}
	return "port"
}

// ping tells whether he asks no more than whether the sandbox is there.
func (v visitor) ping() bool { return v.port == access.PortExecd && v.path == "/ping" }

// inside is the request as the port sees it. Its path was escaped by the caller, so that it can be read again.
func (v visitor) inside(r *http.Request) *http.Request {
	inner := r.WithContext(r.Context())
	u := *r.URL
	u.RawPath = v.path
	if u.RawPath == "" {
		u.RawPath = "/"
	}
	u.Path, _ = url.PathUnescape(u.RawPath)
	inner.URL, inner.Pattern = &u, v.pattern()
	return inner
}

// comingUp is the status of a sandbox that will answer soon; clients ping until it does.
const comingUp = http.StatusServiceUnavailable

// admitVisitor finds the sandbox of a visitor who may come.
func (a *API) admitVisitor(ctx context.Context, who auth.Principal, v visitor) (*access.Target, error) {
	if made, ok := a.creations.owner(v.id); ok && (who.Tenant == "" || who.Tenant == made.who.Tenant) {
		w := a.wireCreation(made)
		status := http.StatusConflict
		if w.Status.State == statePending {
			status = comingUp
		}
		return nil, told(status, codeNotRunning, "sandbox %s is %s: %s", v.id, w.Status.State, w.Status.Message)
	}
	owner, sb, err := a.sandboxes.Lookup(ctx, v.id)
	if err != nil {
		return nil, gone(v.id, err)
	}
	if who.Tenant != "" && who.Tenant != owner.Tenant {
		return nil, noSandbox(v.id)
	}
	switch sb.State {
	case sandbox.StateRunning:
	case sandbox.StatePaused:
		if !sb.AutoResume || sb.Cold {
			return nil, told(http.StatusConflict, codeNotRunning, "sandbox %s is paused; resume it first", v.id)
		}
	case sandbox.StateStarting:
		return nil, told(comingUp, codeNotRunning, "sandbox %s is still starting", v.id)
	case sandbox.StateStopping, sandbox.StateEnded:
		if !visible(sb) {
			return nil, noSandbox(v.id)
		}
		return nil, told(http.StatusConflict, codeNotRunning, "sandbox %s is %s: %s", v.id, wireStatus(sb).State, wireStatus(sb).Message)
	}
	if !v.ping() || time.Since(sb.CreatedAt) > newFor {
		a.renewOnAccess(ctx, owner, sb)
	}
	return &access.Target{Who: owner, Sandbox: sb, Port: v.port}, nil
}

// dispatch hands a request over to whoever answers for its port.
func (a *API) dispatch(w http.ResponseWriter, r *http.Request, t *access.Target, prefix string) {
	r = r.WithContext(access.With(r.Context(), t))
	switch t.Port {
	case access.PortExecd:
		if port, rest, ok := throughExecd(r.URL); ok && !answered(port) {
			further := *t
			further.Port = port
			inner := visitor{port: port, path: rest}.inside(r)
			a.dispatch(w, inner, &further, prefix+strings.TrimSuffix(r.URL.EscapedPath(), rest))
			return
		}
		allowOrigins(w.Header())
		a.execd.ServeHTTP(w, r)
	case access.PortEgress:
		allowOrigins(w.Header())
		a.egress.ServeHTTP(w, r)
	default:
		a.serveRaw(w, r, t, prefix)
	}
}

// throughExecd reads /proxy/{port}/…, by which execd passes requests on to other ports of its sandbox.
func throughExecd(u *url.URL) (port int, rest string, ok bool) {
	text, ok := strings.CutPrefix(u.EscapedPath(), "/proxy/")
	if !ok {
		return 0, "", false
	}
	number, _, _ := strings.Cut(text, "/")
	port, ok = parsePort(number)
	return port, strings.TrimPrefix(text, number), ok
}

func (a *API) serveRaw(w http.ResponseWriter, r *http.Request, t *access.Target, prefix string) {
	stopped := a.sandboxes.Stopped(t.Sandbox.ID)
	visit := rawport.Visit{Who: t.Who, Sandbox: t.Sandbox.ID, Port: t.Port, Origin: rawport.OriginPath, Path: prefix + "/"}
	serve := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { a.raw.Serve(w, r, visit) })
	if rawport.IsClosed(stopped) { // it is paused, and this request wakes it
		serve(w, r)
		return
	}
	rawport.UntilStopped(w, r, stopped, serve)
}

// rawFailed answers for a port that did not.
func (a *API) rawFailed(w http.ResponseWriter, r *http.Request, v rawport.Visit, err error) {
	c := &call{w: w, r: r, who: v.Who, id: v.Sandbox}
	var closed *rawport.ClosedError
	switch {
	case errors.Is(err, rawport.ErrServiceWorker):
		a.turnAway(c, v.Port, err)
	case errors.As(err, &closed):
		a.turnAway(c, v.Port, told(http.StatusBadGateway, codePortClosed, "sandbox %s is running, but nothing listens on its port %d", v.Sandbox, v.Port))
	case fault.KindOf(err) == fault.Internal:
		a.turnAway(c, v.Port, told(http.StatusBadGateway, codePortClosed, "port %d of sandbox %s broke off the connection", v.Port, v.Sandbox))
	default:
		a.turnAway(c, v.Port, a.lost(c, err))
	}
}

// turnAway refuses a visitor, whose body nobody reads.
func (a *API) turnAway(c *call, port int, err error) {
	if c.r.Body != nil && c.r.Body != http.NoBody && c.r.ProtoMajor == 1 {
		c.w.Header().Set("Connection", "close")
		transfer.SetReadDeadline(c.w, time.Now().Add(leftGrace))
	}
	if answered(port) || port == 0 {
		allowOrigins(c.w.Header())
	}
	c.w.Header().Set("Cache-Control", "no-store")
	a.refuse(c, err)
}

// leftGrace is how long net/http may wait for what is left of a refused body.
const leftGrace = 5 * time.Second

// networkPolicy is the egress API of a sandbox, under the name that newer clients have for it.
func (a *API) networkPolicy(c *call) error {
	t, err := a.admitVisitor(c.ctx(), c.who, visitor{id: c.id, port: access.PortEgress})
	if err != nil {
		return err
	}
	transfer.SetReadDeadline(c.w, time.Time{})
	a.dispatch(c.w, visitor{port: access.PortEgress, path: "/policy"}.inside(c.r), t, "")
	return nil
}

// newFor is how long a look at whether a sandbox is there is no use of it yet: whoever makes one looks at once.
const newFor = 30 * time.Second

// renewEvery is how often a use of a sandbox may change its expiration.
const renewEvery = time.Minute

// renewals remembers when sandboxes were renewed by their use.
type renewals struct {
	mu   sync.Mutex
	last map[string]time.Time // by id
}

func newRenewals() *renewals { return &renewals{last: map[string]time.Time{}} }

// due tells whether it is time to renew a sandbox, and notes that it is done.
func (r *renewals) due(id string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Sub(r.last[id]) < renewEvery {
		return false
	}
	for other, at := range r.last {
		if now.Sub(at) >= renewEvery {
			delete(r.last, other)
		}
	}
	r.last[id] = now
	return true
}

// renewOnAccess lets a sandbox live on that was made so.
func (a *API) renewOnAccess(ctx context.Context, who auth.Principal, sb sandbox.Sandbox) {
	f, err := access.Decode(sb)
	if err != nil || f.Renew == 0 || sb.Deadline.IsZero() || !a.renewals.due(sb.ID, time.Now()) {
		return
	}
	if _, err := a.sandboxes.ExtendLifetime(ctx, who, sb.ID, time.Duration(f.Renew)*time.Second); err != nil && ctx.Err() == nil {
		a.log.Warn("sandbox is not renewed by its use", "sandbox", sb.ID, "tenant", who.Tenant, "error", err)
	}
}
