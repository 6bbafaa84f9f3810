package envd

import (
	"net/http"
	"strconv"
	"sync"
	"time"

	"connectrpc.com/connect"
)

const (
	// keepaliveHeader says after how many idle seconds a stream must say that it lives.
	keepaliveHeader  = "Keepalive-Ping-Interval"
	keepaliveDefault = 90 * time.Second
	keepaliveMost    = 3600 // seconds
)

func keepaliveInterval(header http.Header) time.Duration {
	seconds, err := strconv.Atoi(header.Get(keepaliveHeader))
	if err != nil || seconds <= 0 {
		return keepaliveDefault
	}
	return time.Duration(min(seconds, keepaliveMost)) * time.Second
}

// teller sends the messages of a stream, and a sign of life whenever there was none for a while.
type teller[M any] struct {
	stream *connect.ServerStream[M]
	idle   time.Duration
	alive  *M
	timer  *time.Timer

	mu   sync.Mutex // held for one message
	over bool
}

// newTeller must be closed before its handler returns.
func newTeller[M any](stream *connect.ServerStream[M], header http.Header, alive *M) *teller[M] {
	t := &teller[M]{stream: stream, idle: keepaliveInterval(header), alive: alive}
	t.mu.Lock() // the timer is set before it can ring
	defer t.mu.Unlock()
	t.timer = time.AfterFunc(t.idle, func() { _ = t.send(t.alive) }) // one that fails ends the request by itself
	return t
}

func (t *teller[M]) send(m *M) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return http.ErrHandlerTimeout // a keepalive that came too late
	}
	t.timer.Reset(t.idle)
	return t.stream.Send(m)
}

func (t *teller[M]) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
	t.timer.Stop()
}
