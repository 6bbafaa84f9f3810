package app

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/covehq/cove/internal/config"
)

// checkData looks at what the server itself needs: its data directory.
func checkData(cfg config.Config) []Finding {
	const name = "data directory"
	info, err := os.Stat(cfg.DataDir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return []Finding{{name, "note", cfg.DataDir + " does not exist yet", "`cove serve` makes it"}}
	case err != nil:
		return []Finding{{name, LevelRefuse, err.Error(), "make it readable or choose another with --data-dir"}}
	case info.Mode().Perm()&0o022 != 0:
		return []Finding{{name, LevelRefuse, fmt.Sprintf("%s is writable by others (%v)", cfg.DataDir, info.Mode().Perm()), "chmod go-w " + cfg.DataDir}}
	}
	unlock, err := lock(stateDir(cfg.DataDir))
	if errors.Is(err, ErrLocked) {
		return []Finding{{name, "ok", cfg.DataDir + " is in use by a running server", ""}}
	}
	if err != nil {
		return []Finding{{name, LevelRefuse, err.Error(), "make it writable or choose another with --data-dir"}}
	}
	_ = unlock() // closing a file that was only locked
	return []Finding{{name, "ok", cfg.DataDir, ""}}
}

// checkHost asks the driver's own host check.
func checkHost(ctx context.Context, cfg config.Config) []Finding {
	if cfg.Driver == config.DriverInproc {
		return []Finding{{"isolation", LevelRefuse, "the inproc driver runs everything on this host as this user", "use driver = \"native\"; inproc is for tests"}}
	}
	if cfg.Driver == config.DriverKubernetes {
		return []Finding{{"isolation", "ok", "sandboxes are Pods of a cluster, which isolates them", ""}}
	}
	return checkNative(ctx, cfg)
}
