// Package policy says what may leave a sandbox; who enforces it is the driver's business.
package policy

import (
	"net/netip"

	"github.com/covehq/cove/internal/fault"
)

// Mode is the stance of a sandbox's network.
type Mode string

// The modes.
const (
	Internet Mode = "internet" // public addresses, minus Deny, which Allow has exceptions from; private ones always refused
	None     Mode = "none"     // no packet leaves
	List     Mode = "list"     // only Allow, minus Deny; private addresses only when Allow names them
)

// Network is one sandbox's network policy. In mode Internet Allow wins over Deny and opens nothing else: host, loopback,
// private and link-local addresses stay refused. In mode List Deny wins over Allow.
type Network struct {
	Mode  Mode           `json:"mode"`
	Allow []netip.Prefix `json:"allow,omitempty"`
	Deny  []netip.Prefix `json:"deny,omitempty"`
}

// MaxPrefixes bounds each list, so that one sandbox cannot fill the host's sets.
const MaxPrefixes = 256

// Validate refuses what cannot be enforced.
func (n Network) Validate() error {
	switch n.Mode {
	case Internet:
	case None:
		if len(n.Allow) > 0 {
			return fault.New(fault.Invalid, "network mode %q takes no allow list; use mode %q", n.Mode, List)
		}
	case List:
		if len(n.Allow) == 0 {
			return fault.New(fault.Invalid, "network mode %q needs an allow list", n.Mode)
		}
	default:
		return fault.New(fault.Invalid, "unknown network mode %q: use internet, none or list", n.Mode)
	}
	for _, list := range [][]netip.Prefix{n.Allow, n.Deny} {
		if len(list) > MaxPrefixes {
			return fault.New(fault.Invalid, "a network list holds at most %d prefixes", MaxPrefixes)
		}
		for _, p := range list {
			if !p.IsValid() || !p.Addr().Is4() {
				return fault.New(fault.Invalid, "network prefix %q: only IPv4 leaves a sandbox", p)
			}
		}
	}
	return nil
}
