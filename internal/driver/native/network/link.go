package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// routeProtocol marks our routes, so that people and other programs see whose they are. Unassigned by iproute2.
const routeProtocol = 0x76

const (
	vethPeer    = 1 // VETH_INFO_PEER
	genModeNone = 1 // IN6_ADDR_GEN_MODE_NONE
	operUp      = 6 // IF_OPER_UP
)

// wire makes a veth pair with one end here and the other, eth0, in the namespace, and configures both.
//
// Neither end speaks ARP: both have the same hardware address and IFF_NOARP, so each takes the other's address for
// its own and delivers. That saves the first packet a round trip, keeps sandboxes out of the host's neighbour table
// (1,024 entries by default) and leaves a hostile one no ARP to fill it with.
func (n *Network) wire(slot, netns int, name string, addr netip.Addr) (index int32, err error) {
	inside, err := n.visit(netns)
	if err != nil {
		return 0, err
	}
	defer inside.close()

	replies, err := n.links.exchange(n.pair(slot, netns, name)...)
	if err != nil {
		return 0, err
	}
	undo := func(err error) (int32, error) {
		return 0, errors.Join(err, n.unlink(name))
	}
	index, err = indexOf(replies)
	if err != nil {
		return undo(err)
	}
	if _, err := n.links.exchange(setUp(index, "bring up "+name), hostRoute(addr, index)); err != nil {
		return undo(err)
	}
	if err := n.furnish(inside, addr); err != nil {
		return undo(err)
	}
	if err := n.awaitCarrier(name, index); err != nil {
		return undo(err)
	}
	return index, nil
}

const (
	// carrierLimit is how long a link may take to get its carrier. The kernel gives it from a work
	// queue, which a busy host runs late.
	carrierLimit    = 10 * time.Second
	maxCarrierPause = 50 * time.Millisecond
)

// awaitCarrier returns when the host's end carries packets. It got its carrier when eth0 came up, and the kernel acts on
// that later; what is sent to the sandbox before is lost, and a lost SYN-ACK costs a second. Since 6.8 asking makes it
// act at once.
func (n *Network) awaitCarrier(name string, index int32) error {
	ask := message{what: "await " + name, typ: unix.RTM_GETLINK, body: linkHeader(index, 0, 0)}
	for deadline, pause := time.Now().Add(carrierLimit), time.Millisecond; ; pause = min(2*pause, maxCarrierPause) {
		replies, err := n.links.exchange(ask)
		if err != nil {
			return err
		}
		var state byte
		for _, r := range replies {
			eachAttr(r.body[unix.SizeofIfInfomsg:], func(typ uint16, data []byte) {
				if typ == unix.IFLA_OPERSTATE {
					state = data[0]
				}
			})
		}
		if state == operUp {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s has no carrier after %v", name, carrierLimit)
		}
		time.Sleep(pause)
	}
}

// visit opens a netlink socket inside a namespace and turns IPv6 off for the interfaces it will get; lo keeps ::1,
// which programs expect. It is the one moment when a thread of ours is in there.
func (n *Network) visit(netns int) (*socket, error) {
	type result struct {
		s   *socket
		err error
	}
	done := make(chan result, 1)
	go func() {
		runtime.LockOSThread()
		s, err := n.enter(netns)
		if back := unix.Setns(n.home, unix.CLONE_NEWNET); back != nil {
			done <- result{s, errors.Join(err, fmt.Errorf("leave network namespace: %w", back))}
			return // still locked: the lost thread ends with this goroutine
		}
		runtime.UnlockOSThread()
		done <- result{s, err}
	}()
	r := <-done
	if r.err != nil && r.s != nil {
		r.s.close()
	}
	return r.s, r.err
}

func (n *Network) enter(netns int) (*socket, error) {
	if err := unix.Setns(netns, unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("enter network namespace: %w", err)
	}
	if n.ipv6 {
		if err := writeSysctl("net/ipv6/conf/default/disable_ipv6", "1"); err != nil {
			return nil, err
		}
	}
	return dial(unix.NETLINK_ROUTE)
}

// pair is the batch that makes both ends, still down: a veth cannot be born up, and IPv6 is to be told to make no
// addresses before it notices the link. One queue each: the default is one per CPU, and each costs a sysfs entry.
func (n *Network) pair(slot, netns int, name string) []message {
	mac := []byte{0x02, 'c', 'v', 0, byte(slot >> 8), byte(slot)}
	half := func(a *attrs, name string) {
		a.text(unix.IFLA_IFNAME, name)
		a.put(unix.IFLA_ADDRESS, mac...)
		a.number(unix.IFLA_MTU, uint32(n.mtu))
		a.number(unix.IFLA_NUM_TX_QUEUES, 1)
		a.number(unix.IFLA_NUM_RX_QUEUES, 1)
	}
	create := message{what: "create " + name, typ: unix.RTM_NEWLINK, flags: unix.NLM_F_CREATE | unix.NLM_F_EXCL | unix.NLM_F_ACK,
		body: linkHeader(0, unix.IFF_NOARP, unix.IFF_NOARP)}
	half(&create.body, name)
	create.body.nest(unix.IFLA_LINKINFO, func(a *attrs) {
		a.text(unix.IFLA_INFO_KIND, "veth")
		a.nest(unix.IFLA_INFO_DATA, func(a *attrs) {
			a.nest(vethPeer, func(a *attrs) {
				*a = append(*a, linkHeader(0, unix.IFF_NOARP, unix.IFF_NOARP)...)
				half(a, "eth0")
				a.number(unix.IFLA_NET_NS_FD, uint32(netns))
			})
		})
	})
	find := message{what: "find " + name, typ: unix.RTM_GETLINK, body: linkHeader(0, 0, 0)}
	find.body.text(unix.IFLA_IFNAME, name)
	if !n.ipv6 {
		return []message{create, find}
	}
	quiet := message{what: "turn IPv6 off on " + name, typ: unix.RTM_SETLINK, flags: unix.NLM_F_ACK, body: linkHeader(0, 0, 0)}
	quiet.body.text(unix.IFLA_IFNAME, name)
	quiet.body.nest(unix.IFLA_AF_SPEC, func(a *attrs) {
		a.nest(unix.AF_INET6, func(a *attrs) { a.put(unix.IFLA_INET6_ADDR_GEN_MODE, genModeNone) })
	})
	return []message{create, quiet, find}
}

// furnish gives eth0 its address and the way out. The gateway needs no route of its own: onlink says that it is there.
func (n *Network) furnish(inside *socket, addr netip.Addr) error {
	find := message{what: "find eth0", typ: unix.RTM_GETLINK, body: linkHeader(0, 0, 0)}
	find.body.text(unix.IFLA_IFNAME, "eth0")
	replies, err := inside.exchange(setUp(1, "bring up lo"), find)
	if err != nil {
		return err
	}
	index, err := indexOf(replies)
	if err != nil {
		return err
	}
	out := routeMessage("add default route", unix.NLM_F_CREATE|unix.NLM_F_REPLACE, unix.RTN_UNICAST, unix.RT_SCOPE_UNIVERSE, 0, unix.RTNH_F_ONLINK)
	out.body.put(unix.RTA_GATEWAY, source(n.gateway)...)
	out.body.number(unix.RTA_OIF, uint32(index))
	_, err = inside.exchange(setUp(index, "bring up eth0"), addrMessage("add address to eth0", unix.RTM_NEWADDR, index, addr, ""), out)
	return err
}

// unlink deletes an interface by name; that it is gone already is fine.
func (n *Network) unlink(name string) error {
	m := message{what: "delete " + name, typ: unix.RTM_DELLINK, flags: unix.NLM_F_ACK, body: linkHeader(0, 0, 0)}
	m.body.text(unix.IFLA_IFNAME, name)
	if _, err := n.links.exchange(m); err != nil && !errors.Is(err, unix.ENODEV) {
		return err
	}
	return nil
}

// unlinkAll deletes interfaces by index in one go: a deletion waits 20 ms for readers of the interface to finish, and
// the members of a group wait together. Those gone already are skipped.
func (n *Network) unlinkAll(indexes []int32) error {
	if len(indexes) == 0 {
		return nil
	}
	moved := false
	for _, i := range indexes {
		m := message{what: "mark link for deletion", typ: unix.RTM_SETLINK, flags: unix.NLM_F_ACK, body: linkHeader(i, 0, 0)}
		m.body.number(unix.IFLA_GROUP, trashGroup)
		if _, err := n.links.exchange(m); err == nil {
			moved = true
		} else if !errors.Is(err, unix.ENODEV) {
			return err
		}
	}
	if !moved {
		return nil
	}
	m := message{what: "delete links", typ: unix.RTM_DELLINK, flags: unix.NLM_F_ACK, body: linkHeader(0, 0, 0)}
	m.body.number(unix.IFLA_GROUP, trashGroup)
	if _, err := n.links.exchange(m); err != nil && !errors.Is(err, unix.ENODEV) {
		return err
	}
	return nil
}

// trashGroup holds the links about to be deleted, of every instance alike. A number nobody uses by accident.
const trashGroup = 0x436f7665

func linkHeader(index int32, flags, change uint32) attrs {
	a := attrs{unix.AF_UNSPEC, 0, 0, 0}
	a = binary.NativeEndian.AppendUint32(a, uint32(index))
	a = binary.NativeEndian.AppendUint32(a, flags)
	return binary.NativeEndian.AppendUint32(a, change)
}

func setUp(index int32, what string) message {
	return message{what: what, typ: unix.RTM_SETLINK, flags: unix.NLM_F_ACK, body: linkHeader(index, unix.IFF_UP, unix.IFF_UP)}
}

// addrMessage adds or deletes a /32; a label finds it again.
func addrMessage(what string, typ uint16, index int32, addr netip.Addr, label string) message {
	m := message{what: what, typ: typ, flags: unix.NLM_F_ACK, body: attrs{unix.AF_INET, 32, 0, unix.RT_SCOPE_UNIVERSE}}
	if typ == unix.RTM_NEWADDR {
		m.flags |= unix.NLM_F_CREATE | unix.NLM_F_EXCL
	}
	m.body = binary.NativeEndian.AppendUint32(m.body, uint32(index))
	m.body.put(unix.IFA_LOCAL, source(addr)...)
	m.body.put(unix.IFA_ADDRESS, source(addr)...)
	if label != "" {
		m.body.text(unix.IFA_LABEL, label)
	}
	return m
}

func routeMessage(what string, flags uint16, kind, scope, bits byte, hopFlags uint32) message {
	m := message{what: what, typ: unix.RTM_NEWROUTE, flags: flags | unix.NLM_F_ACK,
		body: attrs{unix.AF_INET, bits, 0, 0, unix.RT_TABLE_MAIN, routeProtocol, scope, kind}}
	m.body = binary.NativeEndian.AppendUint32(m.body, hopFlags)
	return m
}

func hostRoute(addr netip.Addr, index int32) message {
	m := routeMessage("add route to "+addr.String(), unix.NLM_F_CREATE|unix.NLM_F_REPLACE, unix.RTN_UNICAST, unix.RT_SCOPE_LINK, 32, 0)
	m.body.put(unix.RTA_DST, source(addr)...)
	m.body.number(unix.RTA_OIF, uint32(index))
	return m
}

// scopeRoute answers for addresses of the range that no sandbox has: without it they would follow the default route
// out of the host. It also tells other instances that the range is taken.
func scopeRoute(typ uint16, scope netip.Prefix) message {
	m := routeMessage("route of "+scope.String(), 0, unix.RTN_UNREACHABLE, unix.RT_SCOPE_UNIVERSE, byte(scope.Bits()), 0)
	m.typ = typ
	if typ == unix.RTM_NEWROUTE {
		m.flags |= unix.NLM_F_CREATE | unix.NLM_F_REPLACE
	}
	m.body.put(unix.RTA_DST, source(scope.Masked().Addr())...)
	return m
}

func indexOf(replies []reply) (int32, error) {
	for _, r := range replies {
		if r.typ == unix.RTM_NEWLINK && len(r.body) >= 8 {
			return int32(binary.NativeEndian.Uint32(r.body[4:])), nil
		}
	}
	return 0, errors.New("the kernel did not describe the link")
}

func writeSysctl(name, value string) error {
	if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0); err != nil {
		return fmt.Errorf("set %s: %w", name, err)
	}
	return nil
}
