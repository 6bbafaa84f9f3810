package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/sqlstore"
)

// openStore opens the database that the configuration names, else the data directory's own.
func (s *Server) openStore(ctx context.Context) (*sqlstore.Store, error) {
	store, err := openDatabase(ctx, s.cfg)
	if err != nil {
		return nil, err
	}
	s.undo.add("close database", store.Close)
	s.store = store
	return store, store.Claim(ctx, s.cfg.Server.Replicas > 1)
}

func openDatabase(ctx context.Context, cfg config.Config) (*sqlstore.Store, error) {
	if !cfg.Database.Postgres() {
		return sqlstore.Open(sqliteFile(cfg))
	}
	dsn, err := databaseURL(cfg.Database)
	if err != nil {
		return nil, err
	}
	return sqlstore.OpenPostgres(ctx, string(dsn))
}

func sqliteFile(cfg config.Config) string { return filepath.Join(stateDir(cfg.DataDir), "cove.db") }

// maxURL is far more than a URL has.
const maxURL = 16 << 10

// databaseURL is what the configuration says or the file that it names, such as a mounted secret. What the file holds is told to
// nobody.
func databaseURL(d config.Database) (config.DatabaseURL, error) {
	if d.URLFile == "" {
		return d.URL, nil
	}
	f, err := os.Open(d.URLFile)
	if err != nil {
		return "", fmt.Errorf("read database.url_file: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxURL+1))
	if err != nil {
		return "", fmt.Errorf("read database.url_file: %w", err)
	}
	dsn := config.DatabaseURL(strings.TrimSpace(string(text)))
	if len(text) > maxURL || !dsn.IsPostgresURL() {
		return "", errors.New("the file of database.url_file must hold one line: postgres://USER:PASSWORD@HOST:5432/DATABASE, with special characters as %XX")
	}
	return dsn, nil
}
