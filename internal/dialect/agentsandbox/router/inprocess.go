package router

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/agentsandbox/tunnel"
	"github.com/covehq/cove/internal/fault"
)

// Dial connects to the router within this process, for a client whose tunnel has shown who it is.
func (rt *Router) Dial(ctx context.Context, p auth.Principal) (net.Conn, error) {
	client, server := tunnel.Pipe()
	select {
	case rt.own.waiting <- &known{server, p}:
		return client, nil
	case <-ctx.Done():
	case <-rt.own.closed:
	}
	client.Close()
	return nil, fault.New(fault.Unavailable, "the server is shutting down")
}

// known is a connection of somebody.
type known struct {
	net.Conn
	who auth.Principal
}

// inProcess is a listener without an address, and the server behind it.
type inProcess struct {
	waiting chan *known
	closed  chan struct{}
	once    sync.Once
	server  *http.Server
	work    sync.WaitGroup
}

func newInProcess(h http.Handler, log *slog.Logger) *inProcess {
	l := &inProcess{waiting: make(chan *known), closed: make(chan struct{})}
	l.server = &http.Server{
		Handler: h, ReadHeaderTimeout: 30 * time.Second, IdleTimeout: 5 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return WithPrincipal(ctx, c.(*known).who)
		},
	}
	l.work.Go(func() { _ = l.server.Serve(l) }) // ends with close
	return l
}

func (l *inProcess) Accept() (net.Conn, error) {
	select {
	case c := <-l.waiting:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *inProcess) Addr() net.Addr { return l }

// Network and String make it an address of its own.
func (l *inProcess) Network() string { return "process" }
func (l *inProcess) String() string  { return "router" }

// Close makes Accept return; the server calls it too.
func (l *inProcess) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *inProcess) close() {
	_ = l.server.Close() // its listener has nothing that could fail
	_ = l.Close()
	l.work.Wait()
}
