package auth_test

import (
	"strings"
	"sync"
	"testing"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
)

func TestAKeyThatTheOperatorChose(t *testing.T) {
	chosen := auth.Secret("e2b_" + strings.Repeat("0a", 20))

	t.Run("is an admin's, also after the next start", func(t *testing.T) {
		keys, store := newKeys(t)
		for range 2 {
			if err := keys.Admit(t.Context(), chosen, "local", "local admin"); err != nil {
				t.Fatal(err)
			}
			keys = auth.NewKeys(store)
		}
		got, err := keys.Authenticate(t.Context(), string(chosen))
		if err != nil || got.Tenant != "local" || !got.Admin {
			t.Fatalf("it is %+v, %v", got, err)
		}
		if all, err := keys.List(t.Context(), "local"); len(all) != 1 || err != nil {
			t.Errorf("there are %d keys, %v", len(all), err)
		}
	})
	t.Run("is one key when several servers start at once", func(t *testing.T) {
		keys, store := newKeys(t)
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				if err := auth.NewKeys(store).Admit(t.Context(), chosen, "local", ""); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if made, err := keys.List(t.Context(), "local"); len(made) != 1 || err != nil {
			t.Errorf("there are %d keys, %v", len(made), err)
		}
	})
	t.Run("stays revoked", func(t *testing.T) {
		keys, _ := newKeys(t)
		if err := keys.Admit(t.Context(), chosen, "local", ""); err != nil {
			t.Fatal(err)
		}
		made, _ := keys.List(t.Context(), "local")
		if err := keys.Revoke(t.Context(), "local", made[0].ID); err != nil {
			t.Fatal(err)
		}
		if err := keys.Admit(t.Context(), chosen, "local", ""); !fault.Is(err, fault.Conflict) {
			t.Errorf("it is admitted again: %v", err)
		}
	})
	for name, text := range map[string]auth.Secret{
		"is not empty": "", "has its prefix": chosen[4:], "is not longer": chosen + "0", "has hex digits": "e2b_" + auth.Secret(strings.Repeat("0g", 20)),
	} {
		t.Run(name, func(t *testing.T) {
			keys, _ := newKeys(t)
			err := keys.Admit(t.Context(), text, "local", "")
			if !fault.Is(err, fault.Invalid) {
				t.Fatalf("it is taken: %v", err)
			}
			if text != "" && strings.Contains(err.Error(), string(text)) {
				t.Errorf("the error tells it: %v", err)
			}
		})
	}
}
