package kubernetes_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/driver/kubernetes"
	"github.com/covehq/cove/internal/policy"
)

func prefixes(texts ...string) (list []netip.Prefix) {
	for _, text := range texts {
		list = append(list, netip.MustParsePrefix(text))
	}
	return list
}

func TestAPolicyBecomesRanges(t *testing.T) {
	internet := kubernetes.Egress("acme", policy.Network{Mode: policy.Internet})[0]
	for _, private := range []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "127.0.0.0/8", "100.64.0.0/10", "168.63.129.16/32"} {
		if !strings.Contains(internet, "-"+private) {
			t.Errorf("the internet has %s", private)
		}
	}
	for name, c := range map[string]struct {
		n    policy.Network
		want []string
	}{
		"none":                                 {policy.Network{Mode: policy.None}, nil},
		"the internet":                         {policy.Network{Mode: policy.Internet}, []string{internet}},
		"without something":                    {policy.Network{Mode: policy.Internet, Deny: prefixes("203.0.113.0/24")}, []string{internet + "-203.0.113.0/24"}},
		"without everything":                   {policy.Network{Mode: policy.Internet, Deny: prefixes("0.0.0.0/0")}, nil},
		"an exception":                         {policy.Network{Mode: policy.Internet, Deny: prefixes("0.0.0.0/0"), Allow: prefixes("203.0.113.7/32")}, []string{"203.0.113.7/32"}},
		"a list of everything public":          {policy.Network{Mode: policy.List, Allow: prefixes("0.0.0.0/0")}, []string{internet}},
		"a list that names a metadata service": {policy.Network{Mode: policy.List, Allow: prefixes("169.254.169.254/32", "168.63.129.16/32")}, nil},
		"a list around a metadata service":     {policy.Network{Mode: policy.List, Allow: prefixes("169.254.0.0/16")}, []string{"169.254.0.0/16-169.254.169.0/24-169.254.170.0/24"}},
		"an exception opens nothing else":      {policy.Network{Mode: policy.Internet, Deny: prefixes("0.0.0.0/0"), Allow: prefixes("10.1.0.0/16", "192.0.0.0/8")}, []string{"192.0.0.0/8-192.0.0.0/24-192.168.0.0/16-192.0.0.192/32"}},
		"a list":                               {policy.Network{Mode: policy.List, Allow: prefixes("203.0.113.0/24", "10.1.2.3/32")}, []string{"203.0.113.0/24", "10.1.2.3/32"}},
		"a private network that is not open":   {policy.Network{Mode: policy.List, Allow: prefixes("203.0.113.0/24", "192.168.1.0/24", "10.0.0.0/7")}, []string{"203.0.113.0/24", "10.0.0.0/7-10.0.0.0/8"}},
		"a list without a part":                {policy.Network{Mode: policy.List, Allow: prefixes("203.0.113.0/24"), Deny: prefixes("203.0.113.8/29", "198.51.100.0/24")}, []string{"203.0.113.0/24-203.0.113.8/29"}},
		"a list of which nothing is left":      {policy.Network{Mode: policy.List, Allow: prefixes("203.0.113.0/24"), Deny: prefixes("203.0.0.0/16")}, nil},
		"an address that is not masked":        {policy.Network{Mode: policy.List, Allow: prefixes("203.0.113.9/24")}, []string{"203.0.113.0/24"}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := kubernetes.Egress("acme", c.n, prefixes("10.0.0.0/8", "169.254.0.0/16")...); !slices.Equal(got, c.want) {
				t.Errorf("%v, not %v", got, c.want)
			}
		})
	}
}

func TestEgress_PrivateOfAnotherTenant(t *testing.T) {
	n := policy.Network{Mode: policy.List, Allow: prefixes("203.0.113.0/24", "10.1.2.3/32")}
	if got, want := kubernetes.Egress("other", n, prefixes("10.0.0.0/8")...), []string{"203.0.113.0/24"}; !slices.Equal(got, want) {
		t.Errorf("%v, not %v", got, want)
	}
}

func TestOnlyServersMayConnect(t *testing.T) {
	d, err := kubernetes.New(t.Context(), kubernetes.Config{
		Namespace: "boxes", Image: "cove", Owner: "x", Templates: map[string]kubernetes.Template{"python": {Image: "img"}}, Rest: newAPI(t).config(), Policies: true,
		Servers: map[string]string{"app": "cove"}, ServerNamespace: "cove-system", ServerRanges: prefixes("192.0.2.0/24"),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	spec := d.PolicyAll().Spec
	if len(spec.PolicyTypes) != 2 || len(spec.Egress) != 0 || len(spec.Ingress) != 1 || len(spec.Ingress[0].From) != 2 || len(spec.Ingress[0].Ports) != 1 {
		t.Fatalf("%+v", spec)
	}
	for _, from := range spec.Ingress[0].From {
		if from.IPBlock == nil && (from.PodSelector.MatchLabels["app"] != "cove" || from.NamespaceSelector.MatchLabels["kubernetes.io/metadata.name"] != "cove-system") {
			t.Errorf("%+v", from)
		}
	}
}
