package agentsandbox

import (
	"net/netip"
	"slices"

	"github.com/covehq/cove/internal/policy"
)

// networkOf is what may leave a template's sandboxes; nil: what the server says. A rule that cannot be carried out here opens
// nothing: rather too little than what somebody meant to close. exact tells whether there was none of that kind. opens tells
// which private networks the operator lets a template open.
func networkOf(t *object, opens func(netip.Prefix) bool) (n *policy.Network, exact bool) {
	given, managed := t.spec()["networkPolicy"].(fields)
	if !managed || text(t.spec(), "networkPolicyManagement") == "Unmanaged" {
		return nil, true
	}
	n, exact = &policy.Network{Mode: policy.None}, true
	for _, rule := range list(given, "egress") {
		f, _ := rule.(fields)
		to := list(f, "to")
		if len(list(f, "ports")) > 0 {
			exact = false
			continue
		}
		if len(to) == 0 { // everywhere
			n.Mode = policy.Internet
		}
		for _, peer := range to {
			p, _ := peer.(fields)
			exact = addPeer(n, inner(p, "ipBlock"), opens) && exact
		}
	}
	switch n.Mode {
	case policy.Internet:
		exact = exact && !slices.ContainsFunc(n.Allow, policy.Named) // mode internet has no private networks
		n.Allow = nil                                                // everything is, already
	case policy.List:
	case policy.None:
		n.Deny = nil
	}
	return n, exact && len(n.Allow) <= policy.MaxPrefixes && len(n.Deny) <= policy.MaxPrefixes
}

// opens tells which private networks a tenant's templates may open.
func (a *API) opens(tenant string) func(netip.Prefix) bool {
	return func(p netip.Prefix) bool { return a.cfg.Networks.Opens(p, tenant) }
}

// addPeer opens a block of addresses without its exceptions. It opens nothing if sandboxes may not
// reach the block, or if an exception cannot be read.
func addPeer(n *policy.Network, block fields, opens func(netip.Prefix) bool) (exact bool) {
	p, err := netip.ParsePrefix(text(block, "cidr"))
	if err != nil { // other Pods, of which there are none
		return false
	}
	if p.Addr().Is6() { // of which nothing leaves a sandbox
		return p.Bits() == 0
	}
	p = p.Masked()
	deny, ok := exceptions(block)
	if !ok {
		return false
	}
	switch {
	case p.Bits() == 0:
		n.Mode = policy.Internet
	case slices.ContainsFunc(policy.Private, p.Overlaps) && !opens(p):
		return false
	case n.Mode == policy.None:
		n.Mode = policy.List
	}
	if p.Bits() > 0 {
		n.Allow = append(n.Allow, p)
	}
	n.Deny = append(n.Deny, deny...)
	return true
}

// exceptions reads the exceptions of an IPv4 block. It reports false if one of them cannot be read.
func exceptions(block fields) (all []netip.Prefix, ok bool) {
	given, ok := block["except"].([]any)
	if !ok {
		return nil, block["except"] == nil
	}
	for _, v := range given {
		s, _ := v.(string)
		p, err := netip.ParsePrefix(s)
		if err != nil || !p.Addr().Is4() {
			return nil, false
		}
		all = append(all, p.Masked())
	}
	return all, true
}
