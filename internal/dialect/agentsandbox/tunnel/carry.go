package tunnel

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/moby/spdystream"
	"github.com/moby/spdystream/spdy"

	"github.com/covehq/cove/internal/fault"
)

// Bounds of one tunnel. A client has two streams for each connection that it forwards: one for its bytes, one for what is
// said when it fails.
const (
	maxPairs     = 256
	maxHalves    = 64               // pairs of which one stream is missing
	halfFor      = 30 * time.Second // for which they wait for it
	idleFor      = 4 * time.Hour    // without any stream
	dialGrace    = 15 * time.Second
	stallFor     = 2 * time.Minute // for which a port may take nothing of what waits for it
	maxHeaders   = 32
	maxHeaderLen = 1 << 10
	maxBad       = 16       // streams that no client makes, after which it is not listened to any more
	maxControl   = 16 << 10 // bytes of a frame that is no data
	maxFrame     = 64 << 10 // bytes of any: 250 of them may wait, and clients send half of it
)

// begun is a connection of which a reader has taken the beginning already.
type begun struct {
	net.Conn
	first *bufio.Reader
}

func (b *begun) Read(p []byte) (int, error) {
	if b.first != nil && b.first.Buffered() > 0 {
		return b.first.Read(p[:min(len(p), b.first.Buffered())])
	}
	return b.Conn.Read(p)
}

// tunnel is one upgraded connection.
type tunnel struct {
	ctx    context.Context // ends with the connection; it lives no longer
	cancel context.CancelFunc
	dial   Dial
	work   sync.WaitGroup

	accepting sync.Mutex // a stream that was answered is added before the next one is: clients count on their order

	mu    sync.Mutex
	pairs map[string]*pair
	whole int // pairs of which both streams are there
	bad   int // streams that were neither of a pair
	over  bool
}

// pair is one connection that is forwarded.
type pair struct {
	port      int
	data, err *spdystream.Stream
	timer     *time.Timer // while one is missing
}

// carry forwards connections until the client leaves, a port has taken nothing for too long, or ctx is done.
func carry(ctx context.Context, conn net.Conn, dial Dial, stall time.Duration) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	incoming := &frames{Conn: conn}
	spdyConn, err := spdystream.NewConnectionWithOptions(incoming, true, spdy.WithMaxHeaderCount(maxHeaders),
		spdy.WithMaxHeaderFieldSize(maxHeaderLen), spdy.WithMaxControlFramePayloadSize(maxControl))
	if err != nil {
		return
	}
	t := &tunnel{ctx: ctx, cancel: cancel, dial: dial, pairs: map[string]*pair{}}
	spdyConn.SetIdleTimeout(idleFor)
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	// Serve returns once every frame is with its stream. A port that takes nothing more would hold it up for ever, and so would a
	// stream that nobody reads: those are let go as soon as the client has left.
	t.work.Go(func() {
		<-spdyConn.CloseChan()
		cancel()
		t.letGo()
	})
	t.work.Go(func() { t.watch(incoming, stall) })
	spdyConn.Serve(t.accept)
	t.work.Wait()
}

// watch ends a tunnel that nobody reads from. While a port takes nothing and all room before it is used, nothing is read, and so
// not even that the client has left: it would be kept for ever.
func (t *tunnel) watch(incoming *frames, stall time.Duration) {
	ticker := time.NewTicker(stall / 2)
	defer ticker.Stop()
	for {
		select {
		case <-t.ctx.Done():
			return
		case <-ticker.C:
			if incoming.unread() > stall {
				t.cancel()
				return
			}
		}
	}
}

// letGo gives up the pairs that are not whole, and takes no others.
func (t *tunnel) letGo() {
	t.mu.Lock()
	halves := t.pairs
	t.pairs, t.over = nil, true
	t.mu.Unlock()
	for _, p := range halves {
		p.timer.Stop()
		p.reset()
	}
}

// reset ends the streams that are there. A stream that was closed is kept until its client has closed it too; one that was reset
// is not.
func (p *pair) reset() {
	for _, s := range []*spdystream.Stream{p.data, p.err} {
		if s != nil {
			_ = s.Reset() // its client may have gone
		}
	}
}

// accept takes a stream that the client has made.
func (t *tunnel) accept(s *spdystream.Stream) {
	h := s.Headers()
	port, err := parsePort(h.Get("port"))
	kind := h.Get("streamType")
	if err != nil || kind != "data" && kind != "error" {
		_ = s.Reset() // to refuse it would keep it, with all of its headers
		t.count()
		return
	}
	t.accepting.Lock()
	defer t.accepting.Unlock()
	if err := s.SendReply(http.Header{}, false); err != nil {
		return
	}
	if !t.add(requestOf(h, s), kind, port, s) {
		_ = s.Reset()
	}
}

// count counts a stream that is neither of a pair. Whoever goes on to send such things is no client.
func (t *tunnel) count() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.bad++; t.bad > maxBad {
		t.cancel()
	}
}

// requestOf names the pair that a stream belongs to. Clients of old say it by the number of the stream: that of the bytes
// comes right after that of failures.
func requestOf(h http.Header, s *spdystream.Stream) string {
	if id := h.Get("requestID"); id != "" {
		return id
	}
	id := s.Identifier()
	if h.Get("streamType") == "data" {
		id -= 2
	}
	return "#" + strconv.FormatUint(uint64(id), 10)
}

func parsePort(text string) (int, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, fault.New(fault.Invalid, "a port is a number from 1 to 65535")
	}
	return int(n), nil
}

// add puts a stream to the other of its pair, and forwards when both are there.
func (t *tunnel) add(id, kind string, port int, s *spdystream.Stream) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.pairs[id]
	switch {
	case t.over:
		return false
	case p == nil && (len(t.pairs) >= maxHalves || t.whole >= maxPairs):
		return false
	case p == nil:
		p = &pair{port: port}
		t.pairs[id] = p
		p.timer = time.AfterFunc(halfFor, func() { t.abandon(id, p) })
	case p.port != port || kind == "data" && p.data != nil || kind == "error" && p.err != nil:
		return false
	}
	if kind == "data" {
		p.data = s
	} else {
		p.err = s
	}
	if p.data == nil || p.err == nil {
		return true
	}
	p.timer.Stop()
	delete(t.pairs, id)
	t.whole++
	t.work.Go(func() { t.forward(p) })
	return true
}

// abandon gives up a pair whose other stream does not come.
func (t *tunnel) abandon(id string, p *pair) {
	t.mu.Lock()
	mine := t.pairs[id] == p
	if mine {
		delete(t.pairs, id)
	}
	t.mu.Unlock()
	if mine {
		p.reset()
	}
}

// forward connects one pair to its port, and says on its other stream when that fails.
func (t *tunnel) forward(p *pair) {
	defer func() {
		t.mu.Lock()
		t.whole--
		t.mu.Unlock()
	}()
	defer p.reset() // what the client still sends would hold up its other connections
	conn, err := t.connect(p.port)
	if err != nil {
		_, _ = p.err.Write([]byte(fault.Message(err))) // a client that has gone hears nothing
		_ = p.err.Close()
		return
	}
	defer conn.Close()
	stop := context.AfterFunc(t.ctx, func() { conn.Close() })
	defer stop()
	exchange(p.data, conn)
	_ = p.err.Close() // nothing was said: it went well
}

func (t *tunnel) connect(port int) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(t.ctx, dialGrace)
	defer cancel()
	return t.dial(ctx, port)
}

// exchange copies both ways. The client may be done before the port is and still listens; when the port is done, so is all: a
// client has no use for a connection that does not answer any more.
func exchange(s *spdystream.Stream, conn net.Conn) {
	var in sync.WaitGroup
	in.Go(func() {
		if _, err := io.Copy(conn, s); err != nil {
			_ = s.Reset() // the port takes no more: whatever comes is thrown away
			return
		}
		closeWrite(conn)
	})
	_, _ = io.Copy(s, conn) // either end may leave at any time
	_ = s.Close()
	_ = conn.Close()
	_ = s.Reset() // ends the other direction, which nobody listens to now
	in.Wait()
}

// closeWrite says that no more bytes come. A connection that cannot be told so is closed: whoever waits for the end of a
// request would wait for ever.
func closeWrite(conn net.Conn) {
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite() // it may have gone
		return
	}
	_ = conn.Close()
}
