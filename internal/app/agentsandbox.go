package app

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/dialect/agentsandbox"
	"github.com/covehq/cove/internal/dialect/agentsandbox/router"
	"github.com/covehq/cove/internal/dialect/agentsandbox/runtime"
	"github.com/covehq/cove/internal/dialect/agentsandbox/sandboxd"
	"github.com/covehq/cove/internal/gateway"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/telemetry"
)

// facade is the listener that speaks Kubernetes' API, and who answers there.
type facade struct {
	listener net.Listener
	url      string
	startup  *gateway.Startup
	http     *http.Server
	tls      *lateTLS
	given    *tls.Certificate // nil: the server makes its own
	ca       []byte           // what clients must trust; empty: what they trust anyhow
	api      *agentsandbox.API
	router   *router.Router
}

// listenAgentSandbox takes the address of the façade, and reads the certificate that was given while this process may; nil:
// there is none.
func (s *Server) listenAgentSandbox() (*facade, error) {
	address := s.cfg.AgentSandboxListen()
	if address == "" {
		return nil, nil
	}
	l, err := s.listen(address, "agent_sandbox.listen =")
	if err != nil && s.cfg.AgentSandbox.Listen == "" && taken(address) {
		// Nobody chose this port, and no client knows it by heart: a second server on a machine takes another.
		s.log.Warn("the default port of the Kubernetes API is taken, so another is used; agent_sandbox.listen chooses one", "address", address)
		l, err = s.listen("127.0.0.1:0", "agent_sandbox.listen =")
	}
	if err != nil {
		return nil, err
	}
	f := &facade{listener: l, url: s.cfg.AgentSandbox.URL, startup: gateway.NewStartup(tellKubernetes), tls: &lateTLS{}}
	if f.url == "" {
		at := l.Addr().(*net.TCPAddr)
		host := at.IP
		if host.IsUnspecified() {
			host = net.IPv4(127, 0, 0, 1)
		}
		f.url = "https://" + net.JoinHostPort(host.String(), strconv.Itoa(at.Port))
	}
	return f, f.read(s.cfg.AgentSandbox)
}

// taken tells whether somebody listens on an address already.
func taken(address string) bool {
	l, err := net.Listen("tcp", address)
	if err == nil {
		l.Close()
	}
	return errors.Is(err, syscall.EADDRINUSE)
}

func (f *facade) read(cfg config.AgentSandbox) error {
	if cfg.Cert == "" {
		return nil
	}
	given, err := loadPair(cfg.Cert, cfg.Key)
	if err != nil {
		return err
	}
	f.given = &given
	if cfg.CA != "" {
		if f.ca, err = os.ReadFile(cfg.CA); err != nil {
			return fmt.Errorf("agent_sandbox.ca: %w", err)
		}
	}
	return nil
}

// openAgentSandbox builds the agent-sandbox dialect: the façade, the router and the runtime behind it.
func (s *Server) openAgentSandbox(ctx context.Context, store *sqlstore.Store, m domain, keys *auth.Keys, images *image.Service, t templates, o *telemetry.Observer) error {
	if s.facade == nil {
		return nil
	}
	secret, err := s.secret("agentsandbox_secret")
	if err != nil {
		return err
	}
	inside := runtime.New(m, s.log)
	s.undo.add("close the runtime of agent-sandbox", func() error { inside.Close(); return nil })
	networks, err := networkRules(s.cfg)
	if err != nil {
		return err
	}
	cfg := s.cfg.AgentSandbox
	api := agentsandbox.New(agentsandbox.Config{
		Version: version(), Templates: cfg.Templates, Namespaces: cfg.Namespaces, MaxLifetime: s.cfg.Sandbox.MaxLifetime, Networks: networks, Space: s.spaceCheck(),
	}, m, keys, images, t, store, inside, s.log)
	api.OnFailure(o.Failed)
	s.undo.add("end agent-sandbox's work", func() error { api.Close(); return nil })
	r := router.New(router.Config{Secret: secret}, api, keys, inside, m, s.log)
	s.undo.add("close the router of agent-sandbox", func() error { r.Close(); return nil })
	api.Connect(r, sandboxd.New(m, s.log))
	s.facade.api, s.facade.router = api, r
	if err := api.Open(ctx); err != nil {
		return fmt.Errorf("find the objects of agent-sandbox: %w", err)
	}
	return nil
}

// secureFacade makes the certificate of the façade's listener, as secure does for the other one.
func (s *Server) secureFacade() error {
	f := s.facade
	if f == nil || f.given != nil {
		return nil
	}
	dir := certificateDir(s.cfg.DataDir, facadeName)
	also := s.cfg.AgentSandbox.Names
	if ip := f.listener.Addr().(*net.TCPAddr).IP; s.team == nil && !ip.IsUnspecified() && !ip.IsLoopback() { // several are reached by a name that they share
		also = append([]string{ip.String()}, also...)
	}
	if err := s.shareAuthority(dir, "cove.localhost", also...); err != nil {
		return fmt.Errorf("certificate for the Kubernetes API: %w", err)
	}
	own, err := openIdentity(dir, "cove.localhost", time.Now, s.log, also...)
	if err != nil {
		return fmt.Errorf("certificate for the Kubernetes API: %w", err)
	}
	if f.ca, err = os.ReadFile(own.file); err != nil {
		return fmt.Errorf("certificate for the Kubernetes API: %w", err)
	}
	f.tls.use(own.get)
	return nil
}

// facadeName is the directory of the façade's own certificate.
const facadeName = "kubernetes"

// serveFacade answers on the façade's listener, as serve does on the others: with guests, logs and metrics.
func (s *Server) serveFacade(cfg gateway.Config) {
	f := s.facade
	g := gateway.New(gateway.Config{
		Elsewhere: s.team.elsewhereFacade(), Guests: cfg.Guests, Else: s.desk.kubernetes(), Metrics: cfg.Metrics, Checks: cfg.Checks, Served: cfg.Served, Log: s.log,
	})
	s.gateways = append(s.gateways, g)
	f.http.RegisterOnShutdown(s.desk.quit) // watches go on for as long as their clients like
	f.startup.Serve(g)
}

// Kubernetes tells a tenant's clients how to reach the façade and, without a key, the router.
func (f *facade) Kubernetes(p auth.Principal) client.KubernetesAccess {
	return client.KubernetesAccess{Server: f.url, CertificateAuthority: string(f.ca), RouterPath: f.router.Prefix(p)}
}
