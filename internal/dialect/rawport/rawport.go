// Package rawport passes requests on to the ports of sandboxes, for every dialect that has them: it connects, streams both
// ways and keeps what runs there from learning our secrets or speaking for our origin. Who may come is for the dialect.
package rawport

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

// Sandboxes is what a proxy asks of the domain.
type Sandboxes interface {
	PortAgent(ctx context.Context, p auth.Principal, id string) (*agentapi.Client, error)
}

// Visit is a request that was let in to a port.
type Visit struct {
	Who     auth.Principal
	Sandbox string
	Port    int
	Host    string // that the port is told; empty: as the request has it
	Origin  Origin
	Path    string // below which the port is found, with a slash at its end; of OriginPath alone
}

// Origin is whose origin a port's page has in a browser.
type Origin int

// The origins.
const (
	OriginOwn    Origin = iota // a host name of its own
	OriginShared               // ours, and no path tells it from our own pages
	OriginPath                 // ours, below Visit.Path
)

// Config is what a proxy is told.
type Config struct {
	// RetryFor is how long a port that nobody listens on is tried again: a server that was just started may be about to
	// listen. Zero or less: not at all.
	RetryFor time.Duration
	// Strip takes out of a request what is between the caller and the dialect, other than keys and tokens: those the proxy
	// takes out itself, the same for every dialect. Nil: nothing.
	Strip func(http.Header)
	// Keys tells keys from other texts of 40 hex digits. Nil: all such texts are removed.
	Keys Keys
	// Refuse answers for a port that did not; a ClosedError is one that could not be reached.
	Refuse func(http.ResponseWriter, *http.Request, Visit, error)
}

// Proxy passes requests on.
type Proxy struct {
	cfg       Config
	sandboxes Sandboxes
	reverse   *httputil.ReverseProxy
	pools     []*http.Transport
	log       *slog.Logger
}

// keepFor is how long a connection to a port waits for the next request. It counts as use of its sandbox, and Node's
// server hangs up after five seconds: a request must not meet that.
const keepFor = 2 * time.Second

// maxHead is how long the head of a port's answer may be: what runs there may be hostile, and we keep all of it in memory.
const maxHead = 256 << 10

// New makes a proxy. The host of its URLs is {id}:{port}: so each port has its own kept connections, and no name is ever
// resolved.
func New(cfg Config, s Sandboxes, log *slog.Logger) *Proxy {
	p := &Proxy{cfg: cfg, sandboxes: s, log: log}
	plain := &http.Transport{
		DialContext: p.dial, DisableCompression: true,
		MaxIdleConns: 256, MaxIdleConnsPerHost: 16, IdleConnTimeout: keepFor,
		MaxResponseHeaderBytes: maxHead, ReadBufferSize: 4 << 10,
	}
	grpc := plain.Clone() // speaks HTTP/2 without TLS, which no server does that was not asked for it
	grpc.Protocols = new(http.Protocols)
	grpc.Protocols.SetUnencryptedHTTP2(true)
	p.pools = []*http.Transport{plain, grpc}
	p.reverse = &httputil.ReverseProxy{
		Rewrite:        p.rewrite,
		Transport:      byContent{plain, grpc},
		FlushInterval:  -1, // at once: whoever streams means it
		ModifyResponse: modify,
		ErrorHandler:   p.failed,
		ErrorLog:       slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	return p
}

// Close lets go of connections that are kept for the next request.
func (p *Proxy) Close() {
	for _, pool := range p.pools {
		pool.CloseIdleConnections()
	}
}

// byContent chooses the protocol that a port is spoken to with.
type byContent struct{ plain, grpc http.RoundTripper }

func (b byContent) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.WithContext(untraced{r.Context()})
	if r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		return b.grpc.RoundTrip(r)
	}
	return b.plain.RoundTrip(r)
}

// untraced is a context of which nobody hears what comes before an answer. The reverse proxy would pass on what a port says
// then, such as early hints, past modify.
type untraced struct{ context.Context }

func (u untraced) Value(key any) any {
	v := u.Context.Value(key)
	if _, trace := v.(*httptrace.ClientTrace); trace {
		return nil
	}
	return v
}

// ErrServiceWorker is a script that would answer for our own pages.
var ErrServiceWorker = fault.New(fault.Denied, "a service worker needs an origin of its own: use the sandbox's host name")

type visitKey struct{}

func visitOf(r *http.Request) Visit { return r.Context().Value(visitKey{}).(Visit) }

// Serve passes a request on; its URL is as the port is to see it.
func (p *Proxy) Serve(w http.ResponseWriter, r *http.Request, v Visit) {
	if v.Origin != OriginOwn && r.Header.Get("Service-Worker") != "" {
		p.cfg.Refuse(w, r, v, ErrServiceWorker)
		return
	}
	// When an answer begins, the server closes the body of its request. The transport, which looks for the end of that body once
	// more while the port answers already, would break the answer off.
	_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/2 has it anyway
	p.reverse.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), visitKey{}, v)))
}

func (p *Proxy) rewrite(r *httputil.ProxyRequest) {
	v := visitOf(r.In)
	r.Out.URL.Scheme, r.Out.URL.Host = "http", net.JoinHostPort(v.Sandbox, strconv.Itoa(v.Port))
	r.Out.URL.RawQuery = r.In.URL.RawQuery // as it came: the proxy would leave out what it cannot read
	r.Out.Host = r.In.Host
	if v.Host != "" {
		r.Out.Host = v.Host
	}
	r.SetXForwarded()
	if p.cfg.Strip != nil {
		p.cfg.Strip(r.Out.Header)
	}
	StripCredentials(r.In, r.Out, p.cfg.Keys)
}

// dial connects to a port, and waits a moment for one that is about to open.
func (p *Proxy) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	v := ctx.Value(visitKey{}).(Visit)
	client, err := p.sandboxes.PortAgent(ctx, v.Who, v.Sandbox)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, p.cfg.RetryFor+dialGrace)
	defer cancel()
	again := time.Now().Add(p.cfg.RetryFor)
	for pause := 20 * time.Millisecond; ; pause *= 2 {
		conn, err := client.DialPort(ctx, agentapi.DialParams{Port: v.Port})
		if err == nil {
			return conn, nil
		}
		if !fault.Is(err, fault.Unavailable) {
			return nil, err // the port is not to blame
		}
		if time.Now().Add(pause).After(again) {
			return nil, &ClosedError{v.Port, err}
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// dialGrace is how long one attempt to reach a port may take: a sandbox's loopback answers at once.
const dialGrace = 10 * time.Second

// ClosedError is a port that could not be reached.
type ClosedError struct {
	Port int
	err  error
}

func (c *ClosedError) Error() string { return fmt.Sprintf("dial port %d: %v", c.Port, c.err) }
func (c *ClosedError) Unwrap() error { return c.err }

// failed answers for a port that did not.
func (p *Proxy) failed(w http.ResponseWriter, r *http.Request, err error) {
	v := visitOf(r)
	if r.Context().Err() != nil {
		panic(http.ErrAbortHandler) // the client has gone, or the sandbox
	}
	var closed *ClosedError
	if !errors.As(err, &closed) {
		p.log.Debug("port broke off", "sandbox", v.Sandbox, "port", v.Port, "error", err)
	}
	p.cfg.Refuse(w, r, v, err)
}
