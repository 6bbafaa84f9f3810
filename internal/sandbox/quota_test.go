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

func TestPortConnections_OwnQuota(t *testing.T) {
	claims(t, sandbox.Config{MaxOperations: 1}, map[string]func(*testing.T, *world){
		"connections to ports leave the tenant its operations": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			ports, err := w.PortAgent(t.Context(), acme, id)
			if err != nil {
				t.Fatal(err)
			}
			sleep := agentapi.ExecParams{Argv: []string{"sleep"}}
			visitor, err := ports.Exec(t.Context(), sleep) // any operation counts, and the double knows this one
			if err != nil {
				t.Fatal(err)
			}
			defer visitor.Close()
			_, err = ports.Exec(t.Context(), sleep)
			wantKind(t, err, fault.Exhausted)
			own, err := w.Exec(t.Context(), acme, id, sleep)
			if err != nil {
				t.Fatalf("the owner's command: %v", err)
			}
			own.Close()
		},
	})
}
