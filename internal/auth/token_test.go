package auth_test

import (
	"testing"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

func TestTokensAreToldApart(t *testing.T) {
	a, b := auth.NewTokens([]byte("0123456789abcdef0123456789abcdef")), auth.NewTokens([]byte("another789abcdef0123456789abcdef"))
	seen := map[string]bool{}
	for _, token := range []string{a.Derive("x", "1"), a.Derive("x", "2"), a.Derive("y", "1"), a.Derive("x", "1", "2"), a.Derive("x", "12"), a.Derive("x"), b.Derive("x", "1")} {
		if seen[token] || len(token) != 64 {
			t.Errorf("%q", token)
		}
		seen[token] = true
	}
	if !seen[auth.NewTokens([]byte("0123456789abcdef0123456789abcdef")).Derive("x", "1")] || !auth.Same("a", "a") || auth.Same("a", "b") || auth.Same("a", "") {
		t.Error("what is the same differs, or the reverse")
	}
}

func TestGuestsAreWhomTheOperatorSays(t *testing.T) {
	keys, _ := newKeys(t)
	guest, err := keys.Guests("default")
	if err != nil {
		t.Fatal(err)
	}
	if who, err := keys.Authenticate(t.Context(), string(guest)); err != nil || who != (auth.Principal{Tenant: "default"}) {
		t.Errorf("%+v, %v", who, err)
	}
	for _, wrong := range []string{"", "e2b_0000000000000000000000000000000000000000"} {
		if _, err := keys.Authenticate(t.Context(), wrong); !fault.Is(err, fault.Unauthed) {
			t.Errorf("%q: %v", wrong, err)
		}
	}
	other, _ := newKeys(t)
	if _, err := other.Authenticate(t.Context(), string(guest)); !fault.Is(err, fault.Unauthed) {
		t.Errorf("another server lets them in: %v", err)
	}
}
