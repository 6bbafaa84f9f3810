package sqlstore

import (
	"context"
	"errors"
	"time"

	"github.com/covehq/cove/internal/fault"
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
	// suspectLimit is for callers while the database has taken no change since a call timed out. A
	// request makes several calls: together they fail within two seconds.
	suspectLimit = 200 * time.Millisecond
)

var errLate = errors.New("the database did not answer in time")

// call gives do a deadline and says in words for the caller why it failed.
//
// The deadline is the database's: a caller who leaves, or whose own deadline is earlier, gets its own
// error.
func (s *Store) call(ctx context.Context, limit time.Duration, do func(context.Context) error) error {
	if limit == noLimit {
		return sqliteFault(do(ctx))
	}
	if limit == s.limit && s.suspect.Load() {
		limit = min(limit, suspectLimit)
	}
	timed, cancel := context.WithTimeoutCause(ctx, limit, errLate)
	defer cancel()
	err := sqliteFault(do(timed))
	if err == nil || !errors.Is(context.Cause(timed), errLate) {
		return err
	}
	s.askUntilAnswered()
	var said *fault.Error
	if errors.As(err, &said) {
		return err
	}
	return fault.Wrap(fault.Unavailable, errors.Join(errLate, err), "the database does not answer: try again later")
}

// How often a database is asked that a call timed out on, and how long it has to answer.
const (
	askEvery = 100 * time.Millisecond
	askLimit = 5 * time.Second
)

// askUntilAnswered marks the database as suspect until it takes a change.
//
// A read is not enough: a database whose log cannot be written answers reads and hangs at every
// commit.
func (s *Store) askUntilAnswered() {
	s.asking.Lock()
	defer s.asking.Unlock()
	if s.life.Err() != nil || !s.suspect.CompareAndSwap(false, true) {
		return
	}
	s.work.Go(func() {
		defer s.suspect.Store(false)
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
