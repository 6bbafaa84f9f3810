package network_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/network"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
)

var (
	internet = policy.Network{Mode: policy.Internet}
	none     = policy.Network{Mode: policy.None}
)

func list(allow ...string) policy.Network {
	return policy.Network{Mode: policy.List, Allow: prefixes(allow...)}
}

func TestInternetModeReachesPublicAddressesOnly(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	s := w.sandbox(n, 0)
	must(t, n.SetPolicy(0, internet))
	s.expect(t, true, public, otherPublic, uplink)
	s.expect(t, false, unreachable...)

	must(t, n.SetPolicy(0, policy.Network{Mode: policy.Internet, Deny: prefixes(public+"/32", "198.51.100.8/29")}))
	s.expect(t, true, otherPublic)
	s.expect(t, false, public)
}

func TestWhatInternetModeAllowsIsAnExceptionFromWhatItDenies(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	s := w.sandbox(n, 0)
	with := func(deny, allow string) policy.Network {
		return policy.Network{Mode: policy.Internet, Deny: prefixes(deny), Allow: prefixes(allow)}
	}
	must(t, n.SetPolicy(0, with("0.0.0.0/0", public+"/32")))
	s.expect(t, true, public)
	s.expect(t, false, otherPublic, uplink)
	s.expect(t, false, unreachable...)

	// Nothing that the mode itself refuses is opened by an exception, named or not.
	must(t, n.SetPolicy(0, with("0.0.0.0/0", "0.0.0.0/0")))
	s.expect(t, true, public, otherPublic, uplink)
	s.expect(t, false, unreachable...)
	must(t, n.SetPolicy(0, with(public+"/32", "10.0.0.0/8")))
	s.expect(t, true, otherPublic)
	s.expect(t, false, public, "10.9.9.9")

	must(t, n.SetPolicy(0, with("198.51.100.0/24", otherPublic+"/32")))
	s.expect(t, true, otherPublic)
	s.expect(t, false, public)
	must(t, n.SetPolicy(0, policy.Network{Mode: policy.Internet, Allow: prefixes(public + "/32")}))
	s.expect(t, true, public, otherPublic)

	// A list has no exceptions: what it denies stays denied.
	p := list("198.51.100.0/24")
	p.Deny = prefixes("198.51.100.0/24")
	must(t, n.SetPolicy(0, p))
	s.expect(t, false, public, otherPublic)
	must(t, n.SetPolicy(0, internet))
	s.expect(t, true, public, otherPublic)
	s.expect(t, false, unreachable...)
}

func TestNoServiceOfTheHostAnswers(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	s := w.sandbox(n, 0)
	w.serveTCP("0.0.0.0:80")
	for _, a := range []string{hostAddr, n.Gateway().String(), "127.0.0.1"} {
		w.serveUDP(a + ":81")
	}
	for _, p := range []policy.Network{internet, none, list("203.0.113.0/24", n.Range().String(), "127.0.0.0/8")} {
		must(t, n.SetPolicy(0, p))
		s.expect(t, false, hostAddr, n.Gateway().String(), "127.0.0.1")
	}
}

func TestDNSIsForSandboxesThatReachSomething(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	s := w.sandbox(n, 0)
	udp, tcp, err := n.ListenDNS()
	must(t, err)
	packets, err := net.FilePacketConn(udp)
	must(t, err)
	streams, err := net.FileListener(tcp)
	must(t, err)
	t.Cleanup(func() {
		for _, c := range []io.Closer{udp, tcp, packets, streams} {
			_ = c.Close()
		}
	})
	go echo(packets)
	go serve(streams)
	dns := n.Gateway().String() + ":53"
	for _, c := range []struct {
		policy policy.Network
		want   bool
	}{{none, false}, {internet, true}, {list(public + "/32"), true}, {none, false}} {
		must(t, n.SetPolicy(0, c.policy))
		for _, kind := range []string{"udp", "tcp"} {
			limit := timeout
			if c.want {
				limit = patient
			}
			if got := s.reachesWithin(limit, kind, dns); got != c.want {
				t.Errorf("mode %s: DNS by %s answered: %v, want %v", c.policy.Mode, kind, got, c.want)
			}
		}
	}
	must(t, n.SetPolicy(0, internet))
	if entries := conntrack(t); strings.Contains(entries, "dport=53") {
		t.Errorf("DNS takes room in conntrack:\n%s", entries)
	}
	// A neighbour with a route to the gateway address must not find an open resolver.
	neighbour := &sandbox{w: w, netns: w.internet}
	w.in(w.internet, func() {
		must(t, netlink.RouteAdd(&netlink.Route{Dst: prefixNet(n.Range()), Gw: net.ParseIP(hostAddr)}))
	})
	if neighbour.reaches("udp", dns) || neighbour.reaches("tcp", dns) {
		t.Error("the resolver answers the host's neighbours")
	}
}

func TestNoneModeReachesNothing(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	s := w.sandbox(n, 0)
	everything := append([]string{public, uplink}, unreachable...)
	s.expect(t, false, everything...) // as attached
	must(t, n.SetPolicy(0, internet))
	must(t, n.SetPolicy(0, none))
	s.expect(t, false, everything...)
}

func TestListModeReachesWhatItNames(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	s := w.sandbox(n, 0)

	must(t, n.SetPolicy(0, list(public+"/32", "10.9.9.0/24", "192.168.0.0/16")))
	s.expect(t, true, public, "10.9.9.9", "192.168.7.7")
	s.expect(t, false, otherPublic, uplink, "172.16.5.5", "169.254.169.254")

	// Nothing opens metadata; a private network opens only when it is named.
	must(t, n.SetPolicy(0, list("0.0.0.0/0", "169.254.0.0/16", "100.64.0.0/10", "168.63.129.16/32")))
	s.expect(t, true, public, otherPublic, "100.64.0.9")
	s.expect(t, false, "10.9.9.9", "172.16.5.5", "192.168.7.7", "169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16")

	p := list("198.51.100.0/24", "198.51.100.0/28", "198.51.0.0/16")
	p.Deny = prefixes(otherPublic + "/32")
	must(t, n.SetPolicy(0, p))
	s.expect(t, true, public)
	s.expect(t, false, otherPublic, uplink)
}

func TestARefusalIsQuick(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	s := w.sandbox(n, 0)
	for i := range 30 { // more than the kernel's limit of ICMP errors
		if _, err := s.dial("tcp", fmt.Sprintf("198.51.100.%d:80", i)); err == nil || hangs(err) {
			t.Fatalf("refusal %d: %v", i, err)
		}
	}
	// The kernel remembers for a minute how many ICMP errors an address got: a slot that no other test uses.
	_, err := w.sandbox(n, 77).dial("udp", public+":81")
	if !errors.Is(err, syscall.EHOSTUNREACH) && !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.EACCES) {
		t.Errorf("a refused datagram says %v", err)
	}
}

func TestSandboxesDoNotSeeEachOther(t *testing.T) {
	w := newWorld(t)
	n, other := w.open(network.Options{Tag: "a"}), w.open(network.Options{Tag: "b"})
	if n.Range() == other.Range() {
		t.Fatalf("two instances share %s", n.Range())
	}
	s, sibling, stranger := w.sandbox(n, 0), w.sandbox(n, 1), w.sandbox(other, 0)
	everyone := list(n.Range().String(), other.Range().String())
	for _, victim := range []*sandbox{sibling, stranger} {
		w.in(victim.netns, func() {
			w.serveTCP("0.0.0.0:80")
			w.serveUDP(victim.link.Addr.String() + ":81")
		})
	}
	for _, p := range []policy.Network{internet, everyone} {
		must(t, n.SetPolicy(0, p))
		must(t, n.SetPolicy(1, p))
		must(t, other.SetPolicy(0, p))
		s.expect(t, false, sibling.link.Addr.String(), stranger.link.Addr.String())
	}
	// Nor does the host or its neighbourhood reach into them by address.
	host := &sandbox{w: w, netns: ownNetns(t)}
	host.expect(t, false, sibling.link.Addr.String())
	w.in(w.internet, func() {
		must(t, netlink.RouteAdd(&netlink.Route{Dst: prefixNet(n.Range()), Gw: net.ParseIP(hostAddr)}))
	})
	(&sandbox{w: w, netns: w.internet}).expect(t, false, sibling.link.Addr.String())
	stranger.expect(t, false, s.link.Addr.String())
}

func TestAForgedSourceIsDropped(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	s := w.sandbox(n, 0)
	must(t, n.SetPolicy(0, internet))
	victim := w.sandbox(n, 1)
	must(t, n.SetPolicy(1, internet))

	heard := make(chan string, 10)
	w.in(w.internet, func() {
		c, err := net.ListenPacket("udp", public+":99")
		must(t, err)
		t.Cleanup(func() { _ = c.Close() })
		go func() {
			buf := make([]byte, 100)
			for {
				size, _, err := c.ReadFrom(buf)
				if err != nil {
					return
				}
				heard <- string(buf[:size])
			}
		}()
	})
	say := func(from netip.Addr) {
		w.in(s.netns, func() {
			eth, err := netlink.LinkByName("eth0")
			must(t, err)
			if err := netlink.AddrAdd(eth, parseAddr(t, from.String()+"/32")); err != nil && !errors.Is(err, unix.EEXIST) {
				t.Error(err)
			}
			c, err := net.DialUDP("udp", &net.UDPAddr{IP: from.AsSlice()}, &net.UDPAddr{IP: net.ParseIP(public), Port: 99})
			must(t, err)
			defer func() { _ = c.Close() }()
			_, err = c.Write([]byte(from.String()))
			must(t, err)
		})
	}
	for _, a := range []netip.Addr{victim.link.Addr, netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr(otherPublic), n.Gateway()} {
		say(a)
	}
	say(s.link.Addr) // packets keep their order, so this one says that the others were dropped
	if got := <-heard; got != s.link.Addr.String() {
		t.Errorf("a packet from %s left the sandbox of %s", got, s.link.Addr)
	}
}

func TestIPOptionsDoNotLeave(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	s := w.sandbox(n, 0)
	must(t, n.SetPolicy(0, internet))
	s.expect(t, true, public)
	before := w.hears(public + ":81")
	w.in(s.netns, func() {
		c, err := net.Dial("udp", public+":81")
		must(t, err)
		defer func() { _ = c.Close() }()
		raw, err := c.(*net.UDPConn).SyscallConn()
		must(t, err)
		must(t, raw.Control(func(fd uintptr) {
			must(t, unix.SetsockoptString(int(fd), unix.IPPROTO_IP, unix.IP_OPTIONS, "\x01\x01\x01\x00"))
		}))
		if ping(c, timeout) == nil {
			t.Error("a packet with options was answered")
		}
	})
	if w.hears(public+":81") != before {
		t.Error("a packet with options left")
	}
}

func TestAPolicyChangeEndsOpenConnections(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	s := w.sandbox(n, 0)
	must(t, n.SetPolicy(0, internet))
	for _, p := range []policy.Network{none, list(otherPublic + "/32"), {Mode: policy.Internet, Deny: prefixes("198.51.100.0/28")}} {
		must(t, n.SetPolicy(0, internet))
		stream, err := s.dial("tcp", public+":80")
		must(t, err)
		packets, err := s.dial("udp", public+":81")
		must(t, err)
		must(t, n.SetPolicy(0, p))
		if err := ping(stream, patient); err == nil || hangs(err) {
			t.Errorf("%v: an open TCP connection goes on or hangs instead of failing: %v", p, err)
		}
		if ping(packets, timeout) == nil {
			t.Errorf("%v: an open UDP flow goes on", p)
		}
		_, _ = stream.Close(), packets.Close()
	}
}

func TestARevokedPeerCannotSendEither(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	s := w.sandbox(n, 0)
	must(t, n.SetPolicy(0, internet))
	var server net.PacketConn
	w.in(w.internet, func() {
		var err error
		server, err = net.ListenPacket("udp", public+":99")
		must(t, err)
	})
	defer func() { _ = server.Close() }()
	var client net.Conn
	w.in(s.netns, func() {
		var err error
		client, err = net.Dial("udp", public+":99")
		must(t, err)
	})
	defer func() { _ = client.Close() }()
	buf := make([]byte, 100)
	_, err := client.Write([]byte("open"))
	must(t, err)
	_, nat, err := server.ReadFrom(buf)
	must(t, err)
	for _, c := range []struct {
		policy policy.Network
		want   bool
	}{{internet, true}, {none, false}, {list("198.51.100.0/24"), true}, {list(otherPublic + "/32"), false},
		{internet, true}, {policy.Network{Mode: policy.Internet, Deny: prefixes(public + "/30")}, false}} {
		must(t, n.SetPolicy(0, c.policy))
		_, err := server.WriteTo([]byte("push"), nat)
		must(t, err)
		limit := quick
		if c.want {
			limit = patient
		}
		_ = client.SetReadDeadline(time.Now().Add(limit))
		if _, err := client.Read(buf); (err == nil) != c.want {
			t.Errorf("mode %s: a pushed datagram arrived: %v, want %v", c.policy.Mode, err == nil, c.want)
		}
	}
}

func TestIPv6DoesNotLeave(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	s := w.sandbox(n, 0)
	must(t, n.SetPolicy(0, internet))
	host, err := netlink.LinkByName(s.link.Name)
	must(t, err)
	w.in(s.netns, func() {
		eth, err := netlink.LinkByName("eth0")
		must(t, err)
		addrs, err := netlink.AddrList(eth, netlink.FAMILY_V6)
		must(t, err)
		if len(addrs) != 0 {
			t.Errorf("eth0 has IPv6 addresses: %v", addrs)
		}
	})
	addrs, err := netlink.AddrList(host, netlink.FAMILY_V6)
	must(t, err)
	if len(addrs) != 0 {
		t.Errorf("the host's end has IPv6 addresses: %v", addrs)
	}

	// A sandbox that turns it on again finds the rules.
	must(t, os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0))
	must(t, netlink.AddrAdd(host, parseAddr(t, "fd00:1::1/64")))
	c, err := net.ListenPacket("udp6", "[::]:82")
	must(t, err)
	defer func() { _ = c.Close() }()
	go echo(c)
	w.in(s.netns, func() {
		must(t, os.WriteFile("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", []byte("0"), 0))
		eth, err := netlink.LinkByName("eth0")
		must(t, err)
		a := parseAddr(t, "fd00:1::2/64")
		a.Flags = unix.IFA_F_NODAD
		must(t, netlink.AddrAdd(eth, a))
	})
	if s.reaches("udp6", "[fd00:1::1]:82") {
		t.Error("IPv6 reached the host")
	}
	w.in(s.netns, func() {
		if l, err := net.Listen("tcp", "[::1]:0"); err != nil {
			t.Errorf("::1 is gone inside: %v", err)
		} else {
			_ = l.Close()
		}
	})
}

func TestTheHostDoesNotBecomeARouter(t *testing.T) {
	w := newWorld(t)
	lan := newNetns(t)
	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "lan0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(lan)}))
	link, err := netlink.LinkByName("lan0")
	must(t, err)
	t.Cleanup(func() { _ = netlink.LinkDel(link) })
	must(t, netlink.AddrAdd(link, parseAddr(t, "203.0.114.1/24")))
	must(t, netlink.LinkSetUp(link))
	w.in(lan, func() {
		eth, err := netlink.LinkByName("eth0")
		must(t, err)
		must(t, netlink.AddrAdd(eth, parseAddr(t, "203.0.114.2/24")))
		must(t, netlink.LinkSetUp(eth))
		must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Gw: net.ParseIP("203.0.114.1")}))
	})
	w.in(w.internet, func() {
		must(t, netlink.RouteAdd(&netlink.Route{Dst: prefixNet(netip.MustParsePrefix("203.0.114.0/24")), Gw: net.ParseIP(hostAddr)}))
	})
	w.awaitUp("lan0", lan)
	neighbour := &sandbox{w: w, netns: lan}

	first := w.open(network.Options{Tag: "a"})
	s := w.sandbox(first, 0)
	must(t, first.SetPolicy(0, internet))
	s.expect(t, true, public)
	neighbour.expect(t, false, public)

	// The knowledge outlives a crash, and the instance that turned forwarding on.
	first.Leave()
	again := w.open(network.Options{Tag: "a"})
	second := w.open(network.Options{Tag: "b"})
	neighbour.expect(t, false, public)
	must(t, again.Close())
	s = w.sandbox(second, 0)
	must(t, second.SetPolicy(0, internet))
	s.expect(t, true, public)
	neighbour.expect(t, false, public)
	must(t, second.Close())
	if on := sysctl(t, "net/ipv4/ip_forward"); on != "0" {
		t.Errorf("forwarding is %s after the last instance closed", on)
	}

	// A host that was a router stays one.
	must(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
	neighbour.expect(t, true, public)
	third := w.open(network.Options{Tag: "a"})
	neighbour.expect(t, true, public)
	must(t, third.Close())
	if on := sysctl(t, "net/ipv4/ip_forward"); on != "1" {
		t.Errorf("forwarding is %s on a host that had it on", on)
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	w := newWorld(t)
	before := snapshot(t)
	descriptors := openNetlink(t)
	n, err := network.Open(network.Options{Tag: "t"})
	must(t, err)
	for i := range 20 {
		s := w.sandbox(n, i)
		p := list("198.51.100.0/24", "10.9.9.0/24")
		p.Deny = prefixes(otherPublic + "/32")
		must(t, n.SetPolicy(i, p))
		s.expect(t, true, public)
	}
	if links, elements, err := n.Counts(); err != nil || links != 20 || elements != 20*(1+1+1+1+2+1) {
		t.Errorf("Counts: %d links, %d elements, %v", links, elements, err)
	}
	for i := range 10 {
		must(t, n.Detach(i))
		must(t, n.Detach(i)) // again is fine
	}
	if _, elements, err := n.Counts(); err != nil || elements != 10*7 {
		t.Errorf("after Detach: %d elements, %v", elements, err)
	}
	must(t, n.Close())
	if after := snapshot(t); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	if after := openNetlink(t); after != descriptors+20 { // the test's own namespaces
		t.Errorf("descriptors: %d before, %d after, 20 of them the test's", descriptors, after)
	}
	if entries := conntrack(t); strings.Contains(entries, n.Range().Addr().String()[:6]) {
		t.Errorf("conntrack still knows sandboxes:\n%s", entries)
	}
}

func TestALinkGoesWithItsNamespaceOrWithDetach(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	w.sandbox(n, 1)
	must(t, n.Detach(1)) // its namespace lives on
	eventually(t, "the link of a detached sandbox is deleted", func() bool {
		links, _, err := n.Counts()
		return err == nil && links == 0
	})

	s := w.sandbox(n, 2)
	must(t, n.SetPolicy(2, internet))
	must(t, n.Detach(2))
	next := w.sandbox(n, 2) // at once, while the former's link is still there
	must(t, n.SetPolicy(2, internet))
	next.expect(t, true, public)
	s.expect(t, false, public)
	// The janitor must not take the new link for the old one. What it still has to do of slot 2 it
	// does no later than this.
	w.sandbox(n, 3)
	must(t, n.Detach(3))
	eventually(t, "the link of the last one detached is deleted", func() bool {
		links, _, err := n.Counts()
		return err == nil && links <= 1
	})
	next.expect(t, true, public)
}

func TestAnEarlierRunIsAdoptedOrSwept(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t", Adopt: true}) // nothing to adopt is fine
	var boxes []*sandbox
	for i := range 4 {
		boxes = append(boxes, w.sandbox(n, i))
	}
	must(t, n.SetPolicy(0, internet))
	limited := list("198.51.100.0/28", "10.9.9.0/24")
	limited.Deny = prefixes("10.9.9.128/25")
	must(t, n.SetPolicy(1, limited))
	must(t, n.SetPolicy(2, internet))
	open, err := boxes[0].dial("tcp", public+":80")
	must(t, err)
	defer func() { _ = open.Close() }()

	n.Leave()
	must(t, ping(open, patient)) // still connected, still guarded
	boxes[1].expect(t, false, otherPublic)
	n = w.open(network.Options{Tag: "t", Adopt: true})
	must(t, ping(open, patient))
	boxes[1].expect(t, true, public, "10.9.9.9")
	boxes[1].expect(t, false, otherPublic)
	if links, elements, err := n.Counts(); err != nil || links != 4 || elements != 4+2+3+2+2+8 {
		t.Errorf("adopted: %d links, %d elements, %v", links, elements, err)
	}
	must(t, n.SetPolicy(1, internet)) // what was adopted can be changed
	boxes[1].expect(t, true, otherPublic)
	must(t, n.Sweep(func(slot int) bool { return slot < 2 }))
	boxes[2].expect(t, false, public)
	must(t, ping(open, patient))

	n.Leave()
	n = w.open(network.Options{Tag: "t"})
	boxes[0].expect(t, false, public)
	must(t, n.Sweep(func(int) bool { return false }))
	if links, elements, err := n.Counts(); err != nil || links != 0 || elements != 0 {
		t.Errorf("swept: %d links, %d elements, %v", links, elements, err)
	}
}

func TestAFlushOfAllRulesDoesNotOpenSandboxes(t *testing.T) {
	w := newWorld(t)
	flush := func() {
		conn, err := nftables.New()
		must(t, err)
		conn.FlushRuleset()
		must(t, conn.Flush())
	}
	claims := func(t *testing.T) {
		n := w.open(network.Options{Tag: "t"})
		s := w.sandbox(n, 0)
		must(t, n.SetPolicy(0, internet))
		for range 3 {
			flush()
			eventually(t, "the rules are there", func() bool { return len(tables(t)) == 1 })
			s.expect(t, true, public)
			s.expect(t, false, "10.9.9.9", "169.254.169.254")
		}
		must(t, n.SetPolicy(0, none))
		s.expect(t, false, public)
		must(t, n.Close())
	}
	t.Run("protected", claims)
	t.Run("watched", func(t *testing.T) {
		defer network.WithoutProtection()()
		claims(t)
	})
}

func TestASecondInstanceNeedsAnotherTag(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	s := w.sandbox(n, 0)
	must(t, n.SetPolicy(0, internet))
	before := snapshot(t)
	for _, o := range []network.Options{{Tag: "t"}, {Tag: "t", Adopt: true}, {Tag: "t", Range: netip.MustParsePrefix("10.240.0.0/16")}} {
		if _, err := network.Open(o); !fault.Is(err, fault.Conflict) {
			t.Errorf("a second instance with the same tag: %v", err)
		}
	}
	if after := snapshot(t); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	s.expect(t, true, public)
}

func TestTheRangeAvoidsTheHostsRoutes(t *testing.T) {
	newWorld(t)
	lo, err := netlink.LinkByName("lo")
	must(t, err)
	add := func(dst string) {
		r := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: prefixNet(netip.MustParsePrefix(dst))}
		must(t, netlink.RouteAdd(r))
		t.Cleanup(func() { _ = netlink.RouteDel(r) })
	}
	open := func(o network.Options) (netip.Prefix, error) {
		n, err := network.Open(o)
		if err != nil {
			return netip.Prefix{}, err
		}
		defer func() { must(t, n.Close()) }()
		return n.Range(), nil
	}
	for _, c := range []struct{ route, want string }{
		{"172.30.0.0/16", "10.213.0.0/16"},
		{"10.213.7.0/24", "10.214.0.0/16"},
		{"10.214.0.0/15", "10.216.0.0/16"},
		{"10.0.0.0/8", "10.216.0.0/16"}, // a wide route is shadowed rather than refused
	} {
		add(c.route)
		if got, err := open(network.Options{Tag: "t"}); err != nil || got.String() != c.want {
			t.Errorf("with a route to %s: range %v, %v; want %s", c.route, got, err, c.want)
		}
	}
	before := snapshot(t)
	if _, err := open(network.Options{Tag: "t", Range: netip.MustParsePrefix("10.213.0.0/16")}); !fault.Is(err, fault.Conflict) {
		t.Errorf("a range that was asked for and is taken: %v", err)
	}
	if after := snapshot(t); after != before {
		t.Errorf("an Open that failed left something; before:\n%s\nafter:\n%s", before, after)
	}
	if got, err := open(network.Options{Tag: "t", Range: netip.MustParsePrefix("172.31.0.0/24")}); err != nil || got.String() != "172.31.0.0/24" {
		t.Errorf("a range of one's own: %v, %v", got, err)
	}
}

func TestOneSandboxCannotFillConntrack(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t", Limits: network.Limits{Connections: 10, PerSecond: 1000}})
	s, other := w.sandbox(n, 0), w.sandbox(n, 1)
	must(t, n.SetPolicy(0, internet))
	must(t, n.SetPolicy(1, internet))
	var opened []net.Conn
	for range 20 {
		if c, err := s.dial("tcp", public+":80"); err == nil {
			opened = append(opened, c)
		}
	}
	if len(opened) != 10 {
		t.Errorf("%d connections at once, want 10", len(opened))
	}
	other.expect(t, true, public)
	for _, c := range opened {
		must(t, ping(c, patient))
		_ = c.Close()
	}
}

func TestNewConnectionsAreRateLimited(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t", Limits: network.Limits{PerSecond: 1, Burst: 5}})
	s, other := w.sandbox(n, 0), w.sandbox(n, 1)
	must(t, n.SetPolicy(0, internet))
	must(t, n.SetPolicy(1, internet))
	refused, begun := 0, time.Now()
	for range 20 {
		if !s.reachesWithin(patient, "tcp", public+":80") {
			refused++
		}
	}
	took := time.Since(begun)
	if allowed := 5 + int(math.Ceil(took.Seconds())); refused < 20-allowed {
		t.Errorf("%d of 20 connections refused in %v, at one per second after five", refused, took)
	}
	other.expect(t, true, public)
}

func TestAFloodOfQueriesIsThinned(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t", Limits: network.Limits{Queries: 5}})
	s, other := w.sandbox(n, 0), w.sandbox(n, 1)
	must(t, n.SetPolicy(0, internet))
	must(t, n.SetPolicy(1, internet))
	udp, tcp, err := n.ListenDNS()
	must(t, err)
	defer func() { _, _ = udp.Close(), tcp.Close() }()
	packets, err := net.FilePacketConn(udp)
	must(t, err)
	defer func() { _ = packets.Close() }()
	begun := time.Now()
	w.in(s.netns, func() {
		c, err := net.Dial("udp", packets.LocalAddr().String())
		must(t, err)
		defer func() { _ = c.Close() }()
		for range 100 {
			_, _ = c.Write([]byte("query"))
		}
	})
	arrived := 0
	for buf := make([]byte, 100); ; arrived++ {
		limit := quick
		if arrived < 5 { // as many must come
			limit = patient
		}
		_ = packets.SetReadDeadline(time.Now().Add(limit))
		if _, _, err := packets.ReadFrom(buf); err != nil {
			break
		}
	}
	took := time.Since(begun)
	if most := 5 + int(5*took.Seconds()) + 1; arrived < 5 || arrived > most {
		t.Errorf("%d of 100 queries arrived in %v, at 5 per second; want 5 to %d", arrived, took, most)
	}
	_ = packets.SetReadDeadline(time.Time{})
	go echo(packets)
	if !other.reachesWithin(patient, "udp", packets.LocalAddr().String()) {
		t.Error("another sandbox has no DNS")
	}
}

func TestANamespaceOfAnotherUserNamespaceIsAttached(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 65536}}
	process := exec.Command("/proc/self/exe")
	process.Env = []string{pause + "=1"}
	process.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET, UidMappings: ids, GidMappings: ids}
	stdin, err := process.StdinPipe()
	must(t, err)
	if err := process.Start(); err != nil {
		t.Skip("no user namespaces here: ", err)
	}
	netns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", process.Process.Pid))
	must(t, err)
	link, err := n.Attach(0, int(netns.Fd()))
	must(t, err)
	must(t, n.SetPolicy(0, internet))
	s := &sandbox{w: w, netns: int(netns.Fd()), link: link}
	s.expect(t, true, public)
	s.expect(t, false, "10.9.9.9")

	// The link goes with the process, without anybody deleting it.
	must(t, stdin.Close())
	must(t, process.Wait())
	must(t, netns.Close())
	eventually(t, "the link is gone", func() bool {
		links, _, err := n.Counts()
		return err == nil && links == 0
	})
	must(t, n.Detach(0))
}

func TestManyComeAndGoAtOnce(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for round := range 10 {
				slot := worker*2 + round%2
				netns := newNetns(t)
				if _, err := n.Attach(slot, netns); err != nil {
					t.Error(err)
					return
				}
				for _, p := range []policy.Network{internet, list("198.51.100.0/24", "10.9.9.0/24"), none, internet} {
					if err := n.SetPolicy(slot, p); err != nil {
						t.Error(err)
					}
				}
				if err := n.Detach(slot); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	must(t, n.Sweep(func(int) bool { return false }))
	if links, elements, err := n.Counts(); err != nil || links != 0 || elements != 0 {
		t.Errorf("left: %d links, %d elements, %v", links, elements, err)
	}
}

func TestWhatCannotBeDoneIsRefused(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t", Range: netip.MustParsePrefix("10.220.0.0/28")})
	w.sandbox(n, 0)
	netns := newNetns(t)
	for claim, c := range map[string]struct {
		err  error
		want fault.Kind
	}{
		"a slot in use":              {second(n.Attach(0, netns)), fault.Conflict},
		"a slot beyond the range":    {second(n.Attach(13, netns)), fault.Exhausted},
		"a negative slot":            {second(n.Attach(-1, netns)), fault.Exhausted},
		"a policy for nobody":        {n.SetPolicy(5, internet), fault.NotFound},
		"an invalid policy":          {n.SetPolicy(0, policy.Network{Mode: "open"}), fault.Invalid},
		"a tag that is no tag":       {second(network.Open(network.Options{Tag: "A_"})), fault.Invalid},
		"a tag that is too long":     {second(network.Open(network.Options{Tag: "long"})), fault.Invalid},
		"a range that is no network": {second(network.Open(network.Options{Range: netip.MustParsePrefix("10.1.2.3/16")})), fault.Invalid},
	} {
		if !fault.Is(c.err, c.want) {
			t.Errorf("%s: %v, want %s", claim, c.err, c.want)
		}
	}
	if _, err := n.Attach(1, int(^uint(0)>>1)); err == nil {
		t.Error("a descriptor of nothing was attached")
	}
	last := w.sandbox(n, 12)
	must(t, n.SetPolicy(12, internet))
	last.expect(t, true, public)
}

func TestLargeListsAreReplacedWhole(t *testing.T) {
	w := newWorld(t)
	n := w.open(network.Options{Tag: "t"})
	s := w.sandbox(n, 0)
	var many []string
	for i := range policy.MaxPrefixes {
		many = append(many, fmt.Sprintf("203.%d.%d.0/25", i, i))
	}
	p := list(many...)
	p.Deny = prefixes(many[:100]...)
	for i := range 5 {
		p.Allow = append(prefixes(many[i*10+1:]...), prefixes("198.51.100.0/28")...)
		must(t, n.SetPolicy(0, p))
		s.expect(t, true, public)
	}
	must(t, n.SetPolicy(0, internet))
	if _, elements, err := n.Counts(); err != nil || elements != 3 {
		t.Errorf("%d elements are left, %v", elements, err)
	}
}

func TestAnotherFirewallThatDropsIsFound(t *testing.T) {
	w := newWorld(t)
	w.open(network.Options{Tag: "t"})
	found, err := network.Blockers()
	must(t, err)
	if len(found) != 0 {
		t.Errorf("a host without another firewall: %v", found)
	}
	conn, err := nftables.New()
	must(t, err)
	drop := nftables.ChainPolicyDrop
	table := conn.AddTable(&nftables.Table{Name: "filter", Family: nftables.TableFamilyIPv4})
	conn.AddChain(&nftables.Chain{Name: "FORWARD", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &drop})
	must(t, conn.Flush())
	defer func() {
		conn.DelTable(table)
		must(t, conn.Flush())
	}()
	found, err = network.Blockers()
	must(t, err)
	if len(found) != 1 || !strings.Contains(found[0], "ip filter FORWARD") {
		t.Errorf("blockers: %v", found)
	}
}

func second[T any](_ T, err error) error { return err }

func serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
	}
}

func prefixNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Masked().Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}
}

func ownNetns(t *testing.T) int {
	t.Helper()
	fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// snapshot tells everything that this package could leave on a host.
func snapshot(t *testing.T) string {
	t.Helper()
	var b bytes.Buffer
	links, err := netlink.LinkList()
	must(t, err)
	for _, l := range links {
		fmt.Fprintln(&b, "link", l.Attrs().Name)
		addrs, err := netlink.AddrList(l, netlink.FAMILY_V4)
		must(t, err)
		for _, a := range addrs {
			fmt.Fprintln(&b, "address", a)
		}
	}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{}, netlink.RT_FILTER_TABLE)
	must(t, err)
	for _, r := range routes {
		fmt.Fprintln(&b, "route", r)
	}
	fmt.Fprintln(&b, "tables", tables(t))
	fmt.Fprintln(&b, "forwarding", sysctl(t, "net/ipv4/ip_forward"))
	return b.String()
}

func sysctl(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile("/proc/sys/" + name)
	must(t, err)
	return strings.TrimSpace(string(b))
}

func conntrack(t *testing.T) string {
	t.Helper()
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	must(t, err)
	var b strings.Builder
	for _, f := range flows {
		fmt.Fprintln(&b, f)
	}
	return b.String()
}

// openNetlink counts this process's netlink sockets and namespace descriptors.
func openNetlink(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	n := 0
	for _, e := range entries {
		fd, _ := strconv.Atoi(e.Name())
		family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		target, _ := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && family == unix.AF_NETLINK || strings.HasPrefix(target, "net:[") {
			n++
		}
	}
	return n
}
