package tunnel_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/moby/spdystream/spdy"

	"github.com/covehq/cove/internal/dialect/agentsandbox/tunnel"
	"github.com/covehq/cove/internal/fault"
)

// hostile is a client that writes frames as it likes.
type hostile struct {
	*spdy.Framer
	t      *testing.T
	conn   net.Conn
	served chan struct{} // closed when the tunnel has ended
}

func newHostile(t *testing.T, to tunnel.Dial) *hostile {
	t.Helper()
	h := &hostile{t: t, served: make(chan struct{})}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(h.served)
		tunnel.Serve(w, r, to)
	}))
	t.Cleanup(s.Close)
	h.conn = dial(t, s.Listener.Addr().String())
	fmt.Fprint(h.conn, "POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: portforward.k8s.io\r\n\r\n")
	from := bufio.NewReader(h.conn)
	resp, err := http.ReadResponse(from, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("it was not upgraded: %d", resp.StatusCode)
	}
	if h.Framer, err = spdy.NewFramer(h.conn, from); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *hostile) send(f spdy.Frame) {
	h.t.Helper()
	if err := h.WriteFrame(f); err != nil {
		h.t.Fatal(err)
	}
}

// open begins a stream.
func (h *hostile) open(id spdy.StreamId, kind, port, request string) {
	h.t.Helper()
	h.send(&spdy.SynStreamFrame{StreamId: id, Headers: headers(kind, port, request)})
}

// until reads frames up to one that is looked for.
func (h *hostile) until(what string, found func(spdy.Frame) bool) {
	h.t.Helper()
	for {
		f, err := h.ReadFrame()
		if err != nil {
			h.t.Fatalf("%s: %v", what, err)
		}
		if found(f) {
			return
		}
	}
}

func reset(id spdy.StreamId) func(spdy.Frame) bool {
	return func(f spdy.Frame) bool {
		r, ok := f.(*spdy.RstStreamFrame)
		return ok && r.StreamId == id
	}
}

// last is the end of what the server says on a stream.
func last(id spdy.StreamId) func(spdy.Frame) bool {
	return func(f spdy.Frame) bool {
		d, ok := f.(*spdy.DataFrame)
		return ok && d.StreamId == id && d.Flags&spdy.DataFlagFin != 0
	}
}

func nowhere(context.Context, int) (net.Conn, error) {
	return nil, fault.New(fault.Unavailable, "nothing listens there")
}

// TestEndedStreamsAreForgotten writes on streams that are over for the server. One that is still kept has nobody who reads it: what
// comes for it holds up every later stream whose number has the same rest when divided by five.
func TestEndedStreamsAreForgotten(t *testing.T) {
	h := newHostile(t, nowhere)
	h.open(1, "data", "none", "1")
	h.until("a stream without a port is reset", reset(1))
	h.send(&spdy.DataFrame{StreamId: 1, Data: []byte("x")})

	h.open(11, "error", "80", "1")
	h.open(13, "data", "80", "1")
	h.until("the first pair hears why it fails", last(11))
	h.until("and its other stream is reset", reset(13))
	h.send(&spdy.DataFrame{StreamId: 11, Data: []byte("x")})

	h.open(21, "error", "80", "2")
	h.open(23, "data", "80", "2")
	h.until("the second pair hears it too", last(21))
}

func TestTooManyBadStreams(t *testing.T) {
	h := newHostile(t, nowhere)
	for i := range spdy.StreamId(16) {
		h.open(1+2*i, "data", "none", "1")
		h.until("it is reset", reset(1+2*i))
	}
	h.open(101, "error", "80", "1")
	h.open(103, "data", "80", "1")
	h.until("as many as that are borne", last(101))
	h.open(105, "data", "none", "1")
	wait(t, h.served, "one more ends the tunnel")
}

// TestUnreadStreams has a client that writes where nobody reads, and leaves: nothing of it may stay.
func TestUnreadStreams(t *testing.T) {
	echo := listen(t, func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
	for name, open := range map[string]func(h *hostile){
		"on a half": func(h *hostile) {
			h.open(1, "error", "80", "1")
		},
		"on the failures of a whole": func(h *hostile) {
			h.open(1, "error", "80", "1")
			h.open(3, "data", "80", "1")
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHostile(t, dialTo(echo))
			open(h)
			h.send(&spdy.DataFrame{StreamId: 1, Data: []byte("x")})
			h.send(&spdy.PingFrame{Id: 1})
			h.until("the ping comes back", func(f spdy.Frame) bool { _, ok := f.(*spdy.PingFrame); return ok })
			h.conn.Close()
			wait(t, h.served, "the tunnel has ended")
		})
	}
}

// TestFrames sends frames of which the server must not believe a word.
func TestFrames(t *testing.T) {
	never := func(context.Context, int) (net.Conn, error) { return nil, errors.New("never") }
	head := func(kind, length int) []byte {
		return []byte{0x80, 3, 0, byte(kind), 0, byte(length >> 16), byte(length >> 8), byte(length)}
	}
	stream := func(number, parent byte) []byte {
		return append(head(1, 100), 0, 0, 0, number, 0, 0, 0, parent)
	}
	for name, sent := range map[string][]byte{
		"data of more than 64 KiB":        {0, 0, 0, 1, 0, 1, 0, 1},
		"data of all that can be said":    {0, 0, 0, 1, 0, 0xff, 0xff, 0xff},
		"a ping without a number":         head(6, 0),
		"a ping of more":                  head(6, 5),
		"a reset without a cause":         head(3, 4),
		"settings that hide other frames": append(head(4, 1000), 0, 0, 0, 0),
		"a new stream without a number":   head(1, 9),
		"a new stream with too much":      head(1, 16<<10+1),
		"a new stream with a parent":      stream(3, 1),
		"a number that is too great":      append(head(1, 100), 0x80, 0, 0, 1, 0, 0, 0, 0),
		"an answer without a number":      head(2, 3),
		"headers without a number":        head(8, 3),
		"a kind that nobody knows":        head(99, 8),
	} {
		t.Run(name+" is the end", func(t *testing.T) {
			h := newHostile(t, never)
			h.send(&spdy.PingFrame{Id: 1})
			for _, b := range sent { // heads may come in parts
				if _, err := h.conn.Write([]byte{b}); err != nil {
					break // it has ended before the last one
				}
			}
			wait(t, h.served, "the tunnel has ended")
		})
	}
	t.Run("a number that was there before is the end", func(t *testing.T) {
		h := newHostile(t, never)
		h.open(5, "error", "80", "1")
		_ = h.WriteFrame(&spdy.SynStreamFrame{StreamId: 5, Headers: headers("error", "80", "2")}) // it may end before all is written
		wait(t, h.served, "the tunnel has ended")
	})
	t.Run("as much data as may be is taken", func(t *testing.T) {
		h := newHostile(t, never)
		h.send(&spdy.DataFrame{StreamId: 1, Data: make([]byte, 64<<10)})
		h.send(&spdy.PingFrame{Id: 1})
		h.until("the ping comes back", func(f spdy.Frame) bool { _, ok := f.(*spdy.PingFrame); return ok })
	})
}
