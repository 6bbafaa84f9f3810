// Package sqlstore keeps sandboxes, their events and API keys in a SQL database. It stores what the domain decided and
// decides nothing itself.
package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/covehq/cove/internal/fault"
)

// Store is one database. It is a sandbox.Store and an auth.KeyStore.
type Store struct {
	w     *sql.DB // one connection: SQLite has one writer at a time, and waiting here costs no busy loop
	r     *sql.DB
	stmts statements

	commits atomic.Int64
	due     chan struct{} // a checkpoint is
	quit    context.CancelFunc
	work    sync.WaitGroup
}

// readers is how many connections read at the same time.
const readers = 4

// A commit is written to the log and not forced to the disk: a killed server loses nothing, a host that loses power may
// lose the last moments, and so does everything that ran in its sandboxes.
//
// The writer itself carries the log into the database, which does force the disk, only when the log has grown to
// 64 MiB: until then checkpoints does it, so that no create waits for the disk.
const writePragmas = "&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)&_pragma=wal_autocheckpoint(16384)&_txlock=immediate"

// checkpointEvery is how many commits a log holds before it is carried into the database.
const checkpointEvery = 256

// Open opens the database at path, makes it if there is none and brings its schema up to date.
func Open(path string) (*Store, error) {
	// The file holds who may do what: nobody else on this host reads it. SQLite gives its log the same mode.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	f.Close()
	dsn := "file:" + (&url.URL{Path: path}).EscapedPath() + "?_pragma=busy_timeout(5000)"
	w, err := sql.Open("sqlite", dsn+writePragmas)
	if err != nil {
		return nil, fmt.Errorf("open database %s: %w", path, err)
	}
	w.SetMaxOpenConns(1)
	// Owned by the Store and ended by Close.
	ctx, quit := context.WithCancel(context.Background())
	s := &Store{w: w, due: make(chan struct{}, 1), quit: quit}
	if err := s.prepare(path, dsn); err != nil {
		s.Close()
		return nil, openError(path, err)
	}
	s.work.Go(func() { s.checkpoints(ctx) })
	return s, nil
}

// checkpoints carries the log into the database beside the writer, which goes on meanwhile; the log begins anew when the
// writer pauses. A checkpoint that fails is made up for by the next.
func (s *Store) checkpoints(ctx context.Context) {
	for {
		select {
		case <-s.due:
			_, _ = s.r.ExecContext(ctx, "PRAGMA wal_checkpoint(PASSIVE)")
		case <-ctx.Done():
			return
		}
	}
}

func (s *Store) prepare(path, dsn string) (err error) {
	if err := check(s.w, path); err != nil {
		return err
	}
	if err := migrate(s.w, path); err != nil {
		return err
	}
	if s.r, err = sql.Open("sqlite", dsn+"&_pragma=query_only(1)"); err != nil {
		return err
	}
	s.r.SetMaxOpenConns(readers)
	s.r.SetMaxIdleConns(readers)
	return s.stmts.prepare(s)
}

// Close lets go of the database.
func (s *Store) Close() error {
	s.quit()
	s.work.Wait()
	errs := []error{s.stmts.close()}
	if s.r != nil {
		errs = append(errs, s.r.Close())
	}
	return errors.Join(append(errs, s.w.Close())...)
}

// openError says what an operator can do about a database that does not open.
func openError(path string, err error) error {
	switch code(err) {
	case sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT:
		return fault.Wrap(fault.Invalid, err, "the database %s is damaged or is not a database: restore it from a backup, or move it away to start with an empty one", path)
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
		return fault.Wrap(fault.Unavailable, err, "the database %s is in use by another process", path)
	}
	var f *fault.Error
	if errors.As(err, &f) {
		return err
	}
	return fmt.Errorf("open database %s: %w", path, err)
}

// code is SQLite's primary result code, or 0.
func code(err error) int {
	var e *sqlite.Error
	if !errors.As(err, &e) {
		return 0
	}
	return e.Code() & 0xff
}

// conflict reports a unique index that refused a row.
func conflict(err error) bool { return code(err) == sqlite3.SQLITE_CONSTRAINT }

// roomless says in plain words that the host's disk is full.
func roomless(err error) error {
	if code(err) == sqlite3.SQLITE_FULL {
		return fault.Wrap(fault.Exhausted, err, "the server's disk is full: nothing can be recorded")
	}
	return err
}

// inTx runs do in one transaction of the writer.
func (s *Store) inTx(ctx context.Context, do func(*sql.Tx) error) (err error) {
	defer func() { err = roomless(err) }()
	tx, err := s.w.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // says only that the commit came first
	if err := do(tx); err != nil {
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

// statements are prepared once: parsing costs more than running.
type statements struct {
	insert, save, event, state, get, touchKey, keyByHash *sql.Stmt
	all                                                  []*sql.Stmt
}

func (st *statements) prepare(s *Store) error {
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
		stmt, err := p.db.Prepare(p.query)
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
