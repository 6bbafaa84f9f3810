package network

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
)

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
