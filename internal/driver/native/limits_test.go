package native_test

import (
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// TestMaker_LimitsAreRequired has the maker refuse sandboxes without limits, which a server that
// an attacker has taken over may ask for.
func TestMaker_LimitsAreRequired(t *testing.T) {
	m := newMaker(t)
	b, err := m.tryStart(t, func(r *sandbox.StartRequest) { r.Limits = template.Limits{} })
	if !fault.Is(err, fault.Invalid) {
		t.Errorf("a start: %v", err)
		if err == nil {
			b.stop()
		}
	}
	parent, err := m.tryStart(t)
	must(t, err)
	defer parent.stop()
	_, err = m.driver.Fork(t.Context(), sandbox.ForkRequest{
		Parent: parent.id, Children: []sandbox.ForkChild{{ID: "child", Network: policy.Network{Mode: policy.None}}},
	})
	if !fault.Is(err, fault.Invalid) {
		t.Errorf("a fork: %v", err)
	}
}
