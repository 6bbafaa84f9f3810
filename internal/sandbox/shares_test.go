package sandbox_test

import (
	"testing"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func TestOperations_ShareOfTenant(t *testing.T) {
	claims(t, sandbox.Config{MaxOperations: 2}, map[string]func(*testing.T, *world){
		"the third at the same time is exhausted, and one after an end is not": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			other, _, err := w.Create(t.Context(), globex, sandbox.Spec{})
			if err != nil {
				t.Fatal(err)
			}
			sleep := agentapi.ExecParams{Argv: []string{"sleep"}}
			first, err := w.Exec(t.Context(), acme, id, sleep)
			if err != nil {
				t.Fatal(err)
			}
			second, err := w.Exec(t.Context(), acme, id, sleep)
			if err != nil {
				t.Fatal(err)
			}
			_, err = w.Exec(t.Context(), acme, id, sleep)
			wantKind(t, err, fault.Exhausted)
			theirs, err := w.Exec(t.Context(), globex, other.ID, sleep)
			if err != nil {
				t.Fatalf("another tenant's: %v", err)
			}
			theirs.Close()
			second.Close()
			third, err := w.Exec(t.Context(), acme, id, sleep)
			if err != nil {
				t.Fatalf("after one has ended: %v", err)
			}
			third.Close()
			first.Close()
		},
	})
}
