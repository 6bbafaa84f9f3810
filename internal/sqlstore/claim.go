package sqlstore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"sync"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// A claim keeps a server that is alone in its Postgres from meeting another one, which would end its sandboxes: what the lock of
// a data directory is for SQLite. It lasts as long as a connection of its own.
type claim struct {
	pool *sql.DB // nil: SQLite

	mu     sync.Mutex
	made   bool
	shared bool
	conn   *sql.Conn // that holds it; nil: none does at the moment
}

const (
	claimAlone  = "SELECT pg_advisory_lock(hashtextextended('cove server ' || current_schema(), 0))"
	claimShared = "SELECT pg_advisory_lock_shared(hashtextextended('cove server ' || current_schema(), 0))"
)

// claimPatience is how long a server waits for an earlier one that may be about to end. Tests have less.
var claimPatience = 5 * time.Second

// Claim takes the database for this server alone, or together with others that share it as well. Who cannot have it gets
// fault.Conflict. Ready tells whether it still holds.
func (s *Store) Claim(ctx context.Context, shared bool) error {
	if s.claim.pool == nil {
		return nil
	}
	s.claim.mu.Lock()
	defer s.claim.mu.Unlock()
	s.claim.drop()
	s.claim.shared = shared
	return s.claim.take(ctx)
}

// take asks for a connection and the lock. The caller holds mu.
func (c *claim) take(ctx context.Context) error {
	conn, err := c.pool.Conn(ctx)
	if err != nil {
		return fmt.Errorf("claim the database: %w", err)
	}
	query := claimAlone
	if c.shared {
		query = claimShared
	}
	if _, err = conn.ExecContext(ctx, fmt.Sprintf("SET lock_timeout = %d", claimPatience.Milliseconds())); err == nil {
		_, err = conn.ExecContext(ctx, query)
	}
	if err != nil {
		conn.Close()
	}
	if sqlState(err) == stateLockTimeout {
		return fault.Wrap(fault.Conflict, err, "another server uses this database: stop it, give this one a database of its own, or with the Kubernetes driver set server.replicas of all of them to how many they are")
	}
	if err != nil {
		return fmt.Errorf("claim the database: %w", err)
	}
	c.made, c.conn = true, conn
	return nil
}

// hold takes a claim again that was lost with its connection.
func (c *claim) hold(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.made || c.conn != nil && c.conn.PingContext(ctx) == nil {
		return nil
	}
	c.drop()
	return c.take(ctx)
}

// drop ends a connection, with its locks, that may be lost already. The caller holds mu.
func (c *claim) drop() {
	if c.conn == nil {
		return
	}
	_ = c.conn.Raw(func(any) error { return driver.ErrBadConn }) // or the pool would keep it
	_ = c.conn.Close()
	c.conn = nil
}

func (c *claim) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pool == nil {
		return nil
	}
	c.drop()
	return c.pool.Close()
}
