// Package network gives each sandbox a wire to the host and enforces its network policy there; it knows nothing of
// processes, files or who asked.
//
// Each sandbox has a veth pair, an address of its own and elements in the sets of one nftables table. Making the pair
// costs about a millisecond and happens ahead of need (Attach); changing what a sandbox may reach is one small
// transaction (SetPolicy). Everything is enforced outside the sandbox's namespace, where nothing in it can undo it.
//
// Only the privileged maker uses this package. Several instances share a host when their tags differ.
package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
)

// Limits bound what one sandbox may take of what all share: the host's conntrack table and the resolver. The zero value
// of a field is its default.
type Limits struct {
	Connections int // at once; default 2048
	PerSecond   int // new ones; default 500
	Burst       int // new ones above the rate, in one go; default 1000
	Queries     int // DNS packets per second, and in one go; default 1000: the resolver's socket is shared by all
}

// Options say which instance this is.
type Options struct {
	Tag    string       // tells instances on one host apart: at most three of a–z and 0–9; may be empty
	Range  netip.Prefix // sandbox addresses; unset: 10.213.0.0/16, or the next free /16 of 10.200–10.250
	MTU    int          // of sandbox links; unset: that of the host's default route
	Adopt  bool         // keep the sandboxes of an earlier run: their links and policies; otherwise Open starts from nothing
	Limits Limits
	Log    *slog.Logger
}

// Link is a sandbox's end of the wire.
type Link struct {
	Name string // of the host's end
	Addr netip.Addr
}

// Network is one instance's part of the host's network.
type Network struct {
	tag     string
	scope   netip.Prefix
	gateway netip.Addr
	mtu     int
	ipv6    bool // this kernel has it
	home    int  // descriptor of our own network namespace
	rules   ruleset
	log     *slog.Logger

	links  *socket // rtnetlink
	tables *socket // nftables: owner of the table
	conns  *socket // conntrack: apart, for a search through its table must not delay a policy

	mu    sync.Mutex // held while a set changes, so that slots tells what the kernel has
	slots map[int]*wire

	watcher *watcher // nil where the kernel protects the table
	janitor *janitor
	stop    context.CancelFunc
	steps   []func() error // that undo what Open did so far
	ended   sync.Once      // by Close or Leave
}

// wire is what the kernel holds for one slot.
type wire struct {
	index  int32
	addr   netip.Addr
	stance stance
}

// stance is a policy in the words of the sets.
type stance struct {
	internet, dns bool
	allow, deny   []cell
}

// everyLink begins the names of all instances' links.
const everyLink = "cv"

func (o Options) prefix() string { return everyLink + o.Tag + "-" }

// withDefaults is the one place where options are judged.
func (o Options) withDefaults() (Options, error) {
	if len(o.Tag) > 3 || strings.Trim(o.Tag, "abcdefghijklmnopqrstuvwxyz0123456789") != "" {
		return o, fault.New(fault.Invalid, "network tag %q: at most three of a-z and 0-9", o.Tag)
	}
	if r := o.Range; r.IsValid() && (!r.Addr().Is4() || r.Bits() < 8 || r.Bits() > 28 || r != r.Masked()) {
		return o, fault.New(fault.Invalid, "network range %s: want an IPv4 network between /8 and /28", r)
	}
	for field, value := range map[*int]int{&o.Limits.Connections: 2048, &o.Limits.PerSecond: 500, &o.Limits.Burst: 1000, &o.Limits.Queries: 1000} {
		if *field <= 0 {
			*field = value
		}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

// Open claims a range of addresses, writes the table and turns forwarding on. It returns a Network that must be closed,
// or left for a later run to adopt.
func Open(o Options) (_ *Network, err error) {
	o, err = o.withDefaults()
	if err != nil {
		return nil, err
	}
	n := &Network{tag: o.Tag, mtu: o.MTU, home: -1, log: o.Log, slots: map[int]*wire{},
		rules: ruleset{links: o.prefix(), every: everyLink, limits: o.Limits}}
	defer func() {
		if err != nil {
			err = fmt.Errorf("open network: %w", errors.Join(err, n.undo()))
		}
	}()
	if err := n.open(); err != nil {
		return nil, err
	}
	if err := n.take(); err != nil {
		return nil, err
	}
	if err := n.claim(o.Range); err != nil {
		return nil, err
	}
	if o.Adopt {
		if err := n.adopt(); err != nil {
			return nil, err
		}
	}
	if err := n.build(); err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background()) // ended by Close and Leave, which wait for the janitor
	n.stop, n.janitor = stop, newJanitor(n)
	go n.janitor.run(ctx)
	return n, nil
}

// undo takes back the steps of an Open that failed, last first.
func (n *Network) undo() error {
	n.watcher.stop()
	var errs []error
	for _, step := range slices.Backward(n.steps) {
		errs = append(errs, step())
	}
	n.release()
	return errors.Join(errs...)
}

func (n *Network) open() (err error) {
	if n.home, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return fmt.Errorf("own network namespace: %w", err)
	}
	if n.links, err = dial(unix.NETLINK_ROUTE); err != nil {
		return err
	}
	if n.tables, err = dial(unix.NETLINK_NETFILTER); err != nil {
		return err
	}
	if n.conns, err = dial(unix.NETLINK_NETFILTER); err != nil {
		return err
	}
	_, missing := os.Stat("/proc/sys/net/ipv6")
	n.ipv6 = missing == nil
	if n.mtu == 0 {
		n.mtu = uplinkMTU()
	}
	return nil
}

// Gateway is the address where sandboxes find their resolver; it is local to this host.
func (n *Network) Gateway() netip.Addr { return n.gateway }

// Range is the network that sandbox addresses come from.
func (n *Network) Range() netip.Prefix { return n.scope }

// Capacity is the number of slots: they count from zero.
func (n *Network) Capacity() int { return 1<<(32-n.scope.Bits()) - 3 }

func (n *Network) linkName(slot int) string {
	return n.rules.links + strconv.FormatInt(int64(slot), 16)
}

func (n *Network) slotOf(name string) (int, bool) {
	hex, ours := strings.CutPrefix(name, n.rules.links)
	slot, err := strconv.ParseInt(hex, 16, 32)
	return int(slot), ours && err == nil && slot >= 0 && int(slot) < n.Capacity()
}

// addrOf leaves out the network's first two addresses (itself, the gateway) and its last.
func (n *Network) addrOf(slot int) netip.Addr {
	return address(number(n.scope.Addr()) + 2 + uint32(slot))
}

// Attach wires the namespace behind a descriptor to the host, with policy none. It belongs in a pool: it takes about a
// millisecond, and twenty more when the slot was detached a moment ago and its former namespace still lives.
func (n *Network) Attach(slot, netns int) (Link, error) {
	if slot < 0 || slot >= n.Capacity() {
		return Link{}, fault.New(fault.Exhausted, "network slot %d: %s holds %d sandboxes", slot, n.scope, n.Capacity())
	}
	n.mu.Lock()
	_, taken := n.slots[slot]
	if !taken {
		n.slots[slot] = &wire{addr: n.addrOf(slot)} // holds the slot while we work unlocked
	}
	n.mu.Unlock()
	if taken {
		return Link{}, fault.New(fault.Conflict, "network slot %d is in use", slot)
	}
	link := Link{Name: n.linkName(slot), Addr: n.addrOf(slot)}
	if err := n.attach(slot, netns, link); err != nil {
		n.mu.Lock()
		delete(n.slots, slot)
		n.mu.Unlock()
		return Link{}, fmt.Errorf("attach network slot %d: %w", slot, err)
	}
	return link, nil
}

func (n *Network) attach(slot, netns int, link Link) error {
	n.janitor.forget(link.Addr)
	index, err := n.wire(slot, netns, link.Name, link.Addr)
	if errors.Is(err, unix.EEXIST) { // the slot's former namespace is still on its way out
		if err := n.unlink(link.Name); err != nil {
			return err
		}
		index, err = n.wire(slot, netns, link.Name, link.Addr)
	}
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	t := transaction{table: n.table()}
	t.insert(setGuard, []element{guardElement(link.Name, link.Addr)})
	if err := t.commit(n.tables); err != nil {
		return errors.Join(err, n.unlink(link.Name))
	}
	n.slots[slot].index = index
	return nil
}

// SetPolicy replaces what a sandbox may reach, all at once, for new connections and for those already open.
func (n *Network) SetPolicy(slot int, p policy.Network) error {
	if err := p.Validate(); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	w, ok := n.slots[slot]
	if !ok || w.index == 0 {
		return fault.New(fault.NotFound, "network slot %d is not attached", slot)
	}
	want := stanceOf(p)
	t := transaction{table: n.table()}
	t.change(w.addr, w.stance, want)
	if err := t.commit(n.tables); err != nil {
		return fmt.Errorf("set policy of network slot %d: %w", slot, err)
	}
	w.stance = want
	return nil
}

func stanceOf(p policy.Network) stance {
	switch p.Mode {
	case policy.Internet:
		s := stance{internet: true, dns: true, deny: cellsOf(p.Deny)}
		if len(s.deny) > 0 { // there is something to be excepted from
			s.allow = cellsOf(p.Allow)
		}
		return s
	case policy.List:
		return stance{dns: true, allow: allowed(p.Allow), deny: cellsOf(p.Deny)}
	default:
		return stance{}
	}
}

// listed reports whether it reaches what it allows and nothing else; in mode internet that is an exception from what is denied.
func (s stance) listed() bool { return len(s.allow) > 0 && !s.internet }

// change turns one stance into another. What both have stays untouched.
func (t *transaction) change(addr netip.Addr, have, want stance) {
	for _, s := range []struct {
		set        string
		have, want bool
	}{
		{setInternet, have.internet, want.internet},
		{setDNS, have.dns, want.dns},
		{setAllows, have.listed(), want.listed()},
		{setDenies, len(have.deny) > 0, len(want.deny) > 0},
	} {
		switch {
		case s.have && !s.want:
			t.remove(s.set, []element{sourceElement(addr)})
		case s.want && !s.have:
			t.insert(s.set, []element{sourceElement(addr)})
		}
	}
	t.remove(setAllow, cellElements(addr, minus(have.allow, want.allow)))
	t.insert(setAllow, cellElements(addr, minus(want.allow, have.allow)))
	t.remove(setDeny, cellElements(addr, minus(have.deny, want.deny)))
	t.insert(setDeny, cellElements(addr, minus(want.deny, have.deny)))
}

// Detach takes a sandbox off the network at once. Its link goes with its namespace; what is left of it after a moment,
// and its entries in conntrack, are removed in the background.
func (n *Network) Detach(slot int) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	w, ok := n.slots[slot]
	if !ok || w.index == 0 {
		return nil
	}
	t := transaction{table: n.table()}
	t.change(w.addr, w.stance, stance{})
	t.remove(setGuard, []element{guardElement(n.linkName(slot), w.addr)})
	if err := t.commit(n.tables); err != nil {
		return fmt.Errorf("detach network slot %d: %w", slot, err)
	}
	delete(n.slots, slot)
	n.janitor.put(w.addr, w.index)
	return nil
}

// Sweep detaches the sandboxes that keep does not know and deletes links that nobody here attached.
func (n *Network) Sweep(keep func(slot int) bool) error {
	n.mu.Lock()
	known := make(map[int]bool)
	for slot, w := range n.slots {
		known[slot] = keep(slot) || w.index == 0
	}
	n.mu.Unlock()
	var errs []error
	for slot, kept := range known {
		if !kept {
			errs = append(errs, n.Detach(slot))
		}
	}
	links, err := n.list()
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	var stray []int32
	for slot, index := range links {
		if !known[slot] && !n.attached(slot) {
			stray = append(stray, index)
		}
	}
	return errors.Join(append(errs, n.unlinkAll(stray))...)
}

func (n *Network) attached(slot int) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, ok := n.slots[slot]
	return ok
}

// Counts tells what this instance has in the kernel: links, and elements of sandboxes in the sets.
func (n *Network) Counts() (links, elements int, err error) {
	byslot, err := n.list()
	if err != nil {
		return 0, 0, err
	}
	kept, err := n.readElements()
	for _, list := range kept {
		elements += len(list)
	}
	return len(byslot), elements, err
}

// Leave ends this process's part and leaves every sandbox connected, for a later Open that adopts.
func (n *Network) Leave() {
	n.ended.Do(func() {
		n.rest()
		n.release()
	})
}

// Close removes everything that this instance put into the host's network.
func (n *Network) Close() (err error) {
	n.ended.Do(func() {
		n.rest()
		defer n.release()
		if err = n.clear(); err != nil {
			err = fmt.Errorf("close network: %w", err)
		}
	})
	return err
}

// clear deletes links first: there is no moment with sandboxes connected and no rules.
func (n *Network) clear() error {
	links, err := n.list()
	if err != nil {
		return err
	}
	if err := n.unlinkAll(slices.Collect(maps.Values(links))); err != nil {
		return err
	}
	for _, w := range n.slots {
		n.janitor.put(w.addr, 0)
	}
	n.slots = map[int]*wire{}
	n.janitor.flush()
	return errors.Join(n.restoreForwarding(), n.drop(), n.unclaim())
}

// rest ends and awaits what runs in the background.
func (n *Network) rest() {
	n.watcher.stop()
	n.stop()
	<-n.janitor.done
}

func (n *Network) release() {
	for _, s := range []*socket{n.links, n.tables, n.conns} {
		if s != nil {
			s.close()
		}
	}
	if n.home >= 0 {
		_ = unix.Close(n.home)
		n.home = -1
	}
}
