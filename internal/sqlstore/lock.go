package sqlstore

import (
	"context"
	"errors"
	"sync"
	"time"

	sqlite3 "modernc.org/sqlite/lib"
)

// lockLimit is how long SQLite waits for the lock of another process.
const lockLimit = 1500 * time.Millisecond

// lockWatch knows whether another process has SQLite's database locked.
//
// Changes queue for SQLite's one writer. If each waited for the lock in its turn, the sixth would be
// refused after nine seconds. So once SQLite has refused a change, the store refuses those behind it
// too, and later ones after suspectLimit, until SQLite takes a change of the store's own.
type lockWatch struct {
	mu   sync.Mutex
	free context.Context //nolint:containedctx // ends when SQLite refuses a change; its cause is that error
	end  context.CancelCauseFunc
	over chan struct{} // closed when the database is free again
}

func newLockWatch() *lockWatch {
	w := &lockWatch{over: make(chan struct{})}
	w.free, w.end = context.WithCancelCause(context.Background()) // of the database's state, not of a caller
	return w
}

// state returns a context that ends when the database is locked, and a channel that is closed when it
// is free again.
func (w *lockWatch) state() (free context.Context, over <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.free, w.over
}

// begin records the error of a change that waited for the lock in vain. It reports whether the
// database was free before.
func (w *lockWatch) begin(refusal error) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.free.Err() != nil {
		return false
	}
	w.end(refusal)
	return true
}

// finish records that the database is free again.
func (w *lockWatch) finish() {
	w.mu.Lock()
	defer w.mu.Unlock()
	close(w.over)
	next := newLockWatch()
	w.free, w.end, w.over = next.free, next.end, next.over
}

// locked tells the lock of another process from other failures of SQLite.
func locked(err error) bool {
	c := code(err)
	return c == sqlite3.SQLITE_BUSY || c == sqlite3.SQLITE_LOCKED
}

// whileFree runs a change, which ends when another process is found to have the database locked.
func (s *Store) whileFree(ctx context.Context, change func(context.Context) error) error {
	if s.lock == nil { // Postgres
		return change(ctx)
	}
	free, over := s.lock.state()
	if free.Err() != nil {
		wait := time.NewTimer(s.hasty)
		defer wait.Stop()
		select {
		case <-over:
			free, _ = s.lock.state()
		case <-wait.C:
			return context.Cause(free)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	queued, end := context.WithCancelCause(ctx)
	defer end(nil)
	defer context.AfterFunc(free, func() { end(context.Cause(free)) })()
	err := change(queued)
	switch {
	case err == nil:
		return nil
	case free.Err() != nil && errors.Is(err, context.Cause(free)):
		return err
	case locked(err):
		refusal := sqliteFault(err)
		if free.Err() == nil { // else begin has told of this lock, which may be gone by now
			s.watchLock(refusal)
		}
		return refusal
	case free.Err() != nil && errors.Is(err, context.Canceled) && ctx.Err() == nil:
		return context.Cause(free)
	default:
		return err
	}
}

// watchLock asks SQLite for a change until the lock is gone.
func (s *Store) watchLock(refusal error) {
	s.asking.Lock()
	defer s.asking.Unlock()
	if s.life.Err() != nil || !s.lock.begin(refusal) {
		return
	}
	s.work.Go(func() {
		for {
			ctx, cancel := context.WithTimeout(s.life, askLimit)
			_, err := s.w.ExecContext(ctx, putDocumentQuery,
				readyTenant, readyKind, readyID, []byte{}, micros(time.Now()))
			cancel()
			if !locked(err) && !errors.Is(err, context.DeadlineExceeded) {
				s.lock.finish() // or it fails for another reason, which callers are told
				return
			}
			pause := time.NewTimer(askEvery)
			select {
			case <-pause.C:
			case <-s.life.Done():
				pause.Stop()
				return
			}
		}
	})
}
