package sqlstore

import (
	"context"
	"errors"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// How long one call of a database may take. Calls of SQLite wait for its one writer, so they have more
// time.
const (
	postgresLimit = 1500 * time.Millisecond
	sqliteLimit   = 10 * time.Second

	// batchTime is for what the server does for itself: it reads or removes many rows at once.
	batchTime = 30 * time.Second
	// noLimit is for migrations, which take as long as the tables are large.
	noLimit time.Duration = 0
	// suspectLimit is for callers while the database is suspect.
	suspectLimit = 500 * time.Millisecond
	// defaultDoubt is how long the database may take for the change that the store asks for when a call
	// timed out. Then it is suspect, and calls that wait for it fail.
	//
	// One call that is late proves nothing on a busy machine. If the database hangs, a request that
	// goes on after its first call still fails within two seconds.
	defaultDoubt = 500 * time.Millisecond
)

// errLate is the cause of a call that reached its deadline, and is in the error of one.
var errLate = sandbox.ErrStoreLate

// call gives do a deadline and says in words for the caller why it failed.
//
// The deadline is the database's: a caller who leaves, or whose own deadline is earlier, gets its own
// error.
func (s *Store) call(ctx context.Context, limit time.Duration, do func(context.Context) error) error {
	if limit == noLimit {
		return sqliteFault(do(ctx))
	}
	if limit == s.limit && s.suspect.Load() {
		limit = min(limit, s.hasty)
	}
	timed, cancel := context.WithTimeoutCause(ctx, limit, errLate)
	defer cancel()
	if doubt := s.doubt.Load(); doubt != nil && limit == s.limit {
		// The call begins while the store asks the database, so it ends when the database is suspect.
		doubted, end := context.WithCancelCause(timed)
		defer end(nil)
		defer context.AfterFunc(*doubt, func() { end(errLate) })()
		timed = doubted
	}
	err := sqliteFault(do(timed))
	if err == nil || !errors.Is(context.Cause(timed), errLate) {
		return err
	}
	s.askUntilAnswered()
	var said *fault.Error
	if errors.As(err, &said) {
		return fault.Wrap(said.Kind, errors.Join(errLate, err), "%s", said.Message)
	}
	return fault.Wrap(fault.Unavailable, errors.Join(errLate, err), "the database does not answer: try again later")
}

// brief is the context of calls that take microseconds in SQLite. Its driver and database/sql start
// a goroutine for each call that can be interrupted, which costs more than the call does.
func (s *Store) brief(ctx context.Context) context.Context {
	if s.lock == nil { // Postgres
		return ctx
	}
	return context.WithoutCancel(ctx)
}

// How often a database is asked that a call timed out on, and how long it has to answer.
const (
	askEvery = 100 * time.Millisecond
	askLimit = 5 * time.Second
)

// askUntilAnswered asks the database for a change until it makes one. If the first answer is late, the
// database is suspect until then.
//
// A read is not enough: a database whose log cannot be written answers reads and hangs at every
// commit.
func (s *Store) askUntilAnswered() {
	s.asking.Lock()
	defer s.asking.Unlock()
	if s.life.Err() != nil || s.doubt.Load() != nil {
		return
	}
	doubt, confirm := context.WithCancel(context.Background())
	s.doubt.Store(&doubt)
	s.work.Go(func() {
		late := time.AfterFunc(s.doubtFor, func() { s.suspect.Store(true); confirm() })
		defer func() {
			if !late.Stop() {
				<-doubt.Done() // so that the mark below is the last one
			}
			s.suspect.Store(false)
			s.doubt.Store(nil)
		}()
		for s.life.Err() == nil {
			ctx, cancel := context.WithTimeout(s.life, askLimit)
			_, err := s.w.ExecContext(ctx, putDocumentQuery,
				readyTenant, readyKind, readyID, []byte{}, micros(time.Now()))
			cancel()
			if err == nil {
				return
			}
			pause := time.NewTimer(askEvery)
			select {
			case <-pause.C:
			case <-s.life.Done():
				pause.Stop()
			}
		}
	})
}
