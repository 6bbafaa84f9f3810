package app

import (
	"context"
	"path/filepath"

	"github.com/covehq/cove/internal/blob/local"
	"github.com/covehq/cove/internal/dataset"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/telemetry"
)

// openDatasets opens what keeps data for sessions. The maker finds the directories of sessions by the same path.
func (s *Server) openDatasets(store *sqlstore.Store, o *telemetry.Observer) (*dataset.Store, error) {
	shelf, err := local.OpenShelf(filepath.Join(stateDir(s.cfg.DataDir), "datasets"), s.spaceCheck())
	if err != nil {
		return nil, err
	}
	s.undo.add("close datasets", shelf.Close)
	c := dataset.Config{MaxSize: int64(s.cfg.Datasets.MaxSize), MaxTenantSize: int64(s.cfg.Datasets.MaxTenantSize), Alive: store.SessionExists}
	d := dataset.New(c, store, shelf, o, s.log)
	// Opening clears away what an earlier server has left, and is done before anybody could want it to stop.
	if err := d.Open(context.Background()); err != nil {
		return nil, err
	}
	s.undo.add("stop sweeping datasets", d.Close)
	return d, nil
}
