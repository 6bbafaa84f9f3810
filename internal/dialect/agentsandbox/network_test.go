package agentsandbox_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/policy"
)

func TestATemplateSaysWhatMayLeave(t *testing.T) {
	w := newWorld(t)
	public, except := netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("198.51.100.7/32")
	internet, none := policy.Network{Mode: policy.Internet}, policy.Network{Mode: policy.None}
	for name, c := range map[string]struct {
		spec  string
		want  policy.Network
		warns bool
	}{
		"nothing-said":  {``, internet, false},
		"unmanaged":     {`"networkPolicyManagement":"Unmanaged","networkPolicy":{"egress":[]},`, internet, false},
		"nothing":       {`"networkPolicy":{"egress":[]},`, none, false},
		"only-ingress":  {`"networkPolicy":{"ingress":[{}]},`, none, false},
		"everywhere":    {`"networkPolicy":{"egress":[{}]},`, internet, false},
		"the-world":     {`"networkPolicy":{"egress":[{"to":[{"ipBlock":{"cidr":"0.0.0.0/0","except":["198.51.100.7/32"]}},{"ipBlock":{"cidr":"::/0"}}]}]},`, policy.Network{Mode: policy.Internet, Deny: []netip.Prefix{except}}, false},
		"a-block":       {`"networkPolicy":{"egress":[{"to":[{"ipBlock":{"cidr":"198.51.100.9/24","except":["198.51.100.7/32"]}}]}]},`, policy.Network{Mode: policy.List, Allow: []netip.Prefix{public}, Deny: []netip.Prefix{except}}, false},
		"a-private-one": {`"networkPolicy":{"egress":[{"to":[{"ipBlock":{"cidr":"10.0.0.0/8"}}]}]},`, none, true},
		"around-it":     {`"networkPolicy":{"egress":[{"to":[{"ipBlock":{"cidr":"0.0.0.0/1"}}]}]},`, none, true},
		"no-exception":  {`"networkPolicy":{"egress":[{"to":[{"ipBlock":{"cidr":"0.0.0.0/0","except":["198.51.100.7/33"]}}]}]},`, none, true},
		"no-prefix":     {`"networkPolicy":{"egress":[{"to":[{"ipBlock":{"cidr":"198.51.100.0/24","except":["198.51.100.7"]}}]}]},`, none, true},
		"no-list":       {`"networkPolicy":{"egress":[{"to":[{"ipBlock":{"cidr":"198.51.100.0/24","except":"198.51.100.7/32"}}]}]},`, none, true},
		"second-is-bad": {`"networkPolicy":{"egress":[{"to":[{"ipBlock":{"cidr":"198.51.100.0/24","except":["198.51.100.7/32",7]}}]}]},`, none, true},
		"of-another-ip": {`"networkPolicy":{"egress":[{"to":[{"ipBlock":{"cidr":"198.51.100.0/24","except":["2001:db8::/32"]}}]}]},`, none, true},
		"one-block-bad": {`"networkPolicy":{"egress":[{"to":[{"ipBlock":{"cidr":"192.0.2.0/24","except":["x"]}},{"ipBlock":{"cidr":"198.51.100.0/24"}}]}]},`, policy.Network{Mode: policy.List, Allow: []netip.Prefix{public}}, true},
		"pods":          {`"networkPolicy":{"egress":[{"to":[{"podSelector":{}}]}]},`, none, true},
		"a-port":        {`"networkPolicy":{"egress":[{"ports":[{"port":443}]}]},`, none, true},
	} {
		t.Run(name, func(t *testing.T) {
			got := w.ask("POST", tmpls, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxTemplate","metadata":{"name":"`+name+`"},"spec":{`+c.spec+`"podTemplate":{"spec":{"containers":[{"name":"main","image":"base"}]}}}}`)
			if warned := strings.Contains(got.header.Get("Warning"), "networkPolicy"); got.status != 201 || warned != c.warns {
				t.Errorf("%d %s %q", got.status, got.body, got.header.Get("Warning"))
			}
			id := w.claimed(name, `"warmPoolRef":{"name":"`+name+`"}`)
			sb, err := w.manager.Get(t.Context(), auth.Principal{Tenant: "acme"}, id)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, sb.Network, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
				t.Error(diff)
			}
		})
	}
}
