package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/covehq/cove/internal/fault"
)

// readers is how many connections read at the same time.
const readers = 4

// A commit is written to the log and not forced to the disk: a killed server loses nothing, a host that loses power may
// lose the last moments, and so does everything that ran in its sandboxes.
//
// The writer itself carries the log into the database, which does force the disk, only when the log has grown to
// 64 MiB: until then checkpoints does it, so that no create waits for the disk.
//
// What a large transaction changes is held in memory until it is committed, and what one of its statements could undo, too: both
// would otherwise be written to files in the middle of it.
const writePragmas = "&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)&_pragma=wal_autocheckpoint(16384)&_pragma=cache_size(-8192)&_pragma=temp_store(MEMORY)&_txlock=immediate"

// checkpointEvery is how many commits a log holds before it is carried into the database.
const checkpointEvery = 256

// Open opens the SQLite database at path, makes it if there is none and brings its schema up to date.
func Open(path string) (*Store, error) {
	// The file holds who may do what: nobody else on this host reads it. SQLite gives its log the same mode.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	f.Close()
	dsn := fmt.Sprintf("file:%s?_pragma=busy_timeout(%d)", (&url.URL{Path: path}).EscapedPath(), lockLimit.Milliseconds())
	w, err := sql.Open("sqlite", dsn+writePragmas)
	if err != nil {
		return nil, fmt.Errorf("open database %s: %w", path, err)
	}
	w.SetMaxOpenConns(1)
	// Owned by the Store and ended by Close.
	ctx, quit := context.WithCancel(context.Background())
	s := &Store{w: w, tongue: sqliteTongue, doubtFor: defaultDoubt, hasty: suspectLimit, due: make(chan struct{}, 1), life: ctx, quit: quit}
	if err := s.prepareSQLite(ctx, path, dsn); err != nil {
		s.Close()
		return nil, openError(path, err)
	}
	s.lock = newLockWatch()
	s.work.Go(func() { s.checkpoints(ctx) })
	return s, nil
}

// There is one writer, so everybody has their turn already and nobody is in the way.
var sqliteTongue = tongue{
	field: func(column string) string {
		return "(SELECT f.value FROM json_each(" + column + ") AS f WHERE f.key = ?)"
	},
	turn:  func(context.Context, *sql.Tx, string) error { return nil },
	clock: "CAST(unixepoch('subsec') * 1000000 AS INTEGER)",
	again: func(error) bool { return false },
	limit: sqliteLimit,
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

func (s *Store) prepareSQLite(ctx context.Context, path, dsn string) (err error) {
	if err := check(s.w, path); err != nil {
		return err
	}
	if err := s.migrateSQLite(ctx, path); err != nil {
		return err
	}
	if s.r, err = sql.Open("sqlite", dsn+"&_pragma=query_only(1)"); err != nil {
		return err
	}
	s.r.SetMaxOpenConns(readers)
	s.r.SetMaxIdleConns(readers)
	return s.stmts.prepare(ctx, s)
}

// checkUpTo is the size up to which a database is read through when it opens.
const checkUpTo = 64 << 20

// check finds a damaged file before anything is built on it.
func check(db *sql.DB, path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Size() > checkUpTo {
		return nil
	}
	var verdict string
	if err := db.QueryRow("PRAGMA quick_check(1)").Scan(&verdict); err != nil {
		return err
	}
	if verdict != "ok" {
		return fault.New(fault.Invalid, "the database %s is damaged (%s): restore it from a backup, or move it away to start with an empty one", path, verdict)
	}
	return nil
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

// sqliteFault says what a caller can do about a failure of SQLite that an operator has to end.
func sqliteFault(err error) error {
	switch code(err) {
	case sqlite3.SQLITE_FULL:
		return fault.Wrap(fault.DiskFull, err, "the server's disk is full: nothing can be recorded")
	case sqlite3.SQLITE_READONLY:
		return fault.Wrap(fault.Unavailable, err, "the server's database is read-only: nothing can be recorded; try again later")
	case sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN:
		return fault.Wrap(fault.Unavailable, err, "the server's database cannot be read or written: the disk fails; try again later")
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
		return fault.Wrap(fault.Unavailable, errors.Join(errLate, err), "the server's database is locked by another process: try again later")
	}
	return err
}

// conflict reports a unique index that refused a row.
func conflict(err error) bool {
	return code(err) == sqlite3.SQLITE_CONSTRAINT || sqlState(err) == stateUnique
}
