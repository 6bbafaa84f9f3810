package network

import (
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// patience is how long a detached link may take to go with its namespace before the janitor deletes it. The namespace
// does that for many at once and on nobody's time, so it should usually win.
const patience = time.Second

// janitor removes leftovers in the background: links whose namespace still lives, and conntrack entries, of which an
// established TCP connection would otherwise keep its own for five days.
type janitor struct {
	n    *Network
	wake chan struct{}
	done chan struct{}

	mu      sync.Mutex
	pending map[netip.Addr]int32 // address to the index of its link, 0 when that is gone
	busy    map[netip.Addr]bool  // what flush is at
	idle    *sync.Cond           // signalled when busy has become empty
}

func newJanitor(n *Network) *janitor {
	j := &janitor{n: n, wake: make(chan struct{}, 1), done: make(chan struct{}), pending: map[netip.Addr]int32{}}
	j.idle = sync.NewCond(&j.mu)
	return j
}

// put hands over what a detached sandbox may leave in the kernel. It never waits for work under way.
func (j *janitor) put(addr netip.Addr, index int32) {
	j.mu.Lock()
	j.pending[addr] = index
	j.mu.Unlock()
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

func (j *janitor) run(ctx context.Context) {
	defer close(j.done)
	for {
		select {
		case <-ctx.Done():
			return
		case <-j.wake:
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(patience):
		}
		j.flush()
	}
}

// flush does what is pending now.
func (j *janitor) flush() {
	j.mu.Lock()
	work := j.pending
	j.pending, j.busy = map[netip.Addr]int32{}, map[netip.Addr]bool{}
	for addr := range work {
		j.busy[addr] = true
	}
	j.mu.Unlock()

	j.remove(work)

	j.mu.Lock()
	j.busy = nil
	j.mu.Unlock()
	j.idle.Broadcast()
}

func (j *janitor) remove(work map[netip.Addr]int32) {
	links := slices.DeleteFunc(slices.Collect(maps.Values(work)), func(index int32) bool { return index == 0 })
	if err := errors.Join(j.n.unlinkAll(links), j.n.disconnect(slices.Collect(maps.Keys(work)))); err != nil {
		j.n.log.Warn("network leftovers stay", "error", err)
	}
}

// forget clears what an address left behind before it is given to another sandbox, whose connections must not be
// counted with, or cut by, those of the former.
func (j *janitor) forget(addr netip.Addr) {
	j.mu.Lock()
	for j.busy[addr] {
		j.idle.Wait()
	}
	index, pending := j.pending[addr]
	delete(j.pending, addr)
	j.mu.Unlock()
	if pending {
		j.remove(map[netip.Addr]int32{addr: index})
	}
}

// Attributes of linux/netfilter/nfnetlink_conntrack.h.
const (
	ctDelete       = 2  // IPCTNL_MSG_CT_DELETE
	ctTupleOrig    = 1  // CTA_TUPLE_ORIG
	ctTupleIP      = 1  // CTA_TUPLE_IP
	ctSource       = 1  // CTA_IP_V4_SRC
	ctFilter       = 25 // CTA_FILTER
	ctFilterOrig   = 1  // CTA_FILTER_ORIG_FLAGS
	ctFilterSource = 1  // CTA_FILTER_F_CTA_IP_SRC
)

// disconnect deletes the conntrack entries of connections that these addresses opened. Kernels before 6.6 cannot do
// that by source (they answer EINVAL, for want of the rest of a tuple) and are asked to list the whole table instead.
func (n *Network) disconnect(addrs []netip.Addr) error {
	for i, addr := range addrs {
		m := message{what: "forget connections of " + addr.String(), typ: unix.NFNL_SUBSYS_CTNETLINK<<8 | ctDelete, flags: unix.NLM_F_ACK,
			body: attrs{unix.AF_INET, 1, 0, 0}} // version 1: the family counts
		m.body.nest(ctTupleOrig, func(a *attrs) {
			a.nest(ctTupleIP, func(a *attrs) { a.put(ctSource, source(addr)...) })
		})
		m.body.nest(ctFilter, func(a *attrs) { a.put(ctFilterOrig, binary.NativeEndian.AppendUint32(nil, ctFilterSource)...) })
		_, err := n.conns.exchange(m)
		switch {
		case err == nil, errors.Is(err, unix.ENOENT):
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
			return disconnectByListing(addrs[i:])
		default:
			return err
		}
	}
	return nil
}

func disconnectByListing(addrs []netip.Addr) error {
	var filters []netlink.CustomConntrackFilter
	for _, addr := range addrs {
		f := &netlink.ConntrackFilter{}
		if err := f.AddIP(netlink.ConntrackOrigSrcIP, net.IP(source(addr))); err != nil {
			return err
		}
		filters = append(filters, f)
	}
	_, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, filters...)
	return err
}
