package app

import (
	"context"
	"fmt"
	"net"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox"
	"github.com/covehq/cove/internal/dialect/opensandbox/egress"
	"github.com/covehq/cove/internal/dialect/opensandbox/execd"
	"github.com/covehq/cove/internal/gateway"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/telemetry"
	"github.com/covehq/cove/internal/template"
)

// openOpenSandbox builds the OpenSandbox dialect: its lifecycle API and who answers for the ports behind it.
func (s *Server) openOpenSandbox(store *sqlstore.Store, m domain, keys *auth.Keys, images *image.Service, most template.Limits, o *telemetry.Observer) (*opensandbox.API, error) {
	secret, err := s.secret("opensandbox_secret")
	if err != nil {
		return nil, err
	}
	inside := execd.New(m, s.log)
	s.undo.add("close execd", func() error { inside.Close(); return nil })
	api := opensandbox.New(opensandbox.Config{Secret: secret, MaxLimits: sandboxConfig(s.cfg, most).MaxLimits},
		m, keys, images, store, inside, egress.New(m, s.log), s.log)
	api.OnFailure(o.Failed)
	s.undo.add("end OpenSandbox's work", func() error { api.Close(); return nil })
	api.Open()
	return api, nil
}

// guests lets people in without a key, where the operator says so.
func (s *Server) guests(ctx context.Context, keys *auth.Keys) (*gateway.Guests, error) {
	if !s.cfg.Auth.Anonymous {
		return nil, nil
	}
	key, err := keys.Guests(Tenant)
	if err != nil {
		return nil, fmt.Errorf("let guests in: %w", err)
	}
	if s.team != nil { // what one server lets in is let in by the others
		shared, err := s.store.Secret(ctx, "guests", []byte(key))
		if err != nil {
			return nil, fmt.Errorf("let guests in: %w", err)
		}
		key = auth.Secret(shared)
		keys.GuestsWith(Tenant, key)
	}
	s.log.Warn("requests without an API key are taken for the local admin's tenant", "everywhere", s.cfg.Auth.Everywhere)
	g := &gateway.Guests{Key: string(key), Everywhere: s.cfg.Auth.Everywhere}
	if host, _, err := net.SplitHostPort(s.cfg.Listen); err == nil && host != "" {
		g.Hosts = append(g.Hosts, host)
	}
	if s.cfg.TLS.Domain != "" {
		g.Hosts = append(g.Hosts, s.cfg.TLS.Domain)
	}
	return g, nil
}
