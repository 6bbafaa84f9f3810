package app

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/agentsandbox"
	"github.com/covehq/cove/internal/dialect/agentsandbox/router"
	"github.com/covehq/cove/internal/dialect/agentsandbox/runtime"
	"github.com/covehq/cove/internal/dialect/agentsandbox/sandboxd"
	"github.com/covehq/cove/internal/dialect/cove"
	"github.com/covehq/cove/internal/dialect/e2b"
	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/dialect/e2b/edge"
	"github.com/covehq/cove/internal/dialect/e2b/envd"
	"github.com/covehq/cove/internal/dialect/e2b/interpreter"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/dialect/opensandbox"
	"github.com/covehq/cove/internal/dialect/opensandbox/egress"
	"github.com/covehq/cove/internal/dialect/opensandbox/execd"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/session"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/telemetry"
	"github.com/covehq/cove/internal/template"
)

// envdVersion is what sandboxes claim to the SDKs, which turn on by it what we serve.
const envdVersion = "0.6.13"

// domain is what all dialects together ask of the Manager.
type domain interface {
	cove.Sandboxes
	session.Sandboxes
	e2b.Sandboxes
	edge.Sandboxes
	envd.Sandboxes
	interpreter.Sandboxes
	build.Sandboxes
	opensandbox.Sandboxes
	execd.Sandboxes
	egress.Sandboxes
	agentsandbox.Sandboxes
	router.Domain
	runtime.Domain
	sandboxd.Domain
}

// e2bParts are the two planes of the E2B dialect.
type e2bParts struct {
	control *e2b.API
	inside  *edge.Edge
}

// openE2B builds the E2B dialect: the control plane, the edge of the data plane and who answers behind it.
func (s *Server) openE2B(store *sqlstore.Store, m domain, keys *auth.Keys, t templates, images *image.Service, o *telemetry.Observer) (e2bParts, error) {
	secret, err := s.secret("e2b_secret")
	if err != nil {
		return e2bParts{}, err
	}
	builder, err := build.New(build.Config{
		Dir: filepath.Join(stateDir(s.cfg.DataDir), "e2b-files"), Secret: secret, URL: reachedAt, EnvdVersion: envdVersion,
		Lifetime: buildLifetime(s.cfg.Sandbox.MaxLifetime), Limits: sandboxConfig(s.cfg, template.Limits{}).Limits(), Space: s.spaceCheck(),
	}, m, store, t, images, s.log)
	if err != nil {
		return e2bParts{}, fmt.Errorf("template builds: %w", err)
	}
	s.undo.add("end template builds", func() error { builder.Close(); return nil })
	control := e2b.New(e2b.Config{
		Domain: s.reachedBy(), Version: envdVersion, Secret: secret, MaxLifetime: s.cfg.Sandbox.MaxLifetime, OpenSandboxes: s.cfg.E2B.OpenSandboxes,
	}, m, keys, store, builder, s.log)
	control.OnFailure(o.Failed)
	builder.ResolveBy(control.Resolve)
	tokens := target.NewTokens(secret)
	files := envd.New(m, tokens, s.log)
	s.undo.add("close envd", func() error { files.Close(); return nil })
	inside := edge.New(edge.Config{Domain: s.cfg.TLS.Domain, Tokens: tokens, Keys: keys, Lines: control.Log}, m, files, interpreter.New(m, s.log), s.log)
	s.undo.add("close connections to ports", inside.Close)
	return e2bParts{control, inside}, nil
}

// buildLifetime is how long a template build may take: a sandbox that builds lives no longer than others may.
func buildLifetime(most time.Duration) time.Duration {
	if most > 0 && most < time.Hour {
		return most
	}
	return time.Hour
}

// reachedBy is the domain of sandboxes' host names as SDKs are told it: without one they would make up names below
// e2b.app, and send what is ours there. On this machine localhost will do, without TLS.
func (s *Server) reachedBy() string {
	u, err := url.Parse(s.URL)
	if s.Domain != "" || err != nil || !net.ParseIP(u.Hostname()).IsLoopback() {
		return s.Domain
	}
	return "localhost:" + u.Port()
}

// reachedAt is the server as the caller of a request reached it.
func reachedAt(r *http.Request) string {
	if r.TLS != nil || r.Header.Get("X-Forwarded-Proto") == "https" {
		return "https://" + r.Host
	}
	return "http://" + r.Host
}

// secret is what the tokens of sandboxes are derived from, in one dialect: made once, so that they hold over restarts.
func (s *Server) secret(name string) ([]byte, error) {
	own, err := s.ownSecret(name)
	if err != nil || !s.cfg.Database.Postgres() {
		return own, err
	}
	return s.store.Secret(context.Background(), name, own) // done before anybody could want it to stop
}

// ownSecret is the data directory's. Servers that share a database share the first one's.
func (s *Server) ownSecret(name string) ([]byte, error) {
	file := filepath.Join(stateDir(s.cfg.DataDir), name)
	text, err := os.ReadFile(file)
	if err == nil {
		secret, err := hex.DecodeString(strings.TrimSpace(string(text)))
		if err != nil || len(secret) < 32 {
			return nil, fmt.Errorf("%s is not what this server wrote; remove it, and tokens of living sandboxes are no longer valid", file)
		}
		return secret, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the secret of tokens: %w", err)
	}
	secret := make([]byte, 32)
	if _, err := rand.Read(secret); err != nil {
		return nil, err
	}
	return secret, writeFile(file, []byte(hex.EncodeToString(secret)+"\n"), 0o600)
}
