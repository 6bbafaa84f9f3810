package image

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/covehq/cove/internal/fault"
)

// maxRedirects bounds how often a registry may send a request elsewhere.
const maxRedirects = 5

// errAddress is an address that images never come from.
var errAddress = errors.New("an address that this server does not talk to")

// errPlain is a registry that would have to be spoken to without TLS.
var errPlain = errors.New("plain HTTP is spoken with registries on this host's loopback and with those that the operator calls insecure only")

// metadata are addresses of cloud providers' metadata services beyond the link-local ones. Whoever reads them gets the
// machine's own credentials.
var metadata = []netip.Addr{
	netip.MustParseAddr("100.100.100.200"), netip.MustParseAddr("168.63.129.16"), netip.MustParseAddr("192.0.0.192"),
	netip.MustParseAddr("fd00:ec2::254"), netip.MustParseAddr("fd20:ce::254"),
}

// translated are networks of IPv6 that hold an address of IPv4: where its bytes are. In the one for local use that depends on how
// the operator has divided it (RFC 6052), so that every way is looked at.
var translated = map[netip.Prefix][][4]int{
	netip.MustParsePrefix("64:ff9b::/96"):   {{12, 13, 14, 15}},
	netip.MustParsePrefix("64:ff9b:1::/48"): {{6, 7, 9, 10}, {7, 9, 10, 11}, {9, 10, 11, 12}, {12, 13, 14, 15}},
	netip.MustParsePrefix("2002::/16"):      {{2, 3, 4, 5}},
	netip.MustParsePrefix("::/96"):          {{12, 13, 14, 15}},
}

// network is how registries are reached: tenants choose them, so not everything that this host can reach is open to them.
type network struct {
	insecure map[string]bool // hosts of the operator's that need no TLS
	named    map[string]bool // hosts of the operator's: mirrors and insecure registries
	proxies  map[string]bool // host:port, which the operator has put into the environment
	ways     [3]transports   // by reach; each has connections of its own
}

// reach is how near to this host a registry may be.
type reach int

const (
	reachAway     reach = iota // not this host
	reachHost                  // an address of this host's, but not loopback
	reachLoopback              // this host's loopback, too
)

// transports are the ways to a registry, by whether the operator calls it insecure.
type transports struct {
	secure *http.Transport
	lax    *http.Transport // believes every certificate
}

func newNetwork(cfg Config) (*network, error) {
	n := &network{insecure: map[string]bool{}, named: map[string]bool{}, proxies: map[string]bool{}}
	for _, host := range cfg.Insecure {
		if host == "" || strings.ContainsAny(host, "/@ ") {
			return nil, fault.New(fault.Invalid, "an insecure registry is written host or host:port, not %q", host)
		}
		n.insecure[host], n.named[host] = true, true
	}
	for registry, mirrors := range cfg.Mirrors {
		if _, err := parseRegistry(registry); err != nil {
			return nil, err
		}
		for _, text := range mirrors {
			m, err := parseMirror(text)
			if err != nil {
				return nil, err
			}
			n.named[m.host] = true
			n.insecure[m.host] = n.insecure[m.host] || m.plain
		}
	}
	for _, probe := range []string{"https://registry.invalid/", "http://registry.invalid/"} {
		if req, err := http.NewRequest(http.MethodGet, probe, nil); err == nil {
			if proxy, err := http.ProxyFromEnvironment(req); err == nil && proxy != nil {
				n.proxies[withPort(proxy)] = true
			}
		}
	}
	for r := range n.ways {
		n.ways[r] = transports{n.transport(reach(r), nil), n.transport(reach(r), &tls.Config{InsecureSkipVerify: true})}
	}
	return n, nil
}

func (n *network) transport(r reach, config *tls.Config) *http.Transport {
	dial := func(ctx context.Context, kind, to string) (net.Conn, error) { return n.dial(ctx, kind, to, r) }
	return &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: dial, TLSClientConfig: config, ForceAttemptHTTP2: true, DisableCompression: true,
		MaxIdleConns: 32, MaxIdleConnsPerHost: 8, IdleConnTimeout: 30 * time.Second,
		TLSHandshakeTimeout: 10 * time.Second, ResponseHeaderTimeout: 60 * time.Second, MaxResponseHeaderBytes: 64 << 10,
	}
}

func (n *network) close() {
	for _, t := range n.ways {
		t.secure.CloseIdleConnections()
		t.lax.CloseIdleConnections()
	}
}

// dial looks at an address after its name was resolved, at the moment in which it is used: a name that was harmless a
// moment ago may be another host's now.
func (n *network) dial(ctx context.Context, kind, to string, r reach) (net.Conn, error) {
	if n.proxies[to] {
		r = reachLoopback
	}
	d := net.Dialer{Timeout: 15 * time.Second, KeepAlive: 30 * time.Second, ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
		at, err := netip.ParseAddrPort(address)
		if err != nil {
			return err
		}
		return checkAddress(at.Addr(), r)
	}}
	return d.DialContext(ctx, kind, to)
}

// checkAddress refuses addresses that no registry has: this host's own, unless it was named as such, and metadata services.
func checkAddress(a netip.Addr, r reach) error {
	for _, a := range meant(a.Unmap().WithZone("")) {
		if err := checkMeant(a, r); err != nil {
			return err
		}
	}
	return nil
}

// meant are the addresses of IPv4 that one of IPv6 may stand for; any other is itself.
func meant(a netip.Addr) []netip.Addr {
	for network, ways := range translated {
		if !network.Contains(a) || a == netip.IPv6Loopback() {
			continue
		}
		var all []netip.Addr
		b := a.As16()
		for _, at := range ways {
			v4 := netip.AddrFrom4([4]byte{b[at[0]], b[at[1]], b[at[2]], b[at[3]]})
			if !v4.IsUnspecified() { // that is what is left of an address which is written in another way
				all = append(all, v4)
			}
		}
		if len(all) == 0 {
			all = append(all, netip.IPv4Unspecified())
		}
		return all
	}
	return []netip.Addr{a}
}

func checkMeant(a netip.Addr, r reach) error {
	switch {
	case a.IsUnspecified(), a.IsLinkLocalUnicast(), a.IsMulticast(), a.IsLoopback() && r < reachLoopback, r < reachHost && isOwn(a):
		return fmt.Errorf("%s: %w", a, errAddress)
	}
	for _, m := range metadata {
		if a == m {
			return fmt.Errorf("%s: %w", a, errAddress)
		}
	}
	return nil
}

// isOwn reports whether an address is one of this host's interfaces. They are asked each time, since
// addresses come and go. If they cannot be read, every address counts as the host's.
func isOwn(a netip.Addr) bool {
	own, err := net.InterfaceAddrs()
	return err != nil || slices.ContainsFunc(own, func(o net.Addr) bool {
		p, err := netip.ParsePrefix(o.String())
		return err == nil && p.Addr().Unmap().WithZone("") == a
	})
}

// isNamed reports whether the operator has named a host in the config, with its port or without.
func (n *network) isNamed(hostport string) bool { return has(n.named, hostport) }

func (n *network) isInsecure(hostport string) bool { return has(n.insecure, hostport) }

func has(set map[string]bool, hostport string) bool {
	if set[hostport] {
		return true
	}
	host, _, err := net.SplitHostPort(hostport)
	return err == nil && set[host]
}

// mayPlain reports whether a registry may speak plain HTTP.
func (n *network) mayPlain(hostport string) bool {
	return n.isInsecure(hostport) || isLoopbackName(hostname(hostport))
}

// isLoopbackName reports whether a host is called this host itself; what a name resolves to is not asked.
func isLoopbackName(host string) bool {
	if host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return true
	}
	a, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil && a.Unmap().IsLoopback()
}

func hostname(hostport string) string {
	if host, _, err := net.SplitHostPort(hostport); err == nil {
		return host
	}
	return strings.Trim(hostport, "[]")
}

func withPort(u *url.URL) string {
	if u.Port() != "" {
		return u.Host
	}
	port := map[string]string{"http": "80", "https": "443", "socks5": "1080", "socks5h": "1080"}[u.Scheme]
	return net.JoinHostPort(u.Hostname(), port)
}

// door is the network as one tenant may use it to speak with one registry.
type door struct {
	*network
	operator bool   // who may use registries on this host's loopback
	registry string // its host, as it was named
}

// reachOf tells how near a host may be. A registry elsewhere does not send the server to itself,
// neither to get a layer nor to get a token.
func (d door) reachOf(host string) reach {
	switch {
	case d.operator && isLoopbackName(hostname(d.registry)) && isLoopbackName(hostname(host)),
		host == d.registry && d.isNamed(host):
		return reachLoopback
	case d.operator && host == d.registry:
		return reachHost
	}
	return reachAway
}

// RoundTrip sees every request, those after a redirect and those for tokens too.
func (d door) RoundTrip(req *http.Request) (*http.Response, error) {
	host := req.URL.Host
	r := d.reachOf(host)
	if isLoopbackName(req.URL.Hostname()) && r < reachLoopback {
		return nil, fmt.Errorf("%s: %w", req.URL.Hostname(), errAddress)
	}
	// A proxy resolves names itself; what is an address already is looked at here too.
	if a, err := netip.ParseAddr(req.URL.Hostname()); err == nil {
		if err := checkAddress(a, r); err != nil {
			return nil, err
		}
	}
	if req.URL.Scheme != "https" && !d.mayPlain(host) {
		return nil, errPlain
	}
	by := d.ways[r]
	if d.isInsecure(host) {
		return by.lax.RoundTrip(req)
	}
	return by.secure.RoundTrip(req)
}

// follow is how far a client goes where it is sent; where to, the door decides.
func follow(_ *http.Request, via []*http.Request) error {
	if len(via) > maxRedirects {
		return fmt.Errorf("more than %d redirects", maxRedirects)
	}
	return nil
}

// mirror is another place for a registry's images.
type mirror struct {
	host   string
	prefix string // of its repositories
	plain  bool
}

func parseMirror(text string) (mirror, error) {
	rest, plain := strings.CutPrefix(text, "http://")
	rest = strings.TrimPrefix(rest, "https://")
	host, prefix, _ := strings.Cut(strings.Trim(rest, "/"), "/")
	if host == "" || strings.ContainsAny(rest, "@ ?#") {
		return mirror{}, fault.New(fault.Invalid, "a mirror is written host, host/prefix or http://host, not %q", text)
	}
	return mirror{host: hostOf(showRegistry(host)), prefix: prefix, plain: plain}, nil
}
