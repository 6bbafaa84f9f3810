package app

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"path/filepath"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/dataset"
	"github.com/covehq/cove/internal/dialect/cove"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/session"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/telemetry"
)

// openSessions opens sessions in front of the domain.
func (s *Server) openSessions(
	api *cove.API, store *sqlstore.Store, m domain, p parts, keeper *artifact.Keeper, data *dataset.Store, o *telemetry.Observer,
) (*session.Manager, error) {
	c, sandboxes := s.cfg.Sessions, sandboxConfig(s.cfg, p.most)
	root := "/session"
	if s.Caps.Isolation == "none" { // sandboxes share the host's files: below the home of each
		root = "session"
	}
	sessions := session.New(session.Config{
		Server: s.team.me(), Dir: filepath.Join(stateDir(s.cfg.DataDir), "sessions"), Root: root, IdleTimeout: c.IdleTimeout, Lifetime: c.Lifetime, Size: int64(c.Size), Retention: c.Retention,
		MaxLifetime: sandboxes.MaxLifetime, Limits: sandboxes.Limits(), MaxLimits: sandboxes.MaxLimits, Template: sandboxes.DefaultTemplate,
		MaxPerTenant: c.MaxPerTenant, MaxLogs: cmp.Or(int64(c.MaxTenantLog), math.MaxInt64), MaxFollowers: s.cfg.Sandbox.MaxEventStreams,
		Space: s.spaceCheck(),
	}, m, p.templates, store, s.tracedArtifacts(keeper), sessionData{data}, s.log)
	s.undo.add("end the work of sessions", sessions.Close)
	s.quitSessions = sessions.Quit
	// Opening takes over what an earlier server left, and is done before anybody could want it to stop.
	if err := sessions.Open(context.Background()); err != nil {
		return nil, fmt.Errorf("find the sessions of an earlier server: %w", err)
	}
	s.watchSessions(o, sessions.Census)
	api.SetSessions(s.tracedSessions(sessions))
	api.SetRuns(sessions)
	return sessions, nil
}

// sessionData is the datasets of sessions in the words of both.
type sessionData struct{ *dataset.Store }

func (d sessionData) Mounts(ctx context.Context, tenant, of, access, path string) ([]sandbox.Mount, error) {
	parsed, err := dataset.ParseAccess(access)
	if err != nil {
		return nil, err
	}
	return d.Store.Mounts(ctx, tenant, of, parsed, path)
}
