package app

import (
	"context"
	"strings"
	"testing"
)

func TestNamesLead(t *testing.T) {
	for _, c := range []struct {
		name, domain string
		found        []string
		says         string
	}{
		{"loopback", "cove.localhost", []string{"::1", "127.0.0.1"}, ""},
		{"no name below localhost", "cove.localhost", nil,
			"the C library knows no name below cove.localhost: apt-get install libnss-myhostname"},
		{"no record", "cove.example", nil, "no name below cove.example is known: add a DNS record for *.cove.example"},
		{"another machine", "cove.example", []string{"192.0.2.7"},
			"names below cove.example lead to 192.0.2.7, which is not an address of this machine: a proxy there must pass the host on"},
	} {
		t.Run(c.name, func(t *testing.T) {
			asked := ""
			got := namesLead(c.domain, func(_ context.Context, name string) []string { asked = name; return c.found })
			if got != c.says || asked != "49983-name-check."+c.domain {
				t.Errorf("%q after a question for %q, want %q", got, asked, c.says)
			}
		})
	}
}

// TestNamesLead_NoAnswer: a DNS server that does not answer is not a record that is missing.
func TestNamesLead_NoAnswer(t *testing.T) {
	for _, domain := range []string{"cove.example", "cove.localhost"} {
		got := namesLead(domain, func(ctx context.Context, _ string) []string { <-ctx.Done(); return nil })
		if !strings.HasPrefix(got, "the lookup of a name below "+domain+" had no answer within 1s: ") {
			t.Errorf("%s: %q", domain, got)
		}
	}
}

func TestLookup_AsTheCLibraryDoes(t *testing.T) {
	if got := lookup(t.Context(), "localhost"); len(got) == 0 || !isHere(got[0]) {
		t.Errorf("localhost: %q", got)
	}
	if got := lookup(t.Context(), "no-such-name.invalid"); len(got) != 0 {
		t.Errorf("a name that is not there: %q", got)
	}
}
