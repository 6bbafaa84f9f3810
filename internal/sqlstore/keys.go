package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

const keyColumns = `id, tenant, name, hash, prefix, admin, created_at, revoked_at, last_used`

const (
	keyByHashQuery = `SELECT ` + keyColumns + ` FROM keys WHERE hash = ?1`
	touchKeyQuery  = `UPDATE keys SET last_used = CASE WHEN last_used < ?2 THEN ?2 ELSE last_used END WHERE id = ?1`
)

// InsertKey adds a key.
func (s *Store) InsertKey(ctx context.Context, r auth.KeyRecord) error {
	_, err := s.change(ctx, `INSERT INTO keys (`+keyColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		r.ID, r.Tenant, r.Name, r.Hash, r.Prefix, r.Admin, micros(r.CreatedAt), micros(r.RevokedAt), micros(r.LastUsed))
	if conflict(err) {
		return fault.Wrap(fault.Conflict, err, "the key is there already")
	}
	if err != nil {
		return fmt.Errorf("insert key: %w", err)
	}
	return nil
}

// KeyByHash finds a key, revoked or not.
func (s *Store) KeyByHash(ctx context.Context, hash string) (auth.KeyRecord, error) {
	r, err := scanKey(s.preparedRow(ctx, s.stmts.keyByHash, hash))
	if errors.Is(err, sql.ErrNoRows) {
		return auth.KeyRecord{}, fault.New(fault.NotFound, "there is no such key")
	}
	if err != nil {
		return auth.KeyRecord{}, fmt.Errorf("find key: %w", err)
	}
	return r, nil
}

// ListKeys returns a tenant's keys, oldest first.
func (s *Store) ListKeys(ctx context.Context, tenant string) ([]auth.KeyRecord, error) {
	var records []auth.KeyRecord
	err := s.query(ctx, `SELECT `+keyColumns+` FROM keys WHERE tenant = ? ORDER BY created_at, id`, []any{tenant}, func(rows *sql.Rows) error {
		r, err := scanKey(rows)
		records = append(records, r)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list keys: %w", err)
	}
	return records, nil
}

// RevokeKey marks a tenant's key; one revoked before keeps its time.
func (s *Store) RevokeKey(ctx context.Context, tenant, id string, at time.Time) error {
	n, err := s.change(ctx,
		`UPDATE keys SET revoked_at = CASE revoked_at WHEN 0 THEN ? ELSE revoked_at END WHERE tenant = ? AND id = ?`,
		micros(at), tenant, id)
	if err != nil {
		return fmt.Errorf("revoke key: %w", err)
	}
	if n == 0 {
		return fault.New(fault.NotFound, "there is no key %q", id)
	}
	return nil
}

// TouchKey records when a key was last used.
func (s *Store) TouchKey(ctx context.Context, id string, at time.Time) error {
	err := s.call(ctx, s.limit, func(ctx context.Context) error {
		return s.whileFree(ctx, func(ctx context.Context) error {
			_, err := s.stmts.touchKey.ExecContext(ctx, id, micros(at))
			return err
		})
	})
	if err != nil {
		return fmt.Errorf("touch key: %w", err)
	}
	return nil
}

func scanKey(from scanner) (auth.KeyRecord, error) {
	var r auth.KeyRecord
	var created, revoked, used int64
	err := from.Scan(&r.ID, &r.Tenant, &r.Name, &r.Hash, &r.Prefix, &r.Admin, &created, &revoked, &used)
	r.CreatedAt, r.RevokedAt, r.LastUsed = fromMicros(created), fromMicros(revoked), fromMicros(used)
	return r, err
}
