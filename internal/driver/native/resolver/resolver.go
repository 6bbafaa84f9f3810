// Package resolver answers the DNS questions of sandboxes by asking the host's own name servers.
//
// It runs as a process without any privilege: the maker binds its two sockets and hands them over. It checks each query,
// asks upstream with a query of its own making and relays the answer; it keeps nothing between queries, because a cache
// shared by tenants tells each what the others looked up. It knows nothing of policies: who may ask is decided by the
// packet filter in front of it.
package resolver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// Options of a resolver. Zero limits take their defaults.
type Options struct {
	UDP       net.PacketConn
	TCP       net.Listener
	Upstreams []netip.AddrPort // in order of preference

	Queries     int           // under way at once; default 512
	PerSource   int           // of those, by one address; default 64
	Connections int           // TCP, at once; default 256, and an eighth of it by one address
	Timeout     time.Duration // for one upstream to answer; default 2 s

	Log *slog.Logger
}

func (o Options) withDefaults() (Options, error) {
	if o.UDP == nil || o.TCP == nil {
		return o, errors.New("resolver: needs a UDP and a TCP socket")
	}
	if len(o.Upstreams) == 0 {
		return o, errors.New("resolver: needs a name server to ask")
	}
	for _, u := range o.Upstreams {
		if u.String() == o.UDP.LocalAddr().String() {
			return o, fmt.Errorf("resolver: %s would ask itself", u)
		}
	}
	for field, value := range map[*int]int{&o.Queries: 512, &o.PerSource: 64, &o.Connections: 256} {
		if *field <= 0 {
			*field = value
		}
	}
	if o.Timeout <= 0 {
		o.Timeout = 2 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

const (
	maxQuery     = 4096 // no sane query is longer; with options, most stay below 100 bytes
	maxDatagram  = 1232 // an answer of this size is never fragmented (DNS flag day 2020)
	plainAnswer  = 512  // what a client without EDNS takes
	idle         = 10 * time.Second
	perStream    = 100 // queries on one TCP connection
	writeTimeout = 2 * time.Second
)

// Run answers until ctx ends or a socket fails, and closes both sockets.
func Run(ctx context.Context, o Options) error {
	o, err := o.withDefaults()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &server{Options: o, upstream: newUpstream(o), queries: newShare(o.Queries, o.PerSource),
		streams: newShare(o.Connections, max(1, o.Connections/8)), open: map[net.Conn]bool{}}
	failed := make(chan error, 2)
	s.work.Go(func() { failed <- s.datagrams(ctx) })
	s.work.Go(func() { failed <- s.connections(ctx) })
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	cancel()
	s.close()
	s.work.Wait()
	return err
}

type server struct {
	Options
	upstream *upstream
	queries  *share // of the room for queries
	streams  *share // of the room for TCP connections
	work     sync.WaitGroup

	mu     sync.Mutex
	closed bool
	open   map[net.Conn]bool
}

func (s *server) close() {
	_, _ = s.UDP.Close(), s.TCP.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for c := range s.open {
		_ = c.Close()
	}
}

// datagrams reads queries. What exceeds a source's share is dropped unread: a flood costs the room set aside for it.
func (s *server) datagrams(ctx context.Context) error {
	buf := make([]byte, maxQuery+1)
	for {
		n, from, err := s.UDP.ReadFrom(buf)
		if err != nil {
			if errors.Is(err, net.ErrClosed) || ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("resolver: read: %w", err)
		}
		source := sourceOf(from)
		if !s.queries.take(source) {
			continue
		}
		query := append([]byte(nil), buf[:n]...)
		s.work.Go(func() {
			defer s.queries.give(source)
			if answer := s.answer(ctx, query, false); answer != nil {
				_, _ = s.UDP.WriteTo(answer, from) // the client asks again
			}
		})
	}
}

func (s *server) connections(ctx context.Context) error {
	for {
		conn, err := s.TCP.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) || ctx.Err() != nil {
				return nil
			}
			if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) { // passes when queries under way end
				select {
				case <-ctx.Done():
				case <-time.After(50 * time.Millisecond):
				}
				continue
			}
			return fmt.Errorf("resolver: accept: %w", err)
		}
		source := sourceOf(conn.RemoteAddr())
		if !s.streams.take(source) {
			_ = conn.Close()
			continue
		}
		s.work.Go(func() {
			defer s.streams.give(source)
			s.stream(ctx, conn, source)
		})
	}
}

// stream answers one query after the other: a client that wants more at once opens another connection.
func (s *server) stream(ctx context.Context, conn net.Conn, source netip.Addr) {
	if !s.admit(conn) {
		return
	}
	defer s.dismiss(conn)
	for range perStream {
		_ = conn.SetDeadline(time.Now().Add(idle))
		query, err := readFramed(conn)
		if err != nil || !s.queries.take(source) {
			return
		}
		answer := s.answer(ctx, query, true)
		s.queries.give(source)
		if answer == nil {
			return
		}
		_ = conn.SetDeadline(time.Now().Add(writeTimeout))
		framed := append([]byte{byte(len(answer) >> 8), byte(len(answer))}, answer...)
		if _, err := conn.Write(framed); err != nil {
			return
		}
	}
}

func (s *server) admit(conn net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = conn.Close()
		return false
	}
	s.open[conn] = true
	return true
}

func (s *server) dismiss(conn net.Conn) {
	_ = conn.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, conn)
}

func readFramed(r io.Reader) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	n := int(size[0])<<8 | int(size[1])
	if n > maxQuery {
		return nil, errors.New("query too long")
	}
	query := make([]byte, n)
	_, err := io.ReadFull(r, query)
	return query, err
}

// answer is what to send back, or nil for nothing.
func (s *server) answer(ctx context.Context, packet []byte, stream bool) []byte {
	query, refusal := check(packet)
	if query == nil {
		return refusal
	}
	got, err := s.upstream.ask(ctx, query)
	if err != nil {
		s.Log.Debug("name server does not answer", "error", err)
		return refuse(query, dns.RcodeServerFailure)
	}
	return relay(query, got, stream)
}

func sourceOf(a net.Addr) netip.Addr {
	switch a := a.(type) {
	case *net.UDPAddr:
		return a.AddrPort().Addr().Unmap()
	case *net.TCPAddr:
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}
