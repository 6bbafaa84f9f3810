package policy_test

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
)

func list(texts ...string) (out []netip.Prefix) {
	for _, text := range texts {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

func TestRules_Check(t *testing.T) {
	granted := policy.Rules{Private: map[string][]netip.Prefix{policy.EveryTenant: list("10.77.0.0/16"), "acme": list("192.168.7.0/24")}}
	lists, nothing := policy.Rules{MaxMode: policy.List}, policy.Rules{MaxMode: policy.None}
	for name, c := range map[string]struct {
		rules  policy.Rules
		n      policy.Network
		tenant string
		says   string // empty: allowed
	}{
		"internet":                      {policy.Rules{}, policy.Network{Mode: policy.Internet}, "acme", ""},
		"public":                        {policy.Rules{}, policy.Network{Mode: policy.List, Allow: list("198.51.100.0/24")}, "acme", ""},
		"around private":                {policy.Rules{}, policy.Network{Mode: policy.List, Allow: list("0.0.0.0/0", "8.0.0.0/5")}, "acme", ""},
		"private denied":                {policy.Rules{}, policy.Network{Mode: policy.Internet, Deny: list("10.0.0.0/8")}, "acme", ""},
		"private":                       {policy.Rules{}, policy.Network{Mode: policy.List, Allow: list("10.77.0.2/32")}, "acme", "network.private"},
		"not masked":                    {policy.Rules{}, policy.Network{Mode: policy.List, Allow: list("10.77.0.2/9")}, "acme", "network.private"},
		"shared by carriers":            {policy.Rules{}, policy.Network{Mode: policy.List, Allow: list("100.64.1.0/24")}, "acme", "network.private"},
		"link-local":                    {policy.Rules{}, policy.Network{Mode: policy.List, Allow: list("169.254.1.1/32")}, "acme", "network.private"},
		"one of two":                    {policy.Rules{}, policy.Network{Mode: policy.List, Allow: list("198.51.100.0/24", "172.16.0.1/32")}, "acme", "172.16.0.1/32"},
		"an exception":                  {policy.Rules{}, policy.Network{Mode: policy.Internet, Deny: list("0.0.0.0/0"), Allow: list("10.77.0.2/32")}, "acme", "network.private"},
		"open to all":                   {granted, policy.Network{Mode: policy.List, Allow: list("10.77.0.2/32", "10.77.0.0/16")}, "globex", ""},
		"wider than what is open":       {granted, policy.Network{Mode: policy.List, Allow: list("10.76.0.0/15")}, "globex", "network.private"},
		"open to one":                   {granted, policy.Network{Mode: policy.List, Allow: list("192.168.7.9/32")}, "acme", ""},
		"open to another":               {granted, policy.Network{Mode: policy.List, Allow: list("192.168.7.9/32")}, "globex", "network.private"},
		"open, and no list":             {granted, policy.Network{Mode: policy.Internet, Allow: list("10.77.0.2/32")}, "acme", "use mode \"list\""},
		"a tenant of the key's name":    {granted, policy.Network{Mode: policy.List, Allow: list("192.168.7.9/32")}, policy.EveryTenant, "network.private"},
		"metadata":                      {granted, policy.Network{Mode: policy.List, Allow: list("169.254.169.254/32")}, "acme", "no sandbox"},
		"metadata at a public address":  {granted, policy.Network{Mode: policy.List, Allow: list("168.63.129.16/32")}, "acme", "no sandbox"},
		"loopback":                      {granted, policy.Network{Mode: policy.List, Allow: list("127.0.0.1/32")}, "acme", "no sandbox"},
		"multicast":                     {granted, policy.Network{Mode: policy.List, Allow: list("239.1.1.1/32")}, "acme", "no sandbox"},
		"internet over the ceiling":     {lists, policy.Network{Mode: policy.Internet}, "acme", "network.max_mode"},
		"a list under the ceiling":      {lists, policy.Network{Mode: policy.List, Allow: list("198.51.100.0/24", "11.0.0.0/9")}, "acme", ""},
		"the internet as a list":        {lists, policy.Network{Mode: policy.List, Allow: list("0.0.0.0/0")}, "acme", "network.max_mode"},
		"the internet as a list of two": {lists, policy.Network{Mode: policy.List, Allow: list("0.0.0.0/1", "128.0.0.0/1")}, "acme", "network.max_mode"},
		"a list over the ceiling":       {nothing, policy.Network{Mode: policy.List, Allow: list("198.51.100.0/24")}, "acme", "network.max_mode"},
		"none":                          {nothing, policy.Network{Mode: policy.None}, "acme", ""},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.rules.Check(c.n, c.tenant)
			if (c.says == "") != (err == nil) || err != nil && (!fault.Is(err, fault.Invalid) || !errors.Is(err, policy.ErrForbidden) || !strings.Contains(fault.Message(err), c.says)) {
				t.Errorf("%v, want %q", err, c.says)
			}
		})
	}
}

func TestRules_Validate(t *testing.T) {
	for _, bad := range []policy.Rules{
		{MaxMode: "all"},
		{Private: map[string][]netip.Prefix{"acme": list("198.51.100.0/24")}},
		{Private: map[string][]netip.Prefix{"acme": list("0.0.0.0/0")}},
		{Private: map[string][]netip.Prefix{policy.EveryTenant: list("fd00::/8")}},
		{Private: map[string][]netip.Prefix{policy.EveryTenant: list("10.0.0.1/8")}},
		{Private: map[string][]netip.Prefix{policy.EveryTenant: list("127.0.0.0/8")}},
		{Private: map[string][]netip.Prefix{policy.EveryTenant: list("169.254.169.254/32")}},
		{Private: map[string][]netip.Prefix{policy.EveryTenant: {{}}}},
	} {
		if err := bad.Validate(); !fault.Is(err, fault.Invalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	good := policy.Rules{MaxMode: policy.None, Private: map[string][]netip.Prefix{policy.EveryTenant: list("10.0.0.0/8", "169.254.0.0/16")}}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
}

func TestRules_Narrow(t *testing.T) {
	rules := policy.Rules{Private: map[string][]netip.Prefix{"acme": list("10.77.0.0/16")}}
	for name, c := range map[string]struct{ n, want policy.Network }{
		"allowed":            {policy.Network{Mode: policy.List, Allow: list("10.77.0.2/32")}, policy.Network{Mode: policy.List, Allow: list("10.77.0.2/32")}},
		"one of two":         {policy.Network{Mode: policy.List, Allow: list("10.0.0.1/32", "10.77.0.2/32")}, policy.Network{Mode: policy.List, Allow: list("10.77.0.2/32")}},
		"nothing left":       {policy.Network{Mode: policy.List, Allow: list("10.0.0.1/32"), Deny: list("10.0.0.1/32")}, policy.Network{Mode: policy.None}},
		"an exception fewer": {policy.Network{Mode: policy.Internet, Allow: list("10.0.0.1/32"), Deny: list("0.0.0.0/0")}, policy.Network{Mode: policy.Internet, Deny: list("0.0.0.0/0")}},
	} {
		t.Run(name, func(t *testing.T) {
			got := rules.Narrow(c.n, "acme")
			if got.Mode != c.want.Mode || !slices.Equal(got.Allow, c.want.Allow) || !slices.Equal(got.Deny, c.want.Deny) {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
	if got := (policy.Rules{MaxMode: policy.List}).Narrow(policy.Network{Mode: policy.Internet}, "acme"); got.Mode != policy.None {
		t.Errorf("over the ceiling: %+v", got)
	}
}

func TestRules_DefaultMode(t *testing.T) {
	for _, c := range []struct{ most, wanted, want policy.Mode }{
		{"", "", policy.Internet}, {policy.Internet, "", policy.Internet}, {policy.List, "", policy.None}, {policy.None, "", policy.None},
		{policy.None, policy.Internet, policy.Internet}, // which the check refuses then
	} {
		if got := (policy.Rules{MaxMode: c.most}).DefaultMode(c.wanted); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}
