package network

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/covehq/cove/internal/policy"
)

// span is a closed range of IPv4 addresses.
type span struct{ first, last uint32 }

func number(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

func address(v uint32) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, v)))
}

func spanOf(p netip.Prefix) span {
	first := number(p.Masked().Addr())
	return span{first, first | uint32(uint64(1)<<(32-p.Bits())-1)}
}

func spansOf(prefixes []netip.Prefix) []span {
	var spans []span
	for _, p := range prefixes {
		spans = append(spans, spanOf(p))
	}
	return join(spans)
}

var (
	neverPublic = spansOf(policy.Private)
	metadata    = spansOf(policy.Metadata)
)

// join sorts spans and merges those that touch: the kernel's interval sets refuse elements that overlap.
func join(spans []span) []span {
	spans = slices.Clone(spans)
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.first, b.first) })
	var out []span
	for _, s := range spans {
		if n := len(out); n > 0 && uint64(s.first) <= uint64(out[n-1].last)+1 {
			out[n-1].last = max(out[n-1].last, s.last)
			continue
		}
		out = append(out, s)
	}
	return out
}

// subtract takes joined holes out of one span.
func subtract(s span, holes []span) []span {
	var out []span
	for _, h := range holes {
		if h.last < s.first || h.first > s.last {
			continue
		}
		if h.first > s.first {
			out = append(out, span{s.first, h.first - 1})
		}
		if h.last >= s.last {
			return out
		}
		s.first = h.last + 1
	}
	return append(out, s)
}

// allowed turns an allow list into cells. Private addresses open only if a prefix names them, that is
// if it lies within one private block: "0.0.0.0/0" means every public address and not the operator's
// LAN, and 224.0.0.0/3, which is two private blocks, opens nothing.
func allowed(prefixes []netip.Prefix) []cell {
	var out []span
	for _, p := range prefixes {
		s := spanOf(p)
		if policy.Named(p) {
			out = append(out, s)
		} else {
			out = append(out, subtract(s, neverPublic)...)
		}
	}
	return cells(join(out))
}

// cellsOf turns a list into cells as it is.
func cellsOf(prefixes []netip.Prefix) []cell {
	var out []span
	for _, p := range prefixes {
		out = append(out, spanOf(p))
	}
	return cells(join(out))
}

// cell is a network whose length is one of cellBits: an entry of a list as the kernel keeps it.
//
// The sets of lists are hash tables of (source, network, length), asked once per length, longest first. The kernel's own
// sets of ranges per source would be asked once, but copy all sandboxes' ranges for every change: 4.5 ms with 16 ranges
// in each of 200 sandboxes, and growing with both, where this costs what the one list costs. Nine lengths instead of
// thirty-three make a network at most eight cells.
type cell struct {
	network uint32
	bits    uint32
}

var cellBits = []uint32{32, 28, 24, 20, 16, 12, 8, 4, 0}

func cellMask(bits uint32) uint32 { return uint32(^uint64(0) << (32 - bits)) }

// cells cuts joined spans into cells, the largest that fit.
func cells(spans []span) []cell {
	var out []cell
	for _, s := range spans {
		for at := uint64(s.first); at <= uint64(s.last); {
			for _, bits := range slices.Backward(cellBits) {
				size := uint64(1) << (32 - bits)
				if at%size == 0 && at+size-1 <= uint64(s.last) {
					out = append(out, cell{uint32(at), bits})
					at += size
					break
				}
			}
		}
	}
	return out
}

// minus is what a has and b has not.
func minus(a, b []cell) []cell {
	if len(a) == 0 || len(b) == 0 {
		return a
	}
	known := make(map[cell]bool, len(b))
	for _, c := range b {
		known[c] = true
	}
	return slices.DeleteFunc(slices.Clone(a), func(c cell) bool { return known[c] })
}
