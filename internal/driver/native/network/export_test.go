package network

import "net/netip"

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

// Private says whether an address lies in a private block, and which.
func Private(addr netip.Addr) (block [2]netip.Addr, is bool) {
	for _, s := range neverPublic {
		if s.first <= number(addr) && number(addr) <= s.last {
			return [2]netip.Addr{address(s.first), address(s.last)}, true
		}
	}
	return block, false
}
