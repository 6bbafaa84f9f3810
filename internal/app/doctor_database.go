package app

import (
	"context"
	"fmt"
	"time"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sqlstore"
)

// databasePatience is how long doctor waits for a Postgres.
const databasePatience = 10 * time.Second

// checkDatabase asks a Postgres for its version. SQLite's file is part of the data directory.
func checkDatabase(ctx context.Context, cfg config.Config) []Finding {
	const name = "database"
	if !cfg.Database.Postgres() {
		return []Finding{{name, "ok", "SQLite in " + sqliteFile(cfg), ""}}
	}
	dsn, err := databaseURL(cfg.Database)
	if err != nil {
		return []Finding{{name, LevelRefuse, err.Error(), "correct database.url_file"}}
	}
	ctx, cancel := context.WithTimeout(ctx, databasePatience)
	defer cancel()
	version, err := sqlstore.PostgresVersion(ctx, string(dsn))
	if err != nil {
		return []Finding{{name, LevelRefuse, fault.Message(err), fmt.Sprintf("correct database.url (%s), or see to the server there", dsn)}}
	}
	return []Finding{{name, "ok", fmt.Sprintf("Postgres %s at %s", version, dsn), ""}}
}
