// Package app builds a server from a Config: it is the only package that knows every part, and decides nothing that a
// part could decide itself.
package app

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/connlimit"
	"github.com/covehq/cove/internal/dialect/cove"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/gateway"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/telemetry"
)

// Version is set by the linker at release.
var Version string

// Tenant owns the key that a server makes for itself at its first start.
const Tenant = "default"

// Server is a running server. Close it.
type Server struct {
	URL     string
	Domain  string      // with a port: where sandboxes have host names over TLS; empty: nowhere
	CAFile  string      // what clients must trust for that; empty: the certificate was given
	Key     auth.Secret // of the local admin
	NewKey  bool        // this start made the key
	Caps    sandbox.Caps
	KeyFile string
	// PlainRefused tells that the listener without TLS is reached by other machines and refuses them.
	PlainRefused bool

	cfg          config.Config
	log          *slog.Logger
	limiter      *connlimit.Limiter          // of the connections of every listener
	bodies       *transfer.Budget            // of the requests of every listener
	ready        func(context.Context) error // whether sandboxes can be made
	herald       *herald                     // writes the ready file where this process may not; nil: it may
	certificate  *tls.Certificate            // that was given for the TLS listener; nil: the server makes its own
	renewal      *renewal                    // builds templates again behind the server; nil: there is none
	startup      *gateway.Startup            // answers on the plain and the TLS listener until the rest has started
	tls          lateTLS                     // of the TLS listener
	base         context.Context             // of every request
	http         []*http.Server              // one for each listener
	facade       *facade                     // that speaks Kubernetes' API; nil: there is none
	store        *sqlstore.Store
	desk         *desk // what one server alone does
	team         *team // with the other servers of the database; nil: there are none
	gateways     []*gateway.Gateway
	tracing      *telemetry.Tracing      // nil: off
	cancel       context.CancelCauseFunc // of every request
	quitSessions func()                  // ends runs that nobody hears
	// sessionCensus counts sessions, where the desk asks.
	sessionCensus atomic.Pointer[func(context.Context) (map[string]int, error)]
	served        chan error // the end of http.Serve
	undo          ladder
	once          sync.Once
	closed        error
}

// Progress hears what a start that takes long is busy with.
type Progress func(line string)

// Start builds the server and returns when it serves. Whatever was begun is undone when a later step fails.
func Start(ctx context.Context, cfg config.Config, log *slog.Logger, progress Progress) (_ *Server, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, log: log, limiter: newLimiter(cfg, log), bodies: newBodies(hostLimits(cfg.DataDir).MemoryBytes)}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.undo.run())
		}
	}()
	if err := s.openTracing(ctx); err != nil {
		return nil, err
	}
	if err := s.lockData(); err != nil {
		return nil, err
	}
	peers, err := s.listenAll()
	if err != nil {
		return nil, err
	}
	progress = s.tellProgress(progress)
	s.startup.Say("the database is being opened")
	store, err := s.openStore(ctx)
	if err != nil {
		return nil, err
	}
	keys := auth.NewKeys(store)
	if err := s.localKey(ctx, keys); err != nil {
		return nil, err
	}
	if err := s.joinTeam(ctx, peers); err != nil {
		return nil, err
	}
	manager, parts, observer, err := s.openDomain(ctx, store, progress)
	if err != nil {
		return nil, err
	}
	answers, err := s.openDialects(ctx, store, manager, keys, parts, observer)
	if err != nil {
		return nil, err
	}
	if err := s.pushMetrics(ctx, observer); err != nil {
		return nil, err
	}
	if err := s.secure(); err != nil {
		return nil, err
	}
	if err := s.secureFacade(); err != nil {
		return nil, err
	}
	if err := s.startTeam(ctx, manager); err != nil {
		return nil, err
	}
	s.serve(answers)
	return s, nil
}

// openDialects builds who answers for what.
func (s *Server) openDialects(ctx context.Context, store *sqlstore.Store, m *sandbox.Manager, keys *auth.Keys, p parts, o *telemetry.Observer) (gateway.Config, error) {
	domain := s.traced(m)
	images, err := s.openImages(store, p)
	if err != nil {
		return gateway.Config{}, err
	}
	front, err := s.openDesk(ctx, materials{store, m, domain, keys, p, images, o})
	if err != nil {
		return gateway.Config{}, err
	}
	e2b, err := s.openE2B(store, domain, keys, p.templates, images, o)
	if err != nil {
		return gateway.Config{}, err
	}
	open, err := s.openOpenSandbox(store, domain, keys, images, p.most, o)
	if err != nil {
		return gateway.Config{}, err
	}
	s.team.watches(open)
	guests, err := s.guests(ctx, keys)
	if err != nil {
		return gateway.Config{}, err
	}
	return gateway.Config{
		Elsewhere: s.team.elsewhere(),
		Native:    cove.Prefix + "/",
		Inside:    e2b.inside, Router: front.entrance(), OpenSandbox: open, Guests: guests,
		Prefixes: map[string]http.Handler{cove.Prefix + "/": front.api(), cove.LinkPrefix: front.links()},
		Signed:   cove.LinkPrefix,
		Else:     e2b.control,
		Metrics:  o.Metrics(),
		Checks:   s.checks(store, p),
		Notes:    p.notes,
		Served:   func(r *http.Request, a gateway.Answer) { o.Served(r, a.Request, a.Status, a.Received, a.Sent) },
		Log:      s.log,
	}, nil
}

// lockData makes the data directory and keeps other servers out of it.
func (s *Server) lockData() error {
	// Everybody may look into the directory itself: the server's own files are below, in one that is its user's alone,
	// beside those that are root's.
	if err := os.MkdirAll(s.cfg.DataDir, 0o755); err != nil {
		return fmt.Errorf("make data directory: %w", err)
	}
	if err := os.MkdirAll(stateDir(s.cfg.DataDir), 0o700); err != nil {
		return fmt.Errorf("make data directory: %w", err)
	}
	if s.cfg.Server.SharedVolume { // others have it as well; which of them does what is the database's to say
		return nil
	}
	unlock, err := lock(stateDir(s.cfg.DataDir))
	if err != nil {
		return err
	}
	s.undo.add("unlock data directory", unlock)
	s.undo.add("stop keeping space for the database", keepBallast(stateDir(s.cfg.DataDir), s.log).close)
	return nil
}

// listen takes an address first: it is the cheapest step that can fail.
func (s *Server) listen(address, flag string) (net.Listener, error) {
	l, err := s.bind(address, flag)
	if err != nil {
		return nil, err
	}
	return s.limiter.Listener(l), nil
}

func (s *Server) bind(address, flag string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		if errors.Is(err, syscall.EADDRINUSE) {
			return nil, fmt.Errorf("listen on %s: another program, perhaps another server, has this port; end it, or choose another with %s HOST:PORT (port 0 picks one)", address, flag)
		}
		return nil, fmt.Errorf("listen on %s: %w; choose another with %s HOST:PORT, port 0 picks one", address, err, flag)
	}
	s.undo.add("close listener", func() error {
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	})
	return l, nil
}

// address tells where the plain listener is, and who might hear what is said there.
func (s *Server) address(l net.Listener) {
	addr := l.Addr().(*net.TCPAddr)
	host := addr.IP
	if !host.IsLoopback() {
		s.warnPlain(addr)
	}
	if host.IsUnspecified() {
		host = net.IPv4(127, 0, 0, 1)
	}
	s.URL = "http://" + net.JoinHostPort(host.String(), fmt.Sprint(addr.Port))
}

// warnPlain says who may use a listener without TLS that other machines reach.
func (s *Server) warnPlain(addr *net.TCPAddr) {
	switch {
	case s.cfg.PlainEverywhere():
		s.log.Warn("listening beyond this machine without TLS: keys pass the network unencrypted; put a TLS proxy in front", "address", addr.String())
	case len(s.cfg.Server.TrustedProxies) > 0:
		s.log.Info("plain HTTP is for this machine and the trusted proxies", "address", addr.String(), "proxies", s.cfg.Server.TrustedProxies)
	default:
		s.PlainRefused = true
		s.log.Warn("plain HTTP of other machines is refused; serve TLS (tls.domain), name a proxy in server.trusted_proxies, or set server.insecure_http = true",
			"address", addr.String())
	}
}

// localKey finds the key of the local admin, or makes it at the first start.
func (s *Server) localKey(ctx context.Context, keys *auth.Keys) error {
	s.KeyFile = keyFile(s.cfg.DataDir)
	if s.cfg.Auth.AdminKeyFile != "" {
		return s.chosenKey(ctx, keys)
	}
	text, err := os.ReadFile(s.KeyFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read the local API key: %w", err)
	}
	if err == nil {
		s.Key = auth.Secret(strings.TrimSpace(string(text)))
		_, err := keys.Authenticate(ctx, string(s.Key))
		if err == nil {
			return nil
		}
		if !fault.Is(err, fault.Unauthed) {
			return fmt.Errorf("check the local API key: %w", err)
		}
		s.log.Warn("the key in the data directory is not valid any more; making another", "file", s.KeyFile)
	}
	s.Key, _, err = keys.Create(ctx, Tenant, "local admin", true)
	if err != nil {
		return fmt.Errorf("make the first API key: %w", err)
	}
	s.NewKey = true
	return writeFile(s.KeyFile, []byte(string(s.Key)+"\n"), 0o600)
}

// chosenKey makes the operator's own key the local admin's. Commands on this machine find it where they find any other.
func (s *Server) chosenKey(ctx context.Context, keys *auth.Keys) error {
	text, err := os.ReadFile(s.cfg.Auth.AdminKeyFile)
	if err != nil {
		return fmt.Errorf("auth.admin_key_file: %w", err)
	}
	s.Key = auth.Secret(strings.TrimSpace(string(text)))
	if err := keys.Admit(ctx, s.Key, Tenant, "local admin"); err != nil {
		return fmt.Errorf("auth.admin_key_file %s: %w", s.cfg.Auth.AdminKeyFile, err)
	}
	return writeFile(s.KeyFile, []byte(string(s.Key)+"\n"), 0o600)
}

// serve hands every listener over from the answers of the start to those of cfg.
func (s *Server) serve(cfg gateway.Config) {
	g := gateway.New(cfg)
	s.gateways = []*gateway.Gateway{g}
	if s.facade != nil {
		s.serveFacade(cfg)
	}
	s.servePeers(s.base)
	s.undo.add("stop serving", s.stopServing)
	s.startup.Serve(g)
}

// newHTTP bounds how long a request may take to begin and how long its reader may take nothing of the answer. Streams go on
// for as long as they like.
func (s *Server) newHTTP(base context.Context, h http.Handler) *http.Server {
	return &http.Server{
		Handler:           s.limiter.Handler(s.bodies.Handler(s.tracing.Handler(h))),
		ConnContext:       s.limiter.ConnContext,
		ConnState:         s.limiter.ConnState,
		BaseContext:       func(net.Listener) context.Context { return base },
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       6 * time.Minute, // the Python SDK keeps a connection for five, and a request must not meet its end
		MaxHeaderBytes:    64 << 10,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}

// stopServing takes no new requests, lets those that run end in peace for the grace and cuts the rest.
func (s *Server) stopServing() error {
	for _, g := range s.gateways {
		g.Drain()
	}
	// The caller's context is what told us to stop: the grace has a clock of its own.
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.ShutdownGrace)
	defer cancel()
	err := s.shutdown(ctx)
	s.cancel(cove.ErrShutdown) // upgraded connections and those that outlived the grace
	if s.quitSessions != nil {
		s.quitSessions() // and runs whose callers have left already
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = s.cut()
	}
	for _, g := range s.gateways {
		g.Wait()
	}
	return err
}

func (s *Server) shutdown(ctx context.Context) error {
	return s.eachHTTP(func(h *http.Server) error { return h.Shutdown(ctx) })
}

// eachHTTP does something with all servers at once.
func (s *Server) eachHTTP(do func(*http.Server) error) error {
	all := make([]error, len(s.http))
	var each sync.WaitGroup
	for i, h := range s.http {
		each.Go(func() { all[i] = do(h) })
	}
	each.Wait()
	return errors.Join(all...)
}

// lastWords is how long a stream that is cut may take to say so.
const lastWords = 500 * time.Millisecond

// cut ends what outlived the grace: first by its context, so that a stream can say why it ends, then by its connection.
func (s *Server) cut() error {
	ctx, cancel := context.WithTimeout(context.Background(), lastWords)
	defer cancel()
	if s.shutdown(ctx) == nil {
		return nil
	}
	return s.eachHTTP((*http.Server).Close)
}

// Done tells when the server stops serving by itself, which it should not.
func (s *Server) Done() <-chan error { return s.served }

// Close stops the server in the reverse order of its start. Sandboxes live on where their driver keeps them.
func (s *Server) Close() error {
	s.once.Do(func() { s.closed = s.undo.run() })
	return s.closed
}

// ladder undoes what was done, the last first.
type ladder struct{ steps []step }

type step struct {
	name string
	undo func() error
}

func (l *ladder) add(name string, undo func() error) { l.steps = append(l.steps, step{name, undo}) }

func (l *ladder) run() error {
	var all []error
	for len(l.steps) > 0 {
		last := l.steps[len(l.steps)-1]
		l.steps = l.steps[:len(l.steps)-1]
		if err := last.undo(); err != nil {
			all = append(all, fmt.Errorf("%s: %w", last.name, err))
		}
	}
	return errors.Join(all...)
}

// NewLogger logs as the configuration says.
func NewLogger(cfg config.Log, w io.Writer) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(cfg.Level)) // validated; info otherwise
	options := &slog.HandlerOptions{Level: level}
	if cfg.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}
