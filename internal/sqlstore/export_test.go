package sqlstore

import (
	"context"
	"database/sql"
	"time"
)

func init() { claimPatience = 500 * time.Millisecond }

// Dollars and WithoutNUL are for tests of what texts become.
var (
	Dollars    = dollars
	WithoutNUL = withoutNUL
)

// Exec runs a statement on the connection that writes.
func (s *Store) Exec(ctx context.Context, query string) error {
	_, err := s.w.ExecContext(ctx, query)
	return err
}

// Begin opens a transaction that the store knows nothing of.
func (s *Store) Begin(ctx context.Context) (*sql.Tx, error) { return s.w.BeginTx(ctx, nil) }

// SetDoubt says how long the database may take to answer after a late call, before it is suspect.
func (s *Store) SetDoubt(d time.Duration) { s.doubtFor = d }

// SetLimits says how long a call may take: usually, and while the database is suspect.
func (s *Store) SetLimits(usual, suspect time.Duration) { s.limit, s.hasty = usual, suspect }

// Asking tells whether the store asks the database for a change because a call was late.
func (s *Store) Asking() bool { return s.doubt.Load() != nil }

// Suspect tells whether callers get the short limit.
func (s *Store) Suspect() bool { return s.suspect.Load() }
