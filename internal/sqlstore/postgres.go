package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/covehq/cove/internal/fault"
)

// How many connections one server has at most. Several servers share what Postgres allows, 100 by default. Those who wait for
// their turn to write keep nobody from reading.
const (
	postgresWriters = 10
	postgresReaders = 6
)

// idle is how long a connection is kept that nobody uses.
const idle = 5 * time.Minute

// sessionDefaults hold where the URL says nothing else. A server that hangs in a transaction, or whose host is gone, keeps others
// waiting: Postgres ends it, and who waits is told so.
var sessionDefaults = map[string]string{
	"application_name":                    "cove",
	"idle_in_transaction_session_timeout": "30s",
	"lock_timeout":                        "15s",
	"tcp_keepalives_count":                "3",
	"tcp_keepalives_idle":                 "10",
	"tcp_keepalives_interval":             "5",
}

// OpenPostgres opens a Postgres database by its URL and brings its schema up to date. Several servers may have it open.
// Whatever the URL holds besides the database's name and address is in no error.
func OpenPostgres(ctx context.Context, dsn string) (*Store, error) {
	w, err := dialPostgres(dsn, postgresWriters)
	if err != nil {
		return nil, err
	}
	life, quit := context.WithCancel(context.Background()) // the Store's, which Close ends
	s := &Store{w: w, tongue: postgresTongue, doubtFor: defaultDoubt, hasty: suspectLimit, life: life, quit: quit}
	if s.r, err = dialPostgres(dsn, postgresReaders); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	if s.claim.pool, err = dialPostgres(dsn, 1); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	s.claim.pool.SetConnMaxIdleTime(0)
	if err := s.preparePostgres(ctx); err != nil {
		s.Close()
		return nil, fmt.Errorf("open the Postgres database: %w", unopened(err))
	}
	return s, nil
}

// PostgresVersion asks what answers at a URL, and changes nothing.
func PostgresVersion(ctx context.Context, dsn string) (version string, err error) {
	pool, err := dialPostgres(dsn, 1)
	if err != nil {
		return "", err
	}
	defer pool.Close()
	if err := pool.QueryRowContext(ctx, "SHOW server_version").Scan(&version); err != nil {
		return "", unopened(err)
	}
	return version, nil
}

// dialPostgres makes a pool; it connects when somebody asks.
func dialPostgres(dsn string, connections int) (*sql.DB, error) {
	cfg, err := pgx.ParseConfig(dsn)
	if u, bad := url.Parse(dsn); err != nil || bad != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		// The reason could quote the URL, which holds a password.
		return nil, fault.New(fault.Invalid, "the database's URL cannot be read: write it as postgres://USER:PASSWORD@HOST:5432/DATABASE, with special characters as %%XX")
	}
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = 10 * time.Second
	}
	for name, value := range sessionDefaults {
		if _, said := cfg.RuntimeParams[name]; !said {
			cfg.RuntimeParams[name] = value
		}
	}
	pool := sql.OpenDB(connector{stdlib.GetConnector(*cfg)})
	pool.SetMaxOpenConns(connections)
	pool.SetMaxIdleConns(connections)
	pool.SetConnMaxIdleTime(idle)
	return pool, nil
}

func (s *Store) preparePostgres(ctx context.Context) error {
	if err := s.migratePostgres(ctx); err != nil {
		return err
	}
	return s.stmts.prepare(ctx, s)
}

var postgresTongue = tongue{
	field: func(column string) string { return "(" + column + "::json ->> ?::text)" },
	turn: func(ctx context.Context, tx *sql.Tx, name string) error {
		_, err := tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock(hashtextextended(?1, 0))", "cove "+name)
		return err
	},
	clock: "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
	again: func(err error) bool { s := sqlState(err); return s == stateSerialization || s == stateDeadlock },
	limit: postgresLimit,
}
