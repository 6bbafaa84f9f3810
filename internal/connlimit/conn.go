package connlimit

import (
	"container/list"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"time"
)

// conn is a counted connection that is cut off when its peer stops reading.
type conn struct {
	net.Conn
	limiter *Limiter
	stall   time.Duration
	share   bool // it counts against the share of its address
	from    netip.Prefix

	// Guarded by the limiter's mu.
	peer          *peer
	counted       bool
	spoke         bool // a request has begun
	requests      int
	inPeer, inAll *list.Element // in the lists of those that may be closed; nil: in none

	mu       sync.Mutex
	deadline time.Time // of writes, as its owner set it; zero: none
}

// stallSteps is how often a write that waits looks whether its peer has taken a byte, in each stall
// time: a write says how much it wrote only when it returns.
const stallSteps = 10

// Write writes p. It cuts the connection if the peer takes nothing for the stall time; a slow
// reader is not cut off.
func (c *conn) Write(p []byte) (n int, err error) {
	if c.stall <= 0 {
		return c.Conn.Write(p)
	}
	progress := time.Now()
	for {
		c.arm()
		wrote, err := c.Conn.Write(p[n:])
		n += wrote
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) || c.expired() {
			return n, err
		}
		if wrote > 0 {
			progress = time.Now()
		} else if time.Since(progress) >= c.stall {
			c.cut()
			return n, err
		}
	}
}

// cut closes the connection and drops what the kernel still has to send. Without the reset, the
// kernel keeps up to 4 MB in FIN-WAIT-1 for as long as the peer answers its probes.
func (c *conn) cut() {
	if tcp, ok := c.Conn.(interface{ SetLinger(sec int) error }); ok {
		_ = tcp.SetLinger(0)
	}
	c.Close() // now: TLS would first wait five seconds to send an alert
}

// arm sets the deadline of the next write: one step, or the owner's own deadline if that is
// earlier.
func (c *conn) arm() {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := time.Now().Add(c.step())
	if !c.deadline.IsZero() && c.deadline.Before(at) {
		at = c.deadline
	}
	c.Conn.SetWriteDeadline(at)
}

func (c *conn) step() time.Duration { return c.stall / stallSteps }

// expired reports whether the owner's own deadline has passed.
func (c *conn) expired() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.deadline.IsZero() && !time.Now().Before(c.deadline)
}

// SetWriteDeadline sets the owner's deadline. A zero time removes it; the stall time still applies.
func (c *conn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = t
	if t.IsZero() && c.stall > 0 {
		t = time.Now().Add(c.step()) // of a write that goes on; the next one has its own
	}
	return c.Conn.SetWriteDeadline(t)
}

// SetDeadline is SetReadDeadline and SetWriteDeadline.
func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// CloseWrite half-closes the connection, where it can be.
func (c *conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// Close gives the connection's room back.
func (c *conn) Close() error {
	c.limiter.release(c)
	return c.Conn.Close()
}

// streamWriter cuts off the reader of one HTTP/2 stream: its connection goes on taking bytes of other streams.
type streamWriter struct {
	http.ResponseWriter
	to    *http.ResponseController
	stall time.Duration
	timer *time.Timer // runs while something is written; nil until the first write

	mu    sync.Mutex // held while reset runs: net/http's writer must not be used after the handler
	armed bool
}

// streamPiece is how much is written at once: a reader must take that much within the stall time.
const streamPiece = 16 << 10

// WriteHeader leaves the peer less time for an answer that refuses the request.
func (w *streamWriter) WriteHeader(status int) {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound:
		w.stall = min(w.stall, refusalTime)
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *streamWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *streamWriter) Write(p []byte) (n int, err error) {
	defer w.disarm()
	for {
		w.arm()
		wrote, err := w.ResponseWriter.Write(p[n:min(len(p), n+streamPiece)])
		n += wrote
		if err != nil || n == len(p) {
			return n, err
		}
	}
}

// FlushError sends what was written.
func (w *streamWriter) FlushError() error {
	w.arm()
	defer w.disarm()
	return w.to.Flush()
}

// Flush is FlushError without the error, as http.Flusher has it.
func (w *streamWriter) Flush() { _ = w.FlushError() }

// arm has the stream reset if the write that follows does not end in time.
func (w *streamWriter) arm() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.armed = true
	if w.timer == nil {
		w.timer = time.AfterFunc(w.stall, w.reset)
		return
	}
	w.timer.Reset(w.stall)
}

// reset ends the stream: a deadline in the past does so at once. It is not set ahead of time, since
// that would also end a stream that has nothing to write.
func (w *streamWriter) reset() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.armed {
		_ = w.to.SetWriteDeadline(time.Unix(1, 0))
	}
}

// disarm returns when no reset is running and none will.
func (w *streamWriter) disarm() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.armed = false
	w.timer.Stop()
}
