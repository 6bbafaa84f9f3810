package network

import (
	"net/netip"
	"slices"

	"github.com/covehq/cove/internal/policy"
)

// WithoutProtection makes the kernel look as if it could not protect tables, until the returned function is called.
func WithoutProtection() (restore func()) {
	was := protection
	protection = 1 << 31 // a flag that no kernel knows
	return func() { protection = was }
}

// Opens says whether an allow list opens an address, by the cells that the kernel would get.
func Opens(list []netip.Prefix, addr netip.Addr) (opens bool, cells int) {
	made := allowed(list)
	for _, c := range made {
		if number(addr)&cellMask(c.bits) == c.network {
			if opens {
				panic("two cells overlap")
			}
			opens = true
		}
	}
	return opens, len(made)
}

// Private reports whether an address lies in a private block.
func Private(addr netip.Addr) bool {
	return slices.ContainsFunc(policy.Private, func(b netip.Prefix) bool { return b.Contains(addr) })
}
