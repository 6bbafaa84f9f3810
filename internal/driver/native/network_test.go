package native_test

import (
	"net/netip"
	"testing"

	"github.com/covehq/cove/internal/driver/native"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
)

// The maker does not rely on the server, which has checked the same before.
func TestMaker_PrivateNeedsOperator(t *testing.T) {
	m := newMaker(t)
	private := policy.Network{Mode: policy.List, Allow: []netip.Prefix{netip.MustParsePrefix("10.77.0.2/32")}}
	with := func(n policy.Network) func(*sandbox.StartRequest) {
		return func(r *sandbox.StartRequest) { r.Network = n }
	}
	if b, err := m.tryStart(t, with(private)); !fault.Is(err, fault.Invalid) {
		t.Errorf("a start: %v", err)
		if err == nil {
			b.stop()
		}
	}
	b, err := m.tryStart(t, with(policy.Network{Mode: policy.Internet}))
	must(t, err)
	defer b.stop()
	if err := m.driver.Change(t.Context(), b.id, sandbox.Change{Network: &private}); !fault.Is(err, fault.Invalid) {
		t.Errorf("a change: %v", err)
	}
	must(t, native.AllowNetworks(m.dir, policy.Rules{Private: map[string][]netip.Prefix{"another": {netip.MustParsePrefix("10.0.0.0/8")}}}))
	if err := m.driver.Change(t.Context(), b.id, sandbox.Change{Network: &private}); !fault.Is(err, fault.Invalid) {
		t.Errorf("what another tenant may name: %v", err)
	}
	must(t, native.AllowNetworks(m.dir, policy.Rules{Private: map[string][]netip.Prefix{tenant: {netip.MustParsePrefix("10.0.0.0/8")}}}))
	must(t, m.driver.Change(t.Context(), b.id, sandbox.Change{Network: &private}))
}
