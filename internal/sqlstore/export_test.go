package sqlstore

import (
	"context"
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
