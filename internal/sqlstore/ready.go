package sqlstore

import (
	"context"
	"fmt"
)

// The document that Ready writes. Its tenant has a name that no tenant can have.
const (
	readyTenant = "-"
	readyKind   = "readiness"
	readyID     = "last"
)

// Ready tells whether the database takes changes and is still this server's.
//
// It writes: a database that is read-only, locked or full can still be read, and no sandbox could be
// created.
func (s *Store) Ready(ctx context.Context) error {
	if err := s.PutDocument(ctx, readyTenant, readyKind, readyID, nil); err != nil {
		return fmt.Errorf("write to the database: %w", err)
	}
	if _, err := s.Document(ctx, readyTenant, readyKind, readyID); err != nil {
		return fmt.Errorf("ask the database: %w", err)
	}
	// Pings of a claim have no deadline of the store's.
	ctx, cancel := context.WithTimeout(ctx, s.limit+claimPatience)
	defer cancel()
	return s.claim.hold(ctx)
}
