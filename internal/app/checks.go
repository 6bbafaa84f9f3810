package app

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/gateway"
	"github.com/covehq/cove/internal/sqlstore"
)

// checks are what a server cannot serve without.
func (s *Server) checks(store *sqlstore.Store, p parts) gateway.Checks {
	all := gateway.Checks{
		"database": store.Ready,
		"files":    func(context.Context) error { return writable(stateDir(s.cfg.DataDir)) },
	}
	if s.ready != nil {
		all["driver"] = s.ready
	}
	if built, ok := p.templates.(builtTemplates); ok {
		all["templates"] = built.state.check
	}
	return all
}

// notes are what /readyz tells of a server that is ready.
func (p parts) notes(cfg config.Config) func() []string {
	return func() []string {
		all := diskNotes(cfg)
		if built, ok := p.templates.(builtTemplates); ok {
			all = append(all, built.state.notes()...)
		}
		return all
	}
}

// probe is a file that is written and removed again: nothing else tells a disk that takes no more.
const probe = ".ready"

func writable(dir string) error {
	if free, ok := diskFree(dir); ok && free == 0 {
		return errors.New("the disk is full")
	}
	path := filepath.Join(dir, probe)
	if err := os.WriteFile(path, []byte("ready\n"), 0o600); err != nil {
		return fmt.Errorf("write where artifacts and datasets are kept: %w", err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) { // somebody else asked at the same time
		return err
	}
	return nil
}
