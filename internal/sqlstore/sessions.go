package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/session"
)

const (
	putSessionQuery = `INSERT INTO sessions (id, tenant, key, state, sandbox, used, unsettled, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
		ON CONFLICT (id) DO UPDATE SET state = ?4, sandbox = ?5, used = ?6, unsettled = ?7, body = ?8`
	runColumns    = `id, session, tenant, sandbox, cell, generation, tool_call, code, key, digest, outcome, started, ended, answer, server`
	beginRunQuery = `INSERT INTO session_runs (` + runColumns + `) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)`
	endRunQuery   = `UPDATE session_runs SET outcome = ?2, ended = ?3, answer = ?4 WHERE id = ?1`

	cutRunsQuery = `UPDATE session_runs SET outcome = ?1, ended = ?2
		WHERE outcome = '' AND (?3 = '' OR server = ?3 OR server NOT IN (SELECT id FROM servers)) RETURNING ` + runColumns

	dropAnswersQuery = `UPDATE session_runs SET answer = NULL WHERE session = ?1 AND cell <= ?2 AND answer IS NOT NULL`
	dropRunsQuery    = `DELETE FROM session_runs WHERE session = ?1 AND cell <= ?2 AND outcome <> ''`
	// Those cells whose code and answer, together with all newer ones, are more than is kept.
	dropTextQuery = `UPDATE session_runs SET code = '', answer = NULL WHERE session = ?1 AND (code <> '' OR answer IS NOT NULL) AND cell <= (
		SELECT cell FROM (
			SELECT cell, sum(octet_length(code) + coalesce(octet_length(answer), 0)) OVER (ORDER BY cell DESC) AS bytes FROM session_runs WHERE session = ?1
		) AS newer WHERE bytes > ?2 ORDER BY cell DESC LIMIT 1)`
)

// execer is a transaction, or the writer.
type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// PutSession adds a session or replaces the one of the same id.
func (s *Store) PutSession(ctx context.Context, v session.Session) error {
	err := s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error { return putSession(ctx, tx, v) })
	if conflict(err) {
		return fault.Wrap(fault.Conflict, err, "there is another session %q", v.Key)
	}
	if err != nil {
		return fmt.Errorf("put session: %w", err)
	}
	return nil
}

func putSession(ctx context.Context, tx execer, v session.Session) error {
	body, err := json.Marshal(v)
	if err != nil {
		return err
	}
	used := v.LastUsed
	if used.IsZero() {
		used = v.Created
	}
	unsettled := v.State == session.StateRunning || v.State == session.StateStarting || !v.Told || v.Next != ""
	_, err = tx.ExecContext(ctx, putSessionQuery, v.ID, v.Tenant, v.Key, string(v.State), v.Sandbox, micros(used), unsettled, body)
	return err
}

// Session finds a session by its key.
func (s *Store) Session(ctx context.Context, tenant, key string) (session.Session, error) {
	return s.oneSession(ctx, "tenant = ?1 AND key = ?2", tenant, key)
}

// SessionOfSandbox finds the session whose present or last sandbox this is.
func (s *Store) SessionOfSandbox(ctx context.Context, tenant, sandbox string) (session.Session, error) {
	return s.oneSession(ctx, "tenant = ?1 AND sandbox = ?2", tenant, sandbox)
}

func (s *Store) oneSession(ctx context.Context, where string, args ...any) (session.Session, error) {
	all, err := s.sessions(ctx, s.limit, where+" LIMIT 1", args...)
	if err != nil {
		return session.Session{}, err
	}
	if len(all) == 0 {
		return session.Session{}, fault.New(fault.NotFound, "there is no such session")
	}
	return all[0], nil
}

func (s *Store) sessions(ctx context.Context, limit time.Duration, where string, args ...any) (all []session.Session, err error) {
	err = s.queryWithin(ctx, limit, "SELECT body FROM sessions WHERE "+where, args, func(rows *sql.Rows) error {
		var body []byte
		if err := rows.Scan(&body); err != nil {
			return err
		}
		var v session.Session
		if err := json.Unmarshal(body, &v); err != nil {
			return err
		}
		all = append(all, v)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read sessions: %w", err)
	}
	return all, nil
}

// SessionExists reports whether a session has a row, whatever its state is.
func (s *Store) SessionExists(ctx context.Context, id string) (bool, error) {
	var n int
	if err := s.queryRow(ctx, "SELECT count(*) FROM sessions WHERE id = ?1", id).Scan(&n); err != nil {
		return false, fmt.Errorf("look for session: %w", err)
	}
	return n > 0, nil
}

// Sessions returns a page of a tenant's sessions, those used last first.
func (s *Store) Sessions(ctx context.Context, tenant string, q session.Query) (session.Page, error) {
	where, args := []string{"tenant = ?", "state <> 'starting'"}, []any{tenant}
	if len(q.States) > 0 {
		where = append(where, "state IN (?"+strings.Repeat(", ?", len(q.States)-1)+")")
		for _, state := range q.States {
			args = append(args, string(state))
		}
	}
	if q.Cursor != "" {
		used, id, err := sessionCursor(q.Cursor)
		if err != nil {
			return session.Page{}, err
		}
		where = append(where, "(used, id) < (?, ?)")
		args = append(args, used, id)
	}
	args = append(args, q.Limit+1)
	all, err := s.sessions(ctx, s.limit, strings.Join(where, " AND ")+" ORDER BY used DESC, id DESC LIMIT ?", args...)
	if err != nil {
		return session.Page{}, err
	}
	page := session.Page{Items: all}
	if len(all) > q.Limit {
		page.Items = all[:q.Limit]
		last := page.Items[q.Limit-1]
		used := last.LastUsed
		if used.IsZero() {
			used = last.Created
		}
		page.Next = strconv.FormatInt(micros(used), 36) + "." + last.ID
	}
	return page, nil
}

func sessionCursor(text string) (used int64, id string, err error) {
	number, id, ok := strings.Cut(text, ".")
	used, err = strconv.ParseInt(number, 36, 64)
	if !ok || err != nil || id == "" {
		return 0, "", fault.New(fault.Invalid, "the cursor %.64q was never given out", text)
	}
	return used, id, nil
}

// UnsettledSessions are those that have a sandbox, or an end of one that is not in their log.
func (s *Store) UnsettledSessions(ctx context.Context) ([]session.Session, error) {
	return s.sessions(ctx, batchTime, "unsettled = 1 ORDER BY id")
}

// UnusedSessions are those without a sandbox that were not used since a time.
func (s *Store) UnusedSessions(ctx context.Context, since time.Time) ([]session.Session, error) {
	return s.sessions(ctx, batchTime, "unsettled = 0 AND used < ?1 ORDER BY used, id LIMIT 1000", micros(since))
}

// RemoveSession removes a session with its runs and checkpoints.
func (s *Store) RemoveSession(ctx context.Context, id string) error {
	err := s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		for _, query := range []string{
			"DELETE FROM session_runs WHERE session = ?1", "DELETE FROM session_checkpoints WHERE session = ?1", "DELETE FROM sessions WHERE id = ?1",
		} {
			if _, err := tx.ExecContext(ctx, query, id); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("remove session: %w", err)
	}
	return nil
}

// SessionIDs are the ids of all sessions of all tenants.
func (s *Store) SessionIDs(ctx context.Context) (ids []string, err error) {
	err = s.queryWithin(ctx, batchTime, "SELECT id FROM sessions", nil, func(rows *sql.Rows) error {
		var id string
		err := rows.Scan(&id)
		ids = append(ids, id)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list ids of sessions: %w", err)
	}
	return ids, nil
}

// CountSessions is how many sessions a tenant has.
func (s *Store) CountSessions(ctx context.Context, tenant string) (n int, err error) {
	if err := s.queryRow(ctx, "SELECT count(*) FROM sessions WHERE tenant = ?1", tenant).Scan(&n); err != nil {
		return 0, fmt.Errorf("count sessions: %w", err)
	}
	return n, nil
}

// SessionCensus counts the sessions of all tenants by state.
func (s *Store) SessionCensus(ctx context.Context) (map[string]int, error) {
	census := map[string]int{}
	err := s.query(ctx, "SELECT state, count(*) FROM sessions GROUP BY state", nil, func(rows *sql.Rows) error {
		var state string
		var n int
		err := rows.Scan(&state, &n)
		census[state] = n
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("count sessions: %w", err)
	}
	return census, nil
}

// BeginRun adds a run.
func (s *Store) BeginRun(ctx context.Context, r session.Run) error {
	err := s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, beginRunQuery, r.ID, r.Session, r.Tenant, r.Sandbox, r.Cell, r.Generation, r.ToolCall, r.Code, r.Key, r.Digest,
			r.Outcome, micros(r.Started), micros(r.Ended), r.Answer, r.Server)
		return err
	})
	if conflict(err) {
		return fault.Wrap(fault.Conflict, err, "there is another run with the same id or key")
	}
	if err != nil {
		return fmt.Errorf("begin run: %w", err)
	}
	return nil
}

// EndRun replaces a run and its session at once, and forgets what is not kept of older ones.
func (s *Store) EndRun(ctx context.Context, r session.Run, of session.Session, keep session.Kept) error {
	err := s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, endRunQuery, r.ID, r.Outcome, micros(r.Ended), r.Answer); err != nil {
			return err
		}
		if err := trimRuns(ctx, tx, r, keep); err != nil {
			return err
		}
		return putSession(ctx, tx, of)
	})
	if err != nil {
		return fmt.Errorf("end run: %w", err)
	}
	return nil
}

// How often all runs of a session are looked at: after so many cells, and after an answer of so many bytes.
const (
	trimCells = 64
	trimBytes = 1 << 20
)

func trimRuns(ctx context.Context, tx execer, r session.Run, keep session.Kept) error {
	if _, err := tx.ExecContext(ctx, dropAnswersQuery, r.Session, r.Cell-keep.Answers); err != nil {
		return err
	}
	if r.Cell%trimCells != 0 && len(r.Answer) < trimBytes {
		return nil
	}
	if _, err := tx.ExecContext(ctx, dropRunsQuery, r.Session, r.Cell-keep.Runs); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, dropTextQuery, r.Session, keep.Bytes)
	return err
}

// DropRun forgets a run that never began.
func (s *Store) DropRun(ctx context.Context, id string) error {
	err := s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "DELETE FROM session_runs WHERE id = ?1", id)
		return err
	})
	if err != nil {
		return fmt.Errorf("drop run: %w", err)
	}
	return nil
}

// RunByKey finds a run of a session by its idempotency key.
func (s *Store) RunByKey(ctx context.Context, of string, generation int, key string) (session.Run, error) {
	return s.oneRun(ctx, "session = ?1 AND generation = ?2 AND key = ?3 AND key <> ''", of, generation, key)
}

// RunOf finds a run of a tenant by its id.
func (s *Store) RunOf(ctx context.Context, tenant, id string) (session.Run, error) {
	return s.oneRun(ctx, "tenant = ?1 AND id = ?2", tenant, id)
}

func (s *Store) oneRun(ctx context.Context, where string, args ...any) (r session.Run, err error) {
	r, err = scanRun(s.queryRow(ctx, "SELECT "+runColumns+" FROM session_runs WHERE "+where, args...))
	if errors.Is(err, sql.ErrNoRows) {
		return session.Run{}, fault.New(fault.NotFound, "there is no such run")
	}
	if err != nil {
		return session.Run{}, fmt.Errorf("read run: %w", err)
	}
	return r, nil
}

func scanRun(row interface{ Scan(...any) error }) (r session.Run, err error) {
	var begun, ended int64
	err = row.Scan(&r.ID, &r.Session, &r.Tenant, &r.Sandbox, &r.Cell, &r.Generation, &r.ToolCall, &r.Code, &r.Key, &r.Digest, &r.Outcome, &begun, &ended, &r.Answer, &r.Server)
	r.Started, r.Ended = fromMicros(begun), fromMicros(ended)
	return r, err
}

// CutRuns marks runs without an end as cut off, and tells which they were: the server's own and those
// of servers that are gone. An empty server is the only one, so it cuts all.
func (s *Store) CutRuns(ctx context.Context, server string, at time.Time) (cut []session.Run, err error) {
	err = s.inTxWithin(ctx, batchTime, func(ctx context.Context, tx *sql.Tx) error {
		cut = nil // a transaction may be tried again
		rows, err := tx.QueryContext(ctx, cutRunsQuery, session.OutcomeCut, micros(at), server)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			r, err := scanRun(rows)
			if err != nil {
				return err
			}
			cut = append(cut, r)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("cut runs: %w", err)
	}
	return cut, nil
}

// PutCheckpoint adds a checkpoint.
func (s *Store) PutCheckpoint(ctx context.Context, c session.Checkpoint) error {
	body, err := json.Marshal(c)
	if err != nil {
		return fmt.Errorf("put checkpoint: %w", err)
	}
	err = s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "INSERT INTO session_checkpoints (session, id, created, body) VALUES (?1, ?2, ?3, ?4)", c.Session, c.ID, micros(c.Created), body)
		return err
	})
	if conflict(err) {
		return fault.Wrap(fault.Conflict, err, "there is a checkpoint %q already", c.ID)
	}
	if err != nil {
		return fmt.Errorf("put checkpoint: %w", err)
	}
	return nil
}

// Checkpoints are a session's, oldest first.
func (s *Store) Checkpoints(ctx context.Context, of string) ([]session.Checkpoint, error) {
	return s.checkpointsWhere(ctx, s.limit, "session = ?1", of)
}

// AllCheckpoints are those of all sessions.
func (s *Store) AllCheckpoints(ctx context.Context) ([]session.Checkpoint, error) {
	return s.checkpointsWhere(ctx, batchTime, "1 = 1")
}

func (s *Store) checkpointsWhere(ctx context.Context, limit time.Duration, where string, args ...any) (all []session.Checkpoint, err error) {
	err = s.queryWithin(ctx, limit, "SELECT body FROM session_checkpoints WHERE "+where+" ORDER BY created, id", args, func(rows *sql.Rows) error {
		var body []byte
		if err := rows.Scan(&body); err != nil {
			return err
		}
		var c session.Checkpoint
		if err := json.Unmarshal(body, &c); err != nil {
			return err
		}
		all = append(all, c)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read checkpoints: %w", err)
	}
	return all, nil
}

// RemoveCheckpoint removes a checkpoint.
func (s *Store) RemoveCheckpoint(ctx context.Context, of, id string) error {
	err := s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "DELETE FROM session_checkpoints WHERE session = ?1 AND id = ?2", of, id)
		return err
	})
	if err != nil {
		return fmt.Errorf("remove checkpoint: %w", err)
	}
	return nil
}
