package edge

import (
	"context"
	"net/http"
	"sync"
	"time"
)

// untilStopped serves a request for as long as its sandbox runs, and then cuts its connection: an SDK takes an end that is
// well formed for the end of what it asked for, and one that is not for the end of the sandbox.
func untilStopped(w http.ResponseWriter, r *http.Request, stopped <-chan struct{}, h http.Handler) {
	ctx, cancel := context.WithCancelCause(r.Context())
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-stopped:
			cancel(errStopped)
			stall(w)
		case <-ctx.Done():
		}
	})
	defer func() {
		cancel(nil)
		watch.Wait()
	}()
	h.ServeHTTP(&cuttable{w, stopped}, r.WithContext(ctx))
	if isClosed(stopped) {
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
	if !isClosed(c.stopped) {
		c.ResponseWriter.WriteHeader(status)
	}
}

func (c *cuttable) Write(b []byte) (int, error) {
	if isClosed(c.stopped) {
		return 0, errStopped
	}
	return c.ResponseWriter.Write(b)
}

// Flush is for those who look for an http.Flusher.
func (c *cuttable) Flush() { _ = c.FlushError() }

func (c *cuttable) FlushError() error {
	if isClosed(c.stopped) {
		return errStopped
	}
	return http.NewResponseController(c.ResponseWriter).Flush()
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
