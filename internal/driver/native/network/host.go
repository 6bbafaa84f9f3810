package network

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
)

const (
	loopback    = 1 // the index of lo, in every namespace
	tablePrefix = "cove_"
	forwarding  = "net/ipv4/ip_forward"
	dnsRoom     = 4 << 20
)

func (n *Network) table() string { return tablePrefix + n.tag }

// label marks the gateway address. It is how a later run finds the range of an earlier one.
func (n *Network) label() string { return "lo:" + everyLink + n.tag }

// claim finds a range and takes it by adding its gateway address to lo, which only one instance can do.
//
// lo, because it is always there: dummy is a module that small kernels lack, and a bridge without ports would show up
// in every tool that manages interfaces. An address there answers on all interfaces, so the rules close it to the rest.
func (n *Network) claim(asked netip.Prefix) error {
	earlier, err := n.claimed()
	if err != nil {
		return err
	}
	if earlier.IsValid() {
		if !asked.IsValid() || asked == earlier {
			return n.settle(earlier)
		}
		n.scope, n.gateway = earlier, earlier.Addr().Next()
		if err := n.unclaim(); err != nil {
			return err
		}
	}
	candidates, err := ranges(asked)
	if err != nil {
		return err
	}
	for _, c := range candidates {
		_, err := n.links.exchange(addrMessage("claim "+c.scope.String(), unix.RTM_NEWADDR, loopback, c.scope.Addr().Next(), n.label()))
		if errors.Is(err, unix.EEXIST) {
			continue
		}
		if err != nil {
			return err
		}
		n.steps = append(n.steps, n.unclaim)
		n.scope, n.gateway = c.scope, c.scope.Addr().Next()
		if c.shadows.IsValid() {
			n.log.Warn("network range shadows a route of this host", "range", c.scope, "route", c.shadows)
		}
		return n.settle(c.scope)
	}
	return fault.New(fault.Exhausted, "no free network range: set one that this host does not use")
}

func (n *Network) settle(scope netip.Prefix) error {
	n.scope, n.gateway = scope, scope.Addr().Next()
	n.rules.scope, n.rules.gateway = n.scope, n.gateway
	_, err := n.links.exchange(scopeRoute(unix.RTM_NEWROUTE, scope))
	return err
}

func (n *Network) unclaim() error {
	var errs []error
	for _, m := range []message{
		scopeRoute(unix.RTM_DELROUTE, n.scope),
		addrMessage("release "+n.scope.String(), unix.RTM_DELADDR, loopback, n.gateway, n.label()),
	} {
		if _, err := n.links.exchange(m); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.EADDRNOTAVAIL) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// claimed is the range that an earlier run of this instance left behind: its gateway address by our label, the size by
// the route.
func (n *Network) claimed() (netip.Prefix, error) {
	lo, err := netlink.LinkByIndex(loopback)
	if err != nil {
		return netip.Prefix{}, err
	}
	addrs, err := listed(func() ([]netlink.Addr, error) { return netlink.AddrList(lo, netlink.FAMILY_V4) })
	if err != nil {
		return netip.Prefix{}, err
	}
	for _, a := range addrs {
		if a.Label != n.label() {
			continue
		}
		gateway, _ := netip.AddrFromSlice(a.IP.To4())
		routes, err := hostRoutes()
		if err != nil {
			return netip.Prefix{}, err
		}
		for _, r := range routes {
			if r.ours && r.dst.Addr().Next() == gateway && r.dst.Bits() < 32 {
				return r.dst, nil
			}
		}
		_, err = n.links.exchange(addrMessage("release "+gateway.String(), unix.RTM_DELADDR, loopback, gateway, n.label()))
		return netip.Prefix{}, err
	}
	return netip.Prefix{}, nil
}

// candidate is a range that could be ours; shadows is a wider route that it would take addresses from.
type candidate struct{ scope, shadows netip.Prefix }

// ranges lists what may be claimed, best first: networks that no route of the host touches, then those that only a much
// wider one covers, such as 10.0.0.0/8 of a company's VPN.
func ranges(asked netip.Prefix) ([]candidate, error) {
	var list []candidate
	if asked.IsValid() {
		list = []candidate{{scope: asked}}
	} else {
		for i := range 51 {
			second := 200 + (13+i)%51 // 10.213 first
			list = append(list, candidate{scope: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(second)}), 16)})
		}
	}
	routes, err := hostRoutes()
	if err != nil {
		return nil, err
	}
	var free []candidate
	for _, c := range list {
		if c.measure(routes) {
			free = append(free, c)
		}
	}
	if len(free) == 0 {
		return nil, fault.New(fault.Conflict, "network range %s: the host or another instance routes part of it", cmp.Or(asked.String(), "10.200.0.0-10.250.255.255"))
	}
	slices.SortStableFunc(free, func(a, b candidate) int {
		return cmp.Compare(a.shadows.Bits(), b.shadows.Bits()) // -1 when nothing is shadowed
	})
	return free, nil
}

func (c *candidate) measure(routes []route) bool {
	for _, r := range routes {
		if !r.dst.Overlaps(c.scope) {
			continue
		}
		if r.ours || r.dst.Bits() >= c.scope.Bits() {
			return false
		}
		c.shadows = r.dst
	}
	return true
}

type route struct {
	dst  netip.Prefix
	ours bool // of some Cove instance
}

// hostRoutes lists the IPv4 routes of all tables, without default routes; addresses of the host are among them.
func hostRoutes() ([]route, error) {
	all, err := listed(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	var routes []route
	for _, r := range all {
		if r.Dst == nil {
			continue
		}
		addr, _ := netip.AddrFromSlice(r.Dst.IP.To4())
		bits, _ := r.Dst.Mask.Size()
		if bits > 0 {
			routes = append(routes, route{netip.PrefixFrom(addr, bits), r.Protocol == routeProtocol})
		}
	}
	return routes, nil
}

// uplinkMTU is that of the default route's interface: a sandbox that sent larger packets would depend on ICMP coming back.
func uplinkMTU() int {
	const usual = 1500
	routes, err := listed(func() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return usual
	}
	for _, r := range routes {
		if r.Dst != nil && !r.Dst.IP.IsUnspecified() {
			continue
		}
		if link, err := netlink.LinkByIndex(r.LinkIndex); err == nil && link.Attrs().MTU >= 576 {
			return min(link.Attrs().MTU, 65535)
		}
	}
	return usual
}

// listed repeats a listing that a change elsewhere interrupted. On a host where links always come and go it settles for
// what the last try saw, as does everybody who reads such a list a moment later.
func listed[T any](list func() ([]T, error)) (found []T, err error) {
	for range 20 {
		if found, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return found, err
		}
	}
	return found, nil
}

// list finds this instance's links by name.
func (n *Network) list() (map[int]int32, error) {
	links, err := listed(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	found := make(map[int]int32)
	for _, l := range links {
		if slot, ours := n.slotOf(l.Attrs().Name); ours {
			found[slot] = int32(l.Attrs().Index)
		}
	}
	return found, nil
}

// take makes the table ours or, where it belongs to a running instance of the same tag, fails before anything of that
// one is touched. Kernels before 6.9 do not tell.
func (n *Network) take() error {
	tables, err := coveTables()
	if err != nil {
		return err
	}
	t := transaction{table: n.table()}
	t.newTable(protection)
	err = t.commit(n.tables)
	switch {
	case errors.Is(err, unix.EPERM):
		return fault.Wrap(fault.Conflict, err, "another instance with network tag %q is running on this host", n.tag)
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		return nil
	case err == nil && !contains(tables, n.table()):
		n.steps = append(n.steps, n.drop)
	}
	return err
}

// build writes the table anew, in one transaction, with the elements of adopted sandboxes in it: an earlier run's rules
// are replaced without a moment in between. Then it turns IPv4 forwarding on if that is off.
//
// That switch is global: the host would become a router between all its interfaces, so the rules keep those closed that
// it has now. (Forwarding per interface does not suffice: answers arrive at whatever interface leads out, and that
// changes while we run.) Whether we turned it on outlives us in the table, as the set of those interfaces: after a crash
// the host must not look as if it had always been a router. A second instance takes the set over, for the first may end.
func (n *Network) build() error {
	tables, err := coveTables()
	if err != nil {
		return err
	}
	on, err := os.ReadFile("/proc/sys/" + forwarding)
	if err != nil {
		return fmt.Errorf("read forwarding: %w", err)
	}
	off := strings.TrimSpace(string(on)) == "0"
	if off {
		n.rules.closed, err = interfaces()
	} else {
		n.rules.closed, err = closedOf(tables)
	}
	if err != nil {
		return err
	}
	if err := n.replace(contains(tables, n.table())); err != nil {
		return fmt.Errorf("write network rules: %w", err)
	}
	if !off {
		return nil
	}
	return writeSysctl(forwarding, "1")
}

func (n *Network) replace(exists bool) error {
	err := n.write(exists, protection)
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EINVAL) {
		return err
	}
	n.log.Info("network rules are watched: this kernel cannot protect them from a flush") // before 6.9
	if n.watcher, err = n.watch(); err != nil {
		return err
	}
	n.steps = append(n.steps, n.drop)
	return n.write(exists, 0)
}

func contains(tables []*nftables.Table, name string) bool {
	return slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == name })
}

func (n *Network) write(exists bool, flags uint32) error {
	t := transaction{table: n.table()}
	if exists {
		t.deleteTable()
	}
	t.newTable(flags)
	n.rules.write(&t)
	for slot, w := range n.slots {
		t.insert(setGuard, []element{guardElement(n.linkName(slot), w.addr)})
		t.change(w.addr, stance{}, w.stance)
	}
	return t.commit(n.tables)
}

func (n *Network) drop() error {
	t := transaction{table: n.table()}
	t.deleteTable()
	if err := t.commit(n.tables); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// interfaces lists the host's, without those of any Cove instance.
func interfaces() ([]string, error) {
	links, err := listed(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	var names []string
	for _, l := range links {
		if !strings.HasPrefix(l.Attrs().Name, everyLink) {
			names = append(names, l.Attrs().Name)
		}
	}
	return names, nil
}

// restoreForwarding turns forwarding off again if we turned it on and nobody can have come to need it: no other
// instance, and no interface that was not there then.
func (n *Network) restoreForwarding() error {
	if len(n.rules.closed) == 0 {
		return nil
	}
	tables, err := coveTables()
	if err != nil {
		return err
	}
	if len(tables) > 1 {
		return nil
	}
	now, err := interfaces()
	if err != nil {
		return err
	}
	for _, name := range now {
		if !slices.Contains(n.rules.closed, name) {
			n.log.Warn("forwarding stays on: an interface appeared that may need it", "interface", name)
			return nil
		}
	}
	return writeSysctl(forwarding, "0")
}

// closedOf reads the interfaces that any instance keeps closed.
func closedOf(tables []*nftables.Table) ([]string, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, t := range tables {
		elements, err := conn.GetSetElements(&nftables.Set{Table: t, Name: setClosed})
		if err != nil {
			continue // a table without that set: forwarding was on before it
		}
		for _, e := range elements {
			names = append(names, strings.TrimRight(string(e.Key), "\x00"))
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// coveTables lists the tables of all instances.
func coveTables() ([]*nftables.Table, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("list tables: %w", err)
	}
	all, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, fmt.Errorf("list tables: %w", err)
	}
	return slices.DeleteFunc(all, func(t *nftables.Table) bool { return !strings.HasPrefix(t.Name, tablePrefix) }), nil
}

// readElements lists what sandboxes have in the sets. A table just taken has no sets yet.
func (n *Network) readElements() (map[string][]nftables.SetElement, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("read sets: %w", err)
	}
	sets, err := conn.GetSets(&nftables.Table{Name: n.table(), Family: nftables.TableFamilyINet})
	if err != nil {
		return nil, fmt.Errorf("read sets: %w", err)
	}
	found := make(map[string][]nftables.SetElement)
	for _, s := range sets {
		if !slices.Contains(policySets, s.Name) {
			continue
		}
		if found[s.Name], err = conn.GetSetElements(s); err != nil {
			return nil, fmt.Errorf("read set %s: %w", s.Name, err)
		}
	}
	return found, nil
}

// adopt reads an earlier run's sandboxes back: those with a link and an element in guard.
func (n *Network) adopt() error {
	tables, err := coveTables()
	if err != nil || !contains(tables, n.table()) {
		return err
	}
	found, err := n.readElements()
	if err != nil {
		return err
	}
	links, err := n.list()
	if err != nil {
		return err
	}
	byAddr := make(map[netip.Addr]*wire)
	for _, e := range found[setGuard] {
		slot, ours := n.slotOf(strings.TrimRight(string(e.Key[:unix.IFNAMSIZ]), "\x00"))
		addr := netip.AddrFrom4([4]byte(e.Key[unix.IFNAMSIZ:]))
		if index, ok := links[slot]; ok && ours && addr == n.addrOf(slot) {
			n.slots[slot] = &wire{index: index, addr: addr}
			byAddr[addr] = n.slots[slot]
		}
	}
	for _, name := range policySets[1:] {
		for _, e := range found[name] {
			if w, ok := byAddr[netip.AddrFrom4([4]byte(e.Key[:4]))]; ok {
				w.stance.recall(name, e)
			}
		}
	}
	return nil
}

func (s *stance) recall(set string, e nftables.SetElement) {
	entry := func() cell {
		return cell{binary.BigEndian.Uint32(e.Key[4:]), binary.BigEndian.Uint32(e.Key[8:])}
	}
	switch set {
	case setInternet:
		s.internet = true
	case setDNS:
		s.dns = true
	case setAllow:
		s.allow = append(s.allow, entry())
	case setDeny:
		s.deny = append(s.deny, entry())
	}
}

// ListenDNS binds the resolver's two sockets, on the gateway address and a port that needs privilege, to be handed to an
// unprivileged process.
func (n *Network) ListenDNS() (udp, tcp *os.File, err error) {
	at := netip.AddrPortFrom(n.gateway, dnsPort)
	packets, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at))
	if err != nil {
		return nil, nil, fmt.Errorf("listen for DNS: %w", err)
	}
	defer func() { _ = packets.Close() }()
	if raw, err := packets.SyscallConn(); err == nil { // room for bursts of many sandboxes; a comfort
		_ = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, dnsRoom) })
	}
	streams, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(at))
	if err != nil {
		return nil, nil, fmt.Errorf("listen for DNS: %w", err)
	}
	defer func() { _ = streams.Close() }()
	if udp, err = packets.File(); err != nil {
		return nil, nil, fmt.Errorf("descriptor for DNS: %w", err)
	}
	if tcp, err = streams.File(); err != nil {
		_ = udp.Close()
		return nil, nil, fmt.Errorf("descriptor for DNS: %w", err)
	}
	return udp, tcp, nil
}
