package rawport

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// ErrStopped is why a request was cut.
var ErrStopped = fault.New(fault.Gone, "the sandbox has stopped")

// UntilStopped serves a request for as long as its sandbox runs, and then cuts its connection: an SDK takes an end that is
// well formed for the end of what it asked for, and one that is not for the end of the sandbox.
func UntilStopped(w http.ResponseWriter, r *http.Request, stopped <-chan struct{}, h http.Handler) {
	ctx, cancel := context.WithCancelCause(r.Context())
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-stopped:
			cancel(ErrStopped)
			stall(w)
		case <-ctx.Done():
		}
	})
	defer func() {
		cancel(nil)
		watch.Wait()
	}()
	h.ServeHTTP(&cuttable{w, stopped}, r.WithContext(ctx))
	if IsClosed(stopped) {
		panic(http.ErrAbortHandler)
	}
}

// stall makes a handler return that waits for its client.
func stall(w http.ResponseWriter) {
	past, c := time.Unix(1, 0), http.NewResponseController(w)
	_ = c.SetReadDeadline(past) // a writer without deadlines has no connection that could be waited for
	_ = c.SetWriteDeadline(past)
}

// cuttable is an answer to which nothing can be added once the sandbox has stopped.
type cuttable struct {
	http.ResponseWriter
	stopped <-chan struct{}
}

func (c *cuttable) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func (c *cuttable) WriteHeader(status int) {
	if !IsClosed(c.stopped) {
		c.ResponseWriter.WriteHeader(status)
	}
}

func (c *cuttable) Write(b []byte) (int, error) {
	if IsClosed(c.stopped) {
		return 0, ErrStopped
	}
	return c.ResponseWriter.Write(b)
}

// Flush is for those who look for an http.Flusher.
func (c *cuttable) Flush() { _ = c.FlushError() }

func (c *cuttable) FlushError() error {
	if IsClosed(c.stopped) {
		return ErrStopped
	}
	return http.NewResponseController(c.ResponseWriter).Flush()
}

// IsClosed tells whether a channel that nobody sends on is closed.
func IsClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
