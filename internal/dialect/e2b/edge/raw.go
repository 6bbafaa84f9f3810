package edge

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// keepFor is how long a connection to a port waits for the next request. It counts as use of its sandbox, and Node's
// server hangs up after five seconds: a request must not meet that.
const keepFor = 2 * time.Second

// maxHead is how long the head of a port's answer may be: what runs there may be hostile, and we keep all of it in memory.
const maxHead = 256 << 10

// newProxy passes requests on to the ports of sandboxes. The host of its URLs is {id}:{port}: so each port has its own
// kept connections, and no name is ever resolved.
func (e *Edge) newProxy() *httputil.ReverseProxy {
	plain := &http.Transport{
		DialContext: e.dial, DisableCompression: true,
		MaxIdleConns: 256, MaxIdleConnsPerHost: 16, IdleConnTimeout: keepFor,
		MaxResponseHeaderBytes: maxHead, ReadBufferSize: 4 << 10,
	}
	grpc := plain.Clone() // speaks HTTP/2 without TLS, which no server does that was not asked for it
	grpc.Protocols = new(http.Protocols)
	grpc.Protocols.SetUnencryptedHTTP2(true)
	e.pools = []*http.Transport{plain, grpc}
	return &httputil.ReverseProxy{
		Rewrite:        e.rewrite,
		Transport:      byContent{plain, grpc},
		FlushInterval:  -1, // at once: whoever streams means it
		ModifyResponse: e.modify,
		ErrorHandler:   e.rawFailed,
		ErrorLog:       slog.NewLogLogger(e.log.Handler(), slog.LevelDebug),
	}
}

// byContent chooses the protocol that a port is spoken to with.
type byContent struct{ plain, grpc http.RoundTripper }

func (b byContent) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		return b.grpc.RoundTrip(r)
	}
	return b.plain.RoundTrip(r)
}

// visit is a request to a port, for those who only have its context.
type visit struct{}

func (e *Edge) serveRaw(w http.ResponseWriter, r *http.Request, at route) {
	if at.way != byHost && r.Header.Get("Service-Worker") != "" { // it would answer for our own pages
		refuse(w, r, at, &refusal{status: http.StatusForbidden, message: "a service worker needs an origin of its own: use the sandbox's host name"})
		return
	}
	e.raw.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), visit{}, at)))
}

func (e *Edge) rewrite(p *httputil.ProxyRequest) {
	at, t := p.In.Context().Value(visit{}).(route), target.From(p.In.Context())
	p.Out.URL.Scheme, p.Out.URL.Host = "http", net.JoinHostPort(at.id, strconv.Itoa(at.port))
	p.Out.URL.RawQuery = p.In.URL.RawQuery // as it came: the proxy would leave out what it cannot read, and we read none
	p.Out.Host = p.In.Host
	if t.Options.MaskHost != "" {
		p.Out.Host = strings.ReplaceAll(t.Options.MaskHost, "${PORT}", strconv.Itoa(at.port))
	}
	p.SetXForwarded()
	strip(p.Out.Header)
}

// dial connects to a port, and waits a moment for one that is about to open.
func (e *Edge) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	t := target.From(ctx)
	_, text, _ := net.SplitHostPort(addr)
	port, _ := strconv.Atoi(text) // both were made by rewrite
	client, err := e.sandboxes.Agent(ctx, t.Who, t.Sandbox.ID)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, e.cfg.RetryFor+dialGrace)
	defer cancel()
	again := time.Now().Add(e.cfg.RetryFor)
	for pause := 20 * time.Millisecond; ; pause *= 2 {
		conn, err := client.DialPort(ctx, agentapi.DialParams{Port: port})
		if err == nil {
			return conn, nil
		}
		if !fault.Is(err, fault.Unavailable) || time.Now().Add(pause).After(again) {
			return nil, &closedError{port, err}
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

// closedError is a port that could not be reached.
type closedError struct {
	port int
	err  error
}

func (c *closedError) Error() string { return fmt.Sprintf("dial port %d: %v", c.port, c.err) }
func (c *closedError) Unwrap() error { return c.err }

// rawFailed answers for a port that did not.
func (e *Edge) rawFailed(w http.ResponseWriter, r *http.Request, err error) {
	at := r.Context().Value(visit{}).(route)
	if r.Context().Err() != nil {
		panic(http.ErrAbortHandler) // the client has gone, or the sandbox
	}
	if _, sb, lookup := e.sandboxes.Lookup(r.Context(), at.id); lookup != nil || sb.State != sandbox.StateRunning {
		refuse(w, r, at, notFound)
		return
	}
	var closed *closedError
	if errors.As(err, &closed) {
		refuse(w, r, at, portClosed(at.port))
		return
	}
	e.log.Debug("port broke off", "sandbox", at.id, "port", at.port, "error", err)
	refuse(w, r, at, &refusal{status: http.StatusBadGateway, message: "The sandbox is running but its port broke off the connection", port: at.port})
}
