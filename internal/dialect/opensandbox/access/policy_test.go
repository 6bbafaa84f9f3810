package access_test

import (
	"encoding/json"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
)

func rules(pairs ...string) (list []access.Rule) {
	for i := 0; i < len(pairs); i += 2 {
		list = append(list, access.Rule{Action: access.Action(pairs[i]), Target: pairs[i+1]})
	}
	return list
}

func TestAPolicyInTheDomainsWords(t *testing.T) {
	p := netip.MustParsePrefix
	for name, c := range map[string]struct {
		policy  access.Policy
		want    policy.Network
		narrows bool
	}{
		"nothing is deny":      {access.Policy{}, policy.Network{Mode: policy.None}, false},
		"allow":                {access.Policy{DefaultAction: "allow"}, policy.Network{Mode: policy.Internet}, true},
		"allow by name":        {access.Policy{DefaultAction: "allow", Egress: rules("allow", "1.1.1.1")}, policy.Network{Mode: policy.Internet}, true},
		"an address":           {access.Policy{Egress: rules("allow", "1.1.1.1")}, policy.Network{Mode: policy.List, Allow: []netip.Prefix{p("1.1.1.1/32")}}, false},
		"deny a block":         {access.Policy{DefaultAction: "allow", Egress: rules("deny", "1.0.0.7/8")}, policy.Network{Mode: policy.Internet, Deny: []netip.Prefix{p("1.0.0.0/8")}}, true},
		"a rule never reached": {access.Policy{DefaultAction: "allow", Egress: rules("deny", "1.0.0.0/8", "allow", "1.1.1.1")}, policy.Network{Mode: policy.Internet, Deny: []netip.Prefix{p("1.0.0.0/8")}}, true},
		"a hole": {access.Policy{Egress: rules("deny", "1.1.1.1", "allow", "1.1.1.0/30")},
			policy.Network{Mode: policy.List, Allow: []netip.Prefix{p("1.1.1.0/32"), p("1.1.1.2/31")}}, false},
		"a private network": {access.Policy{Egress: rules("allow", "192.168.1.0/24")}, policy.Network{Mode: policy.List, Allow: []netip.Prefix{p("192.168.1.0/24")}}, false},
		"a private network and all else": {access.Policy{DefaultAction: "allow", Egress: rules("allow", "192.168.1.0/24", "allow", "1.1.1.1")},
			policy.Network{Mode: policy.Internet, Allow: []netip.Prefix{p("192.168.1.0/24")}}, true}, // which the domain refuses
		"IPv6 is closed anyway": {access.Policy{DefaultAction: "allow", Egress: rules("deny", "2001:db8::/32")}, policy.Network{Mode: policy.Internet}, true},
	} {
		t.Run(name, func(t *testing.T) {
			got, narrows, err := c.policy.Network()
			if diff := cmp.Diff(c.want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); err != nil || diff != "" || narrows != c.narrows {
				t.Errorf("%v, narrows %v\n%s", err, narrows, diff)
			}
		})
	}
	for name, bad := range map[string]access.Policy{
		"a name": {Egress: rules("allow", "example.com")}, "a star": {Egress: rules("deny", "*.example.com")}, "no target": {Egress: rules("allow", "")},
		"no action": {Egress: rules("", "1.1.1.1")}, "another default": {DefaultAction: "drop"}, "IPv6": {Egress: rules("allow", "2001:db8::1")},
		"too many": {Egress: make([]access.Rule, access.MaxRules+1)},
	} {
		if _, _, err := bad.Network(); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// first is what OpenSandbox means: the first rule that names an address decides.
func first(p access.Policy, addr netip.Addr) bool {
	for _, r := range p.Egress {
		if block, err := netip.ParsePrefix(r.Target); err == nil && block.Contains(addr) {
			return r.Action == access.Allow
		}
	}
	return p.Default() == access.Allow
}

// enforced is what the domain means by modes internet and list.
func enforced(n policy.Network, addr netip.Addr) bool {
	in := func(list []netip.Prefix) bool {
		for _, p := range list {
			if p.Contains(addr) {
				return true
			}
		}
		return false
	}
	return n.Mode == policy.Internet && (in(n.Allow) || !in(n.Deny)) || n.Mode == policy.List && in(n.Allow) && !in(n.Deny)
}

func TestTheFirstRuleWins(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	addr := func() netip.Addr {
		return netip.AddrFrom4([4]byte{8, 8, byte(random.IntN(2)), byte(random.IntN(256))})
	}
	for range 2000 {
		p := access.Policy{DefaultAction: []access.Action{"", access.Allow, access.Deny}[random.IntN(3)]}
		for range random.IntN(8) {
			block := netip.PrefixFrom(addr(), 20+random.IntN(13)).Masked()
			p.Egress = append(p.Egress, access.Rule{Action: []access.Action{access.Allow, access.Deny}[random.IntN(2)], Target: block.String()})
		}
		n, _, err := p.Network()
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			if a := addr(); first(p, a) != enforced(n, a) {
				t.Fatalf("%s: %+v is enforced as %+v", a, p, n)
			}
		}
	}
}

func FuzzPolicy(f *testing.F) {
	f.Add(`{"defaultAction":"deny","egress":[{"action":"allow","target":"1.2.3.4"}]}`)
	f.Add(`{"egress":[{"action":"deny","target":"::ffff:1.2.3.4/97"},{"action":"allow","target":"0.0.0.0/0"}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		var p access.Policy
		if json.Unmarshal([]byte(text), &p) != nil {
			return
		}
		n, _, err := p.Network()
		if err == nil {
			err = n.Validate()
		}
		if err != nil && !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", text, err)
		}
	})
}
