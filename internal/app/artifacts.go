package app

import (
	"cmp"
	"context"
	"path/filepath"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/blob/local"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/telemetry"
)

// openArtifacts opens what keeps files that runs leave.
func (s *Server) openArtifacts(store *sqlstore.Store, o *telemetry.Observer) (*artifact.Keeper, error) {
	blobs, err := local.Open(filepath.Join(stateDir(s.cfg.DataDir), "artifacts"), local.Options{Space: s.spaceCheck()})
	if err != nil {
		return nil, err
	}
	s.undo.add("close artifacts", blobs.Close)
	c := s.cfg.Artifacts
	// Opening asks the database for a key and is done before anybody could want it to stop.
	k, err := artifact.New(context.Background(), artifact.Config{
		PublicURL: cmp.Or(c.PublicURL, s.URL), LinkTTL: c.LinkTTL, MaxFileSize: int64(c.MaxFileSize), MaxSessionSize: int64(c.MaxSessionSize),
		MaxTenantSize: int64(c.MaxTenantSize), Retention: c.Retention, Log: s.log, Observer: o,
	}, blobs, store)
	if err != nil {
		return nil, err
	}
	s.undo.add("stop sweeping artifacts", k.Close)
	return k, nil
}
