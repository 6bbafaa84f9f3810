// Package sqlstore keeps sandboxes, their events and API keys in a SQL database: SQLite for one server, Postgres for several
// that share their state. It stores what the domain decided and decides nothing itself.
package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// Store is one database. It is a sandbox.Store and an auth.KeyStore.
//
// Queries are written once, with ?1 or ? for their arguments. What the databases spell differently is in a tongue.
type Store struct {
	w     *sql.DB // SQLite: one connection, since it has one writer at a time and waiting here costs no busy loop
	r     *sql.DB
	stmts statements
	claim claim
	tongue

	commits atomic.Int64
	due     chan struct{}   // a checkpoint of SQLite's log is; nil: nobody makes any
	life    context.Context //nolint:containedctx // of what runs beside the callers, until Close
	quit    context.CancelFunc
	lock    *lockWatch  // of SQLite
	suspect atomic.Bool // a call timed out, and so did the change that the store asked for after it
	// doubt is set while the store asks the database because a call timed out; it is done when the
	// database is suspect.
	doubt    atomic.Pointer[context.Context]
	doubtFor time.Duration // how long the first answer may take
	hasty    time.Duration // limit of a caller's call while the database is suspect
	asking   sync.Mutex    // held while work begins or the store closes
	work     sync.WaitGroup
}

// A tongue is what a database says in its own words.
type tongue struct {
	// field is the text of a name in a column of JSON; NULL where it has none. The name is an argument.
	field func(column string) string
	// turn waits until nobody else is in a transaction that took the same turn. It ends with the transaction.
	turn func(ctx context.Context, tx *sql.Tx, name string) error
	// clock is the database's own time, in microseconds: what several servers compare is taken from one clock.
	clock string
	// again tells that a transaction came to nothing only because of another one.
	again func(error) bool
	// limit is how long one call may take. See call.
	limit time.Duration
}

// Close lets go of the database.
func (s *Store) Close() error {
	s.asking.Lock()
	s.quit()
	s.asking.Unlock()
	s.work.Wait()
	errs := []error{s.stmts.close(), s.claim.close()}
	if s.r != nil {
		errs = append(errs, s.r.Close())
	}
	return errors.Join(append(errs, s.w.Close())...)
}

// attempts is how often a transaction is tried that others were in the way of.
const attempts = 6

// inTx runs do in one transaction of the writer. It may run do more than once, each time in a new transaction.
func (s *Store) inTx(ctx context.Context, do func(context.Context, *sql.Tx) error) error {
	return s.inTxWithin(ctx, s.limit, do)
}

// inTxWithin is inTx with a limit of its own for each attempt.
func (s *Store) inTxWithin(ctx context.Context, limit time.Duration, do func(context.Context, *sql.Tx) error) (err error) {
	for n := range attempts {
		err = s.call(ctx, limit, func(ctx context.Context) error {
			return s.whileFree(ctx, func(ctx context.Context) error { return s.once(ctx, do) })
		})
		if err == nil || !s.again(err) || wait(ctx, n) != nil {
			return err
		}
	}
	return busy(err)
}

// wait lets others finish, a little longer each time.
func wait(ctx context.Context, n int) error {
	pause := time.NewTimer(time.Millisecond<<n + rand.N(5*time.Millisecond))
	defer pause.Stop()
	select {
	case <-pause.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *Store) once(ctx context.Context, do func(context.Context, *sql.Tx) error) error {
	tx, release, err := s.begin(ctx)
	if err != nil {
		return err
	}
	defer release()
	defer func() { _ = tx.Rollback() }() // says only that the commit came first
	if err := do(ctx, tx); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	if s.commits.Add(1)%checkpointEvery == 0 {
		select {
		case s.due <- struct{}{}:
		default:
		}
	}
	return nil
}

// begin waits for a connection and starts a transaction; release gives the connection back.
//
// A caller of SQLite can leave while it waits for the one writer. What comes then takes
// microseconds, or lockLimit at most.
func (s *Store) begin(ctx context.Context) (tx *sql.Tx, release func(), err error) {
	if s.lock == nil { // Postgres
		tx, err = s.w.BeginTx(ctx, nil)
		return tx, func() {}, err
	}
	conn, err := s.w.Conn(ctx)
	if err != nil {
		return nil, nil, err
	}
	release = func() { conn.Close() }
	if free, _ := s.lock.state(); free.Err() != nil { // found locked while this caller waited
		release()
		return nil, nil, context.Cause(free)
	}
	tx, err = conn.BeginTx(s.brief(ctx), nil)
	if err == nil {
		return tx, release, nil
	}
	if locked(err) {
		s.watchLock(sqliteFault(err)) // before the next caller has the writer
	}
	release()
	return nil, nil, err
}

// change is one statement in a transaction of its own; it tells how many rows it changed.
func (s *Store) change(ctx context.Context, query string, args ...any) (rows int, err error) {
	err = s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		result, err := tx.ExecContext(ctx, query, args...)
		if err != nil {
			return err
		}
		n, err := result.RowsAffected()
		rows = int(n)
		return err
	})
	return rows, err
}

// query calls each for every row.
func (s *Store) query(ctx context.Context, query string, args []any, each func(*sql.Rows) error) error {
	return s.queryWithin(ctx, s.limit, query, args, each)
}

// queryWithin is query with a limit of its own.
func (s *Store) queryWithin(ctx context.Context, limit time.Duration, query string, args []any, each func(*sql.Rows) error) error {
	return s.call(ctx, limit, func(ctx context.Context) error {
		rows, err := s.r.QueryContext(ctx, query, args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			if err := each(rows); err != nil {
				return err
			}
		}
		return rows.Err()
	})
}

// queryRow is a query for one row. It runs when the row is scanned.
func (s *Store) queryRow(ctx context.Context, query string, args ...any) scanner {
	return lazyRow{s, ctx, func(ctx context.Context) *sql.Row { return s.r.QueryRowContext(ctx, query, args...) }}
}

// preparedRow is queryRow for a prepared statement.
func (s *Store) preparedRow(ctx context.Context, stmt *sql.Stmt, args ...any) scanner {
	return lazyRow{s, ctx, func(ctx context.Context) *sql.Row { return stmt.QueryRowContext(ctx, args...) }}
}

// A lazyRow asks the database when it is scanned, so that its deadline ends with the scan.
type lazyRow struct {
	store *Store
	ctx   context.Context //nolint:containedctx // the caller's, who scans the row at once
	query func(context.Context) *sql.Row
}

func (r lazyRow) Scan(dest ...any) error {
	return r.store.call(r.ctx, r.store.limit, func(ctx context.Context) error { return r.query(ctx).Scan(dest...) })
}

type scanner interface{ Scan(dest ...any) error }

// statements are prepared once: parsing costs more than running.
type statements struct {
	insert, save, event, state, get, touchKey, keyByHash *sql.Stmt
	all                                                  []*sql.Stmt
}

func (st *statements) prepare(ctx context.Context, s *Store) error {
	for _, p := range []struct {
		db    *sql.DB
		query string
		stmt  **sql.Stmt
	}{
		{s.w, insertQuery, &st.insert},
		{s.w, saveQuery, &st.save},
		{s.w, eventQuery, &st.event},
		{s.w, stateQuery, &st.state},
		{s.w, touchKeyQuery, &st.touchKey},
		{s.r, getQuery, &st.get},
		{s.r, keyByHashQuery, &st.keyByHash},
	} {
		stmt, err := p.db.PrepareContext(ctx, p.query)
		if err != nil {
			return err
		}
		*p.stmt = stmt
		st.all = append(st.all, stmt)
	}
	return nil
}

func (st *statements) close() error {
	var errs []error
	for _, stmt := range st.all {
		errs = append(errs, stmt.Close())
	}
	return errors.Join(errs...)
}

// micros and fromMicros carry a time in a column; the zero time is 0.
func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

func fromMicros(us int64) time.Time {
	if us == 0 {
		return time.Time{}
	}
	return time.UnixMicro(us).UTC()
}
