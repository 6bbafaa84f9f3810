package policy_test

import (
	"net/netip"
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
)

func TestValidate(t *testing.T) {
	some := []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}
	many := make([]netip.Prefix, policy.MaxPrefixes+1)
	for i := range many {
		many[i] = some[0]
	}
	for name, c := range map[string]struct {
		n  policy.Network
		ok bool
	}{
		"the internet":                         {policy.Network{Mode: policy.Internet}, true},
		"the internet but something":           {policy.Network{Mode: policy.Internet, Deny: some}, true},
		"an exception from what is denied":     {policy.Network{Mode: policy.Internet, Deny: some, Allow: some}, true},
		"an exception from nothing":            {policy.Network{Mode: policy.Internet, Allow: some}, true},
		"nothing":                              {policy.Network{Mode: policy.None}, true},
		"nothing but something":                {policy.Network{Mode: policy.None, Allow: some}, false},
		"a list":                               {policy.Network{Mode: policy.List, Allow: some, Deny: some}, true},
		"an empty list":                        {policy.Network{Mode: policy.List, Deny: some}, false},
		"no mode":                              {policy.Network{}, false},
		"a mode that nobody knows":             {policy.Network{Mode: "all"}, false},
		"IPv6":                                 {policy.Network{Mode: policy.Internet, Deny: []netip.Prefix{netip.MustParsePrefix("::/0")}}, false},
		"no prefix":                            {policy.Network{Mode: policy.Internet, Deny: []netip.Prefix{{}}}, false},
		"more exceptions than a host has room": {policy.Network{Mode: policy.Internet, Deny: some, Allow: many}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if err := c.n.Validate(); c.ok != (err == nil) || err != nil && !fault.Is(err, fault.Invalid) {
				t.Fatalf("%+v: %v", c.n, err)
			}
		})
	}
}
