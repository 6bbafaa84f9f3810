package network

import (
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
