package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// serversTurn is taken by whoever changes which servers there are, or what is whose: one after the other.
const serversTurn = "servers"

// JoinServers enters a server among those that share the database.
func (s *Store) JoinServers(ctx context.Context, server sandbox.Server) error {
	err := s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		if err := s.turn(ctx, tx, serversTurn); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO servers (id, url, seen) VALUES (?1, ?2, `+s.clock+`)`, server.ID, server.URL)
		return err
	})
	if err != nil {
		return fmt.Errorf("join the servers: %w", err)
	}
	return nil
}

// LeaveServers takes a server out. The first of the others takes over what it had.
func (s *Store) LeaveServers(ctx context.Context, id string) error {
	if _, err := s.change(ctx, `DELETE FROM servers WHERE id = ?1`, id); err != nil {
		return fmt.Errorf("leave the servers: %w", err)
	}
	return nil
}

// Beat says that a server lives, takes those for dead that have not said so for a while, and gives what belongs to nobody to the
// first of those that are left: taken is not empty only for that one. It returns all, the oldest first. A server that was itself
// taken for dead is told sandbox.ErrExpelled.
//
// Who has not been heard for so long himself judges nobody: it was he who was away, or the database.
func (s *Store) Beat(ctx context.Context, id string, dead time.Duration) (all []sandbox.Server, taken []sandbox.Record, err error) {
	// A server that cannot say that it lives is expelled, so this one waits as long as its caller does.
	err = s.inTxWithin(ctx, batchTime, func(ctx context.Context, tx *sql.Tx) (err error) {
		all, taken = nil, nil
		if err := s.turn(ctx, tx, serversTurn); err != nil {
			return err
		}
		present, err := s.sign(ctx, tx, id, dead)
		if err != nil {
			return err
		}
		if present {
			_, err = tx.ExecContext(ctx, `DELETE FROM servers WHERE seen < `+s.clock+` - ?1`, dead.Microseconds())
		}
		if err != nil {
			return err
		}
		if all, err = s.servers(ctx, tx); err != nil || len(all) == 0 || all[0].ID != id {
			return err
		}
		taken, err = s.takeOver(ctx, tx, `UPDATE sandboxes SET server = ?1 WHERE state <> 'ended' AND server NOT IN (SELECT id FROM servers)
			RETURNING seq, `+columns, id)
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("tell the servers that this one lives: %w", err)
	}
	return all, taken, nil
}

// sign writes that a server lives and tells whether it had done so shortly before.
func (s *Store) sign(ctx context.Context, tx *sql.Tx, id string, dead time.Duration) (present bool, err error) {
	var silent int64
	err = tx.QueryRowContext(ctx, `SELECT `+s.clock+` - seen FROM servers WHERE id = ?1`, id).Scan(&silent)
	if errors.Is(err, sql.ErrNoRows) {
		return false, fault.Wrap(fault.Unavailable, sandbox.ErrExpelled, "this server was taken for dead; try again")
	}
	if err != nil {
		return false, err
	}
	_, err = tx.ExecContext(ctx, `UPDATE servers SET seen = `+s.clock+` WHERE id = ?1`, id)
	return silent < dead.Microseconds(), err
}

func (s *Store) servers(ctx context.Context, tx *sql.Tx) (all []sandbox.Server, err error) {
	rows, err := tx.QueryContext(ctx, `SELECT id, url FROM servers ORDER BY seq`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var one sandbox.Server
		if err := rows.Scan(&one.ID, &one.URL); err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	return all, rows.Err()
}

// withSeq reads the number of a row before the row.
type withSeq struct {
	scanner
	seq *int64
}

func (n withSeq) Scan(dest ...any) error {
	return n.scanner.Scan(append([]any{n.seq}, dest...)...)
}

// takeOver runs a query that returns sequence numbers and rows, and puts them in order.
func (s *Store) takeOver(ctx context.Context, tx *sql.Tx, query, server string) ([]sandbox.Record, error) {
	type row struct {
		seq int64
		sandbox.Record
	}
	rows, err := tx.QueryContext(ctx, query, server)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var found []row
	for rows.Next() {
		var one row
		if one.Record, err = scan(withSeq{rows, &one.seq}); err != nil {
			return nil, err
		}
		found = append(found, one)
	}
	slices.SortFunc(found, func(a, b row) int { return int(a.seq - b.seq) })
	records := make([]sandbox.Record, len(found))
	for i, one := range found {
		records[i] = one.Record
	}
	return records, rows.Err()
}

// Gather makes every living sandbox this server's and returns them, oldest first.
func (s *Store) Gather(ctx context.Context, server string) (all []sandbox.Record, err error) {
	err = s.inTxWithin(ctx, batchTime, func(ctx context.Context, tx *sql.Tx) (err error) {
		if err := s.turn(ctx, tx, serversTurn); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `UPDATE sandboxes SET server = ?1 WHERE state <> 'ended' AND server <> ?1`, server); err != nil {
			return err
		}
		all, err = s.takeOver(ctx, tx, `SELECT seq, `+columns+` FROM sandboxes WHERE server = ?1 AND state <> 'ended'`, server)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read living sandboxes: %w", err)
	}
	return all, nil
}

// Belonging tells of every living sandbox which server it belongs to.
func (s *Store) Belonging(ctx context.Context) (map[string]string, error) {
	all := map[string]string{}
	err := s.queryWithin(ctx, batchTime, `SELECT id, server FROM sandboxes WHERE state <> 'ended'`, nil, func(rows *sql.Rows) error {
		var id, server string
		err := rows.Scan(&id, &server)
		all[id] = server
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read whose the living sandboxes are: %w", err)
	}
	return all, nil
}

// Owner is the server of a living sandbox; fault.NotFound for every other id.
func (s *Store) Owner(ctx context.Context, id string) (server string, err error) {
	err = s.queryRow(ctx, `SELECT server FROM sandboxes WHERE id = ?1 AND state <> 'ended'`, id).Scan(&server)
	if errors.Is(err, sql.ErrNoRows) {
		return "", fault.New(fault.NotFound, "no sandbox %q lives", id)
	}
	if err != nil {
		return "", fmt.Errorf("read whose sandbox %s is: %w", id, err)
	}
	return server, nil
}

// Holder finds the living sandbox of a tenant that has a key or an idempotency key.
func (s *Store) Holder(ctx context.Context, tenant, key, idempotencyKey string) (sandbox.Record, error) {
	r, err := scan(s.queryRow(ctx, `SELECT `+columns+` FROM sandboxes WHERE tenant = ?1 AND state <> 'ended'
		AND (idempotency_key <> '' AND idempotency_key = ?2 OR key <> '' AND key = ?3)
		ORDER BY CASE WHEN idempotency_key <> '' AND idempotency_key = ?2 THEN 0 ELSE 1 END LIMIT 1`, tenant, idempotencyKey, key))
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Record{}, fault.New(fault.NotFound, "no sandbox has that key")
	}
	if err != nil {
		return sandbox.Record{}, fmt.Errorf("find a sandbox by its key: %w", err)
	}
	return r, nil
}

// withinQuota refuses a row that is one too many of its tenant's. All servers count one after the other.
func (s *Store) withinQuota(ctx context.Context, tx *sql.Tx, r sandbox.Record) error {
	if r.MostOfTenant == 0 {
		return nil
	}
	if err := s.turn(ctx, tx, "quota of "+r.Tenant); err != nil {
		return err
	}
	var living int
	err := tx.QueryRowContext(ctx, `SELECT count(*) FROM sandboxes WHERE tenant = ?1 AND state <> 'ended'`, r.Tenant).Scan(&living)
	if err == nil && living > r.MostOfTenant {
		err = fault.New(fault.Exhausted, "%d sandboxes are living, which is the limit; end one first", living-1)
	}
	return err
}

// Secret is the value of that name which all servers of this database have: the first to ask gives it.
func (s *Store) Secret(ctx context.Context, name string, fresh []byte) (value []byte, err error) {
	err = s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `INSERT INTO secrets (name, value) VALUES (?1, ?2) ON CONFLICT (name) DO NOTHING`, name, fresh); err != nil {
			return err
		}
		return tx.QueryRowContext(ctx, `SELECT value FROM secrets WHERE name = ?1`, name).Scan(&value)
	})
	if err != nil {
		return nil, fmt.Errorf("read what the servers share: %w", err)
	}
	return value, nil
}

// SwapSecret replaces a value that is not good any more, unless somebody has; it returns the one that holds.
func (s *Store) SwapSecret(ctx context.Context, name string, old, fresh []byte) ([]byte, error) {
	if _, err := s.change(ctx, `UPDATE secrets SET value = ?1 WHERE name = ?2 AND value = ?3`, fresh, name, old); err != nil {
		return nil, fmt.Errorf("replace what the servers share: %w", err)
	}
	return s.Secret(ctx, name, fresh)
}
