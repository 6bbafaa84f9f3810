package policy

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/covehq/cove/internal/fault"
)

// Rules are what the operator allows of networks, whatever a request asks for. The zero value allows every mode and no
// private network.
type Rules struct {
	// MaxMode is the widest mode that a sandbox may have; empty: Internet.
	MaxMode Mode `json:"max_mode,omitempty"`
	// Private holds the private networks that lists of a tenant may name. EveryTenant is a key for all tenants.
	Private map[string][]netip.Prefix `json:"private,omitempty"`
}

// EveryTenant is the key of Rules.Private whose networks every tenant may name.
const EveryTenant = "*"

// MaxListed is how many addresses an allow list may name where MaxMode is List: without a bound, a list of 0.0.0.0/0 would be
// the mode that the ceiling refuses.
const MaxListed = 1 << 24

// ErrForbidden is in the chain of what Check refuses: the policy is a valid one, and this server's
// operator does not allow it. A dialect may answer with another status than for a malformed policy.
var ErrForbidden = errors.New("not allowed by the operator")

// forbidden is a fault.Invalid with ErrForbidden in its chain.
func forbidden(format string, args ...any) error {
	return fault.Wrap(fault.Invalid, ErrForbidden, format, args...)
}

// Validate refuses rules that could not be enforced.
func (r Rules) Validate() error {
	if _, known := width[r.MaxMode]; !known && r.MaxMode != "" {
		return fault.New(fault.Invalid, "unknown network mode %q: use internet, list or none", r.MaxMode)
	}
	for _, list := range r.Private {
		for _, p := range list {
			if err := checkGrant(p); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkGrant refuses to open what is not private, and what no sandbox may reach.
func checkGrant(p netip.Prefix) error {
	switch {
	case !p.IsValid() || !p.Addr().Is4():
		return fault.New(fault.Invalid, "private network %q: only IPv4 leaves a sandbox", p)
	case p != p.Masked():
		return fault.New(fault.Invalid, "private network %s: write it as %s", p, p.Masked())
	case !Named(p):
		return fault.New(fault.Invalid, "private network %s: it does not lie within a private range; lists may name public addresses without it", p)
	case within(p, unreachable):
		return fault.New(fault.Invalid, "private network %s: no sandbox can reach it", p)
	}
	return nil
}

// Check refuses a policy that the operator does not allow the tenant.
func (r Rules) Check(n Network, tenant string) error {
	if most := r.maxMode(); width[n.Mode] > width[most] {
		return forbidden("network mode %q is more than this server allows; the most is %q (network.max_mode)", n.Mode, most)
	}
	for _, p := range n.Allow {
		if err := r.checkAllow(n.Mode, p, tenant); err != nil {
			return err
		}
	}
	if n.Mode == List && r.maxMode() == List && addresses(n.Allow) > MaxListed {
		return forbidden("the allow list names more than the %d addresses that this server allows in a list (network.max_mode = list)", MaxListed)
	}
	return nil
}

// checkAllow judges one prefix of an allow list. One that merely contains private ranges is let through: drivers leave them
// out of it.
func (r Rules) checkAllow(mode Mode, p netip.Prefix, tenant string) error {
	switch {
	case within(p, unreachable):
		return forbidden("network prefix %s is a private network, which no sandbox can reach", p)
	case !Named(p):
		return nil
	case !r.Opens(p, tenant):
		return forbidden("network prefix %s is a private network that this server's operator has not opened to you (network.private)", p)
	case mode == Internet:
		return forbidden("network prefix %s is a private network; mode %q reaches public addresses only, use mode %q", p, Internet, List)
	}
	return nil
}

// Narrow gives the part of a policy that the operator allows the tenant: prefixes that are not allowed leave the list, and a
// list of which nothing is left is mode none.
func (r Rules) Narrow(n Network, tenant string) Network {
	if r.Check(n, tenant) == nil {
		return n
	}
	n.Allow = slices.DeleteFunc(slices.Clone(n.Allow), func(p netip.Prefix) bool { return r.checkAllow(n.Mode, p, tenant) != nil })
	if n.Mode == List && len(n.Allow) == 0 || r.Check(n, tenant) != nil {
		return Network{Mode: None}
	}
	return n
}

// Opens reports whether lists of the tenant may name a private network.
func (r Rules) Opens(p netip.Prefix, tenant string) bool {
	return Named(p) && !within(p, unreachable) && (within(p, r.Private[EveryTenant]) || within(p, r.Private[tenant]))
}

func (r Rules) maxMode() Mode {
	if r.MaxMode == "" {
		return Internet
	}
	return r.MaxMode
}

// DefaultMode returns the mode of a sandbox whose request names none: wanted if it is set, else
// Internet if MaxMode allows it, else None. A wanted over MaxMode is returned too; Check refuses it.
func (r Rules) DefaultMode(wanted Mode) Mode {
	if wanted != "" {
		return wanted
	}
	if r.maxMode() == Internet {
		return Internet
	}
	return None
}

// width orders the modes.
var width = map[Mode]int{None: 1, List: 2, Internet: 3}

// unreachable are addresses that even the operator cannot open.
var unreachable = slices.Concat(Metadata, prefixes("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/4", "240.0.0.0/4"))

// within reports whether one of the blocks contains all of p.
func within(p netip.Prefix, blocks []netip.Prefix) bool {
	return slices.ContainsFunc(blocks, func(b netip.Prefix) bool { return b.Bits() <= p.Bits() && b.Contains(p.Addr()) })
}

// addresses counts what a list names; what is named twice counts twice.
func addresses(list []netip.Prefix) (n uint64) {
	for _, p := range list {
		n += 1 << (32 - p.Bits())
	}
	return n
}
