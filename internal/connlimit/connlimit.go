// Package connlimit limits the connections of a server: in total, for each address, and how long a
// peer may stop reading. It knows HTTP but no dialect and no tenant.
package connlimit

import (
	"container/list"
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Config says how many connections there may be. Zero is no bound.
type Config struct {
	Total      int            // of all addresses
	PerAddress int            // of one IPv4 address, or of one /64 of IPv6
	Trusted    []netip.Prefix // proxies: each stands for many clients and has no share of its own
	Stall      time.Duration  // a peer that reads nothing for so long is cut off

	// TotalStreams and StreamsPerAddress bound the requests that are open at the same time over
	// HTTP/2. Over HTTP/1 a connection has one at most.
	TotalStreams, StreamsPerAddress int
}

// refusalTime is how long a peer may take to read an answer that refuses it, over HTTP/2. An open
// stream takes some 17 KB, and a client needs no key for such a stream.
const refusalTime = 10 * time.Second

// warnEvery keeps a flood of connections from becoming a flood of log lines.
const warnEvery = time.Minute

// Limiter bounds the connections of all listeners together. A connection is silent until its first
// request, busy while a request is answered, and idle between two requests. If there is no room for a
// new connection, it closes the one that has been silent longest, or else idle longest. It never
// closes a busy one: then it refuses the new connection.
type Limiter struct {
	cfg Config
	log *slog.Logger

	mu     sync.Mutex
	total  int
	spare  evictable              // of all addresses
	peers  map[netip.Prefix]*peer // that have a connection
	open   int                    // streams
	warned time.Time
	closed int // connections and streams, closed or refused for want of room since warned
}

// evictable lists connections that may be closed to make room, the oldest first.
type evictable struct{ silent, idle list.List }

func (e *evictable) oldest() *conn {
	for _, l := range []*list.List{&e.silent, &e.idle} {
		if e := l.Front(); e != nil {
			return e.Value.(*conn)
		}
	}
	return nil
}

// peer is an address with a connection.
type peer struct {
	n     int
	open  int // streams
	spare evictable
}

// New makes a limiter.
func New(cfg Config, log *slog.Logger) *Limiter {
	return &Limiter{cfg: cfg, log: log, peers: map[netip.Prefix]*peer{}}
}

// Listener bounds the connections of l.
func (l *Limiter) Listener(of net.Listener) net.Listener {
	return &listener{Listener: of, limiter: l, share: true}
}

// TotalOnly bounds the connections of a listener by the total alone, not by address.
func (l *Limiter) TotalOnly(of net.Listener) net.Listener { return &listener{Listener: of, limiter: l} }

type listener struct {
	net.Listener
	limiter *Limiter
	share   bool
}

// Accept returns the next connection for which there is room.
func (l *listener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: raw, limiter: l.limiter, share: l.share, stall: l.limiter.cfg.Stall}
		victim, ok := l.limiter.admit(c)
		if victim != nil {
			victim.Close()
		}
		if ok {
			return c, nil
		}
		raw.Close()
	}
}

// remoteIP returns the peer's address, or the zero Addr if the connection has none.
func remoteIP(c net.Conn) netip.Addr {
	tcp, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	return tcp.AddrPort().Addr().Unmap().WithZone("")
}

// sharePrefix returns the addresses that have one share together: an IPv4 address, or the /64 of an
// IPv6 address, because an IPv6 host chooses its addresses within one.
func sharePrefix(ip netip.Addr) netip.Prefix {
	bits := ip.BitLen()
	if ip.Is6() {
		bits = 64
	}
	p, _ := ip.Prefix(bits) // bits always fits the address
	return p
}

func (l *Limiter) trusts(ip netip.Addr) bool {
	return slices.ContainsFunc(l.cfg.Trusted, func(t netip.Prefix) bool { return t.Contains(ip) })
}

// admit counts a connection, and says which one it takes the place of.
func (l *Limiter) admit(c *conn) (victim *conn, ok bool) {
	ip := remoteIP(c.Conn)
	c.from = sharePrefix(ip)
	c.share = c.share && !l.trusts(ip)
	share := c.share && l.cfg.PerAddress > 0
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.peers[c.from]
	if p == nil {
		p = &peer{}
	}
	switch {
	case share && p.n >= l.cfg.PerAddress:
		victim = p.spare.oldest()
	case l.cfg.Total > 0 && l.total >= l.cfg.Total:
		victim = l.spare.oldest()
	default:
		l.count(p, c)
		return nil, true
	}
	l.warn(c)
	if victim == nil {
		return nil, false
	}
	l.forget(victim)
	l.count(p, c)
	return victim, true
}

// count enters a connection as silent. The caller holds mu.
func (l *Limiter) count(p *peer, c *conn) {
	l.peers[c.from] = p
	c.peer, c.counted = p, true
	p.n++
	l.total++
	c.inPeer, c.inAll = p.spare.silent.PushBack(c), l.spare.silent.PushBack(c)
}

// warn logs that there was no room. The caller holds mu.
func (l *Limiter) warn(c *conn) {
	l.closed++
	if time.Since(l.warned) < warnEvery {
		return
	}
	l.log.Warn("no room for a connection or a stream: raise server.max_connections or server.max_connections_per_address, or name the proxy in server.trusted_proxies",
		"address", c.from, "connections", l.total, "closed", l.closed)
	l.warned, l.closed = time.Now(), 0
}

// forget takes a connection out of the count. The caller holds mu.
func (l *Limiter) forget(c *conn) {
	if !c.counted {
		return
	}
	l.unlist(c)
	c.counted = false
	l.total--
	c.peer.n--
	l.drop(c)
}

// drop forgets an address that has neither a connection nor a stream. The caller holds mu.
func (l *Limiter) drop(c *conn) {
	if c.peer.n == 0 && c.peer.open == 0 && l.peers[c.from] == c.peer {
		delete(l.peers, c.from)
	}
}

// openStream counts a request over HTTP/2, unless there are too many.
func (l *Limiter) openStream(c *conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	full := l.cfg.TotalStreams > 0 && l.open >= l.cfg.TotalStreams
	share := c.share && l.cfg.StreamsPerAddress > 0
	if full || share && c.peer.open >= l.cfg.StreamsPerAddress {
		l.warn(c)
		return false
	}
	l.open++
	c.peer.open++
	return true
}

// closeStream counts the end of a request that openStream has counted.
func (l *Limiter) closeStream(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	c.peer.open--
	l.drop(c)
}

// unlist takes a connection from the lists of those that may be closed. The caller holds mu.
func (l *Limiter) unlist(c *conn) {
	if c.inAll == nil {
		return
	}
	if c.spoke {
		l.spare.idle.Remove(c.inAll)
		c.peer.spare.idle.Remove(c.inPeer)
	} else {
		l.spare.silent.Remove(c.inAll)
		c.peer.spare.silent.Remove(c.inPeer)
	}
	c.inAll, c.inPeer = nil, nil
}

// begin counts a request on a connection.
func (l *Limiter) begin(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unlist(c)
	c.spoke = true
	c.requests++
}

// end counts its end. A connection without a request is idle.
func (l *Limiter) end(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.requests--; c.requests == 0 && c.counted {
		c.inPeer, c.inAll = c.peer.spare.idle.PushBack(c), l.spare.idle.PushBack(c)
	}
}

func (l *Limiter) release(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget(c)
}

type connKey struct{}

// ConnContext is for http.Server: it remembers the connection of each request.
func (l *Limiter) ConnContext(ctx context.Context, c net.Conn) context.Context {
	if own := unwrap(c); own != nil {
		return context.WithValue(ctx, connKey{}, own)
	}
	return ctx
}

// ConnState is for http.Server: a connection that was taken over by a handler is busy until it is closed.
func (l *Limiter) ConnState(c net.Conn, state http.ConnState) {
	if own := unwrap(c); own != nil && state == http.StateHijacked {
		l.begin(own)
	}
}

// Handler counts the requests that h answers.
func (l *Limiter) Handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, ok := r.Context().Value(connKey{}).(*conn)
		if !ok {
			h.ServeHTTP(w, r)
			return
		}
		l.begin(c)
		defer l.end(c)
		if r.ProtoMajor == 1 {
			h.ServeHTTP(w, r)
			return
		}
		if !l.openStream(c) {
			// Without a body the answer does not wait for the peer's window.
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusServiceUnavailable)
			_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(refusalTime))
			return
		}
		defer l.closeStream(c)
		l.serveStream(h, w, r)
	})
}

// serveStream answers a request over HTTP/2, which resets its stream if the peer does not read.
func (l *Limiter) serveStream(h http.Handler, w http.ResponseWriter, r *http.Request) {
	if l.cfg.Stall <= 0 {
		h.ServeHTTP(w, r)
		return
	}
	stream := &streamWriter{ResponseWriter: w, to: http.NewResponseController(w), stall: l.cfg.Stall}
	// The end of the stream is written after the handler.
	defer func() { _ = stream.to.SetWriteDeadline(time.Now().Add(stream.stall)) }()
	h.ServeHTTP(stream, r)
	// What the handler left in net/http's buffer waits for the peer's window: here, where the stream
	// counts.
	if stream.timer != nil {
		_ = stream.FlushError()
	}
}

func unwrap(c net.Conn) *conn {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	own, _ := c.(*conn)
	return own
}
