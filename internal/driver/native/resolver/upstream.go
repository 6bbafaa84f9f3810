package resolver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
)

// upstream asks the host's name servers.
type upstream struct {
	servers []netip.AddrPort
	timeout time.Duration
	good    atomic.Int32 // the server that answered last: where the next query starts
}

func newUpstream(o Options) *upstream { return &upstream{servers: o.Upstreams, timeout: o.Timeout} }

// attempts bounds how long a client waits: stub resolvers give up after five seconds.
const attempts = 2

func (u *upstream) ask(ctx context.Context, query *dns.Msg) (*dns.Msg, error) {
	first := int(u.good.Load())
	var errs []error
	for i := range attempts {
		at := (first + i) % len(u.servers)
		got, err := u.askOne(ctx, u.servers[at], forward(query))
		if err == nil {
			u.good.Store(int32(at))
			return got, nil
		}
		errs = append(errs, fmt.Errorf("name server %s: %w", u.servers[at], err))
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}

func (u *upstream) askOne(ctx context.Context, server netip.AddrPort, query *dns.Msg) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, u.timeout)
	defer cancel()
	got, err := exchange(ctx, "udp", server, query)
	if err == nil && got.Truncated {
		return exchange(ctx, "tcp", server, query)
	}
	return got, err
}

// exchange sends a query from a socket of its own, which gives it a random port on top of a random id, and waits for the
// answer that matches; others are not ours.
func exchange(ctx context.Context, network string, server netip.AddrPort, query *dns.Msg) (*dns.Msg, error) {
	var d net.Dialer
	raw, err := d.DialContext(ctx, network, server.String())
	if err != nil {
		return nil, err
	}
	defer func() { _ = raw.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = raw.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	conn := &dns.Conn{Conn: raw, UDPSize: maxQuery}
	if err := conn.WriteMsg(query); err != nil {
		return nil, err
	}
	for {
		got, err := conn.ReadMsg()
		if err == nil && matches(query, got) {
			return got, nil
		}
		var lost net.Error
		if network == "tcp" || errors.As(err, &lost) {
			return nil, cmp.Or(err, errMismatch)
		}
	}
}

var errMismatch = errors.New("answered another question")

func matches(query, got *dns.Msg) bool {
	if got.Id != query.Id || !got.Response || len(got.Question) != 1 {
		return false
	}
	asked, answered := query.Question[0], got.Question[0]
	return asked.Qtype == answered.Qtype && asked.Qclass == answered.Qclass && strings.EqualFold(asked.Name, answered.Name)
}
