package access

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
)

// Policy is what may leave a sandbox, as OpenSandbox says it.
type Policy struct {
	DefaultAction Action `json:"defaultAction,omitempty"` // empty: deny
	Egress        []Rule `json:"egress,omitempty"`
}

// Action is what happens to a packet.
type Action string

// The actions.
const (
	Allow Action = "allow"
	Deny  Action = "deny"
)

// Rule is one line of a Policy; the first that matches wins.
type Rule struct {
	Action Action `json:"action"`
	Target string `json:"target"` // a name, *.name, an IP address or a CIDR block
}

// MarshalJSON writes a policy as clients read it: with its default action and a list that is never null.
func (p Policy) MarshalJSON() ([]byte, error) {
	type plain struct {
		DefaultAction Action `json:"defaultAction"`
		Egress        []Rule `json:"egress"`
	}
	out := plain{p.Default(), p.Egress}
	if out.Egress == nil {
		out.Egress = []Rule{}
	}
	return json.Marshal(out)
}

// Default is what happens to what no rule names.
func (p Policy) Default() Action {
	if p.DefaultAction == "" {
		return Deny
	}
	return p.DefaultAction
}

// Normalise writes a policy as it is compared: the case of actions does not matter, nor what is around a target.
func (p *Policy) Normalise() {
	p.DefaultAction = lower(p.Default())
	for i := range p.Egress {
		p.Egress[i].Normalise()
	}
}

// Normalise does the same for one rule.
func (r *Rule) Normalise() {
	r.Action, r.Target = lower(r.Action), strings.TrimSpace(r.Target)
}

func lower(a Action) Action { return Action(strings.ToLower(string(a))) }

// MaxRules is how many rules a policy may have.
const MaxRules = 4096

var everywhere = netip.MustParsePrefix("0.0.0.0/0")

// ruled is a rule about addresses.
type ruled struct {
	prefix netip.Prefix
	allow  bool
}

// Network says it in the domain's words, and whether it only takes away: then it opens nothing where the server's default
// is stricter. In the domain an allowed block wins over every denied one; here the first rule wins that names an address.
// Of two blocks one contains the other or they have nothing in common: a rule inside of an earlier one is never reached,
// and of the rest the narrowest is the first. So what is denied inside of an allowed block is cut out of it.
func (p Policy) Network() (n policy.Network, narrows bool, err error) {
	live, err := p.live()
	if err != nil {
		return policy.Network{}, false, err
	}
	n.Mode = policy.Internet
	if p.Default() == Deny {
		n.Deny = append(n.Deny, everywhere)
	}
	for _, r := range live {
		if !r.allow {
			n.Deny = append(n.Deny, r.prefix)
			continue
		}
		var holes []netip.Prefix
		for _, inner := range live {
			if !inner.allow && within(inner.prefix, r.prefix) {
				holes = append(holes, inner.prefix)
			}
		}
		n.Allow = append(n.Allow, without(r.prefix, holes)...)
	}
	all := slices.Contains(n.Deny, everywhere)
	switch {
	case len(n.Deny) == 0: // what is allowed by name was open before
		n.Allow = slices.DeleteFunc(n.Allow, func(p netip.Prefix) bool { return !policy.Named(p) }) // the domain refuses private ones
	case all && len(n.Allow) == 0:
		return policy.Network{Mode: policy.None}, false, nil
	case all: // a list may name private networks, where the operator has opened them
		n = policy.Network{Mode: policy.List, Allow: n.Allow}
	}
	if len(n.Allow) == 0 {
		n.Allow = nil
	}
	return n, !all, n.Validate()
}

// live are the rules that some address reaches, but for those of IPv6, of which nothing leaves a sandbox anyway.
func (p Policy) live() ([]ruled, error) {
	if d := p.Default(); d != Allow && d != Deny {
		return nil, fault.New(fault.Invalid, "defaultAction %.40q: use allow or deny", d)
	}
	if len(p.Egress) > MaxRules {
		return nil, fault.New(fault.Invalid, "a network policy has at most %d rules, not %d", MaxRules, len(p.Egress))
	}
	var live []ruled
	for _, rule := range p.Egress {
		r, err := rule.parse()
		if err != nil {
			return nil, err
		}
		dead := slices.ContainsFunc(live, func(earlier ruled) bool { return within(r.prefix, earlier.prefix) })
		if r.prefix.Addr().Is4() && !dead {
			live = append(live, r)
		}
	}
	if len(live) > policy.MaxPrefixes {
		return nil, fault.New(fault.Invalid, "%d egress rules name different addresses; at most %d can be enforced", len(live), policy.MaxPrefixes)
	}
	return live, nil
}

func (r Rule) parse() (ruled, error) {
	if r.Action != Allow && r.Action != Deny {
		return ruled{}, fault.New(fault.Invalid, "the action of an egress rule is allow or deny, not %.40q", r.Action)
	}
	prefix, ok := block(r.Target)
	switch {
	case r.Target == "":
		return ruled{}, fault.New(fault.Invalid, "an egress rule needs a target")
	case !ok:
		return ruled{}, fault.New(fault.Invalid, "egress target %.80q: rules for domain names are not served here yet; use IP addresses or CIDR blocks", r.Target)
	case r.Action == Allow && !prefix.Addr().Is4():
		return ruled{}, fault.New(fault.Invalid, "egress target %.80q is IPv6; only IPv4 leaves a sandbox", r.Target)
	}
	return ruled{prefix, r.Action == Allow}, nil
}

// block reads an address or a block of them.
func block(text string) (netip.Prefix, bool) {
	if addr, err := netip.ParseAddr(text); err == nil && addr.Zone() == "" {
		return netip.PrefixFrom(addr.Unmap(), addr.Unmap().BitLen()), true
	}
	p, err := netip.ParsePrefix(text)
	if err != nil || p.Addr().Is4In6() { // which is two things at once
		return netip.Prefix{}, false
	}
	return p.Masked(), true
}

// within tells whether all of inner is in outer.
func within(inner, outer netip.Prefix) bool {
	return inner.Addr().BitLen() == outer.Addr().BitLen() && outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

// without is a block but for the holes in it.
func without(p netip.Prefix, holes []netip.Prefix) []netip.Prefix {
	hit := slices.ContainsFunc(holes, func(h netip.Prefix) bool { return within(h, p) })
	switch {
	case slices.ContainsFunc(holes, func(h netip.Prefix) bool { return within(p, h) }):
		return nil
	case !hit:
		return []netip.Prefix{p}
	}
	low, high := halves(p)
	return append(without(low, holes), without(high, holes)...)
}

func halves(p netip.Prefix) (low, high netip.Prefix) {
	bits := p.Bits() + 1
	b := p.Addr().As4()
	low = netip.PrefixFrom(netip.AddrFrom4(b), bits)
	b[(bits-1)/8] |= 0x80 >> ((bits - 1) % 8)
	return low, netip.PrefixFrom(netip.AddrFrom4(b), bits)
}
