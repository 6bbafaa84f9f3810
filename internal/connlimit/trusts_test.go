package connlimit

import (
	"net/netip"
	"testing"
)

func TestLimiter_Trusts(t *testing.T) {
	for _, c := range []struct {
		trusted, peer string
		want          bool
	}{
		{"::1/128", "::1", true},
		{"2001:db8::7/128", "2001:db8::7", true},
		{"2001:db8::7/128", "2001:db8::8", false},
		{"2001:db8::/64", "2001:db8::8", true},
		{"10.0.0.7/32", "10.0.0.7", true},
		{"10.0.0.7/32", "10.0.0.8", false},
	} {
		l := New(Config{Trusted: []netip.Prefix{netip.MustParsePrefix(c.trusted)}}, nil)
		if got := l.trusts(netip.MustParseAddr(c.peer)); got != c.want {
			t.Errorf("%s trusted, %s: %v", c.trusted, c.peer, got)
		}
	}
}
