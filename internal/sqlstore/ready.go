package sqlstore

import (
	"context"
	"fmt"
)

// Ready tells whether the database answers and is still this server's.
func (s *Store) Ready(ctx context.Context) error {
	var one int
	if err := s.r.QueryRowContext(ctx, "SELECT count(*) FROM sandboxes WHERE id = ''").Scan(&one); err != nil {
		return fmt.Errorf("ask the database: %w", err)
	}
	return s.claim.hold(ctx)
}
