package app

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/gateway"
	"github.com/covehq/cove/internal/sqlstore"
)

// checks are what a server cannot serve without.
func (s *Server) checks(store *sqlstore.Store, p parts) gateway.Checks {
	all := gateway.Checks{
		"database": explained(store.Ready),
		"files":    func(context.Context) error { return writable(stateDir(s.cfg.DataDir)) },
	}
	if s.ready != nil {
		all["driver"] = explained(s.ready)
	}
	if s.cfg.Driver == config.DriverNative {
		all["disk"] = func(context.Context) error { return checkReserve(s.cfg) }
	}
	if built, ok := p.templates.(builtTemplates); ok {
		all["templates"] = built.check
	}
	return all
}

// explained passes on the sentence of a failure that callers of the API are told too.
func explained(check func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		err := check(ctx)
		var known *fault.Error
		if errors.As(err, &known) {
			return fmt.Errorf("%w: %w", gateway.Public(known.Message), err)
		}
		return err
	}
}

// notes are what /readyz tells of a server that is ready.
func (p parts) notes() (all []string) {
	if p.disk != nil {
		all = append(all, p.disk.notes()...)
	}
	if built, ok := p.templates.(builtTemplates); ok {
		all = append(all, built.state.notes()...)
	}
	return all
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
