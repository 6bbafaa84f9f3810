package agentsandbox

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/agentsandbox/place"
	"github.com/covehq/cove/internal/dialect/agentsandbox/tunnel"
	"github.com/covehq/cove/internal/fault"
)

// Find is the sandbox behind a name of the dialect, for whoever brings requests to it.
func (a *API) Find(_ context.Context, p auth.Principal, namespace, name string) (string, error) {
	o := a.store.realm(p.Tenant).get(sandboxKind, namespace, name)
	if o == nil || !a.allowed(p.Tenant, namespace) {
		return "", fault.New(fault.NotFound, "there is no sandbox %.64q in namespace %.64q", name, namespace)
	}
	return o.id, nil
}

// forward is kubectl port-forward: to the router, or straight to a port of a sandbox.
func (a *API) forward(c *call) error {
	if c.r.Method != http.MethodGet && c.r.Method != http.MethodPost {
		return wrongMethod()
	}
	done, err := a.tunnels.begin(c.who.Tenant, a.cfg.MaxTunnels)
	if err != nil {
		return err
	}
	defer done()
	if c.to.name == routerPod {
		tunnel.Serve(c.w, c.r, func(ctx context.Context, _ int) (net.Conn, error) { return a.router.Dial(ctx, c.who) })
		return nil
	}
	id, err := a.Find(c.ctx(), c.who, c.to.namespace, c.to.name)
	if err != nil {
		r := refuse(http.StatusNotFound, reasonNotFound, "pods %.253q not found", c.to.name)
		r.details = &details{Name: c.to.name, Kind: "pods"}
		return r
	}
	tunnel.Serve(c.w, c.r, func(ctx context.Context, port int) (net.Conn, error) { return a.dial(ctx, c.who, id, port) })
	return nil
}

// dial connects to a port of a sandbox. On the older runtime's port it is the server that answers, and on those of the newer
// one where the sandbox has nobody there itself.
func (a *API) dial(ctx context.Context, who auth.Principal, id string, port int) (net.Conn, error) {
	if port == place.PortRuntime {
		return a.converse(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { a.runtime.Serve(w, r, who, id) })), nil
	}
	client, err := a.sandboxes.Agent(ctx, who, id)
	if err != nil {
		return nil, err
	}
	conn, err := client.DialPort(ctx, agentapi.DialParams{Port: port})
	if fault.Is(err, fault.Unavailable) && (port == place.PortFiles || port == place.PortProcesses) {
		return a.converse(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { a.daemon.Serve(w, r, who, id) })), nil
	}
	if err != nil {
		return nil, err
	}
	return conn, nil
}

// converse is a connection to a handler of this process. It is served until either side closes it.
func (a *API) converse(h http.Handler) net.Conn {
	near, far := tunnel.Pipe()
	l := &oneConn{conn: far, closed: make(chan struct{})}
	both := new(http.Protocols) // gRPC's clients speak HTTP/2, without TLS in a tunnel
	both.SetHTTP1(true)
	both.SetUnencryptedHTTP2(true)
	server := &http.Server{
		Handler: h, BaseContext: func(net.Listener) context.Context { return a.life },
		ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 64 << 10, Protocols: both,
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateClosed || s == http.StateHijacked {
				l.done()
			}
		},
	}
	a.work.Go(func() {
		defer server.Close()
		stop := context.AfterFunc(a.life, l.done)
		defer stop()
		_ = server.Serve(l) // it ends with its one connection
	})
	return near
}

// oneConn is a listener that has one connection.
type oneConn struct {
	conn   net.Conn
	taken  bool
	closed chan struct{}
	once   sync.Once
}

var errNoMore = errors.New("there is no other connection")

func (l *oneConn) Accept() (net.Conn, error) {
	if !l.taken {
		l.taken = true
		return l.conn, nil
	}
	<-l.closed
	return nil, errNoMore
}

func (l *oneConn) done()          { l.once.Do(func() { close(l.closed) }) }
func (l *oneConn) Close() error   { l.done(); return nil }
func (l *oneConn) Addr() net.Addr { return l.conn.LocalAddr() }
