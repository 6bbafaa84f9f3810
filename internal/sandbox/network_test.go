package sandbox_test

import (
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
)

func listOf(texts ...string) *policy.Network {
	n := policy.Network{Mode: policy.List}
	for _, text := range texts {
		n.Allow = append(n.Allow, netip.MustParsePrefix(text))
	}
	return &n
}

func TestNetwork_PrivateNeedsOperator(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, sandbox.Config{})
		wantRefused := func(err error) {
			t.Helper()
			if !fault.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), "network.private") {
				t.Errorf("got %v", err)
			}
		}
		_, _, err := w.Create(t.Context(), acme, sandbox.Spec{Network: listOf("10.77.0.2/32")})
		wantRefused(err)
		id := w.create(sandbox.Spec{}).ID
		_, err = w.SetNetwork(t.Context(), acme, id, *listOf("198.51.100.0/24", "10.77.0.2/32"))
		wantRefused(err)
		if got := w.get(id).Network.Mode; got != policy.Internet {
			t.Errorf("a refused change left mode %s", got)
		}
	})
}

func TestNetwork_PrivateOfOneTenant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rules := policy.Rules{Private: map[string][]netip.Prefix{acme.Tenant: {netip.MustParsePrefix("10.77.0.0/16")}}}
		w := newWorld(t, sandbox.Config{Networks: rules})
		id := w.create(sandbox.Spec{Network: listOf("10.77.0.2/32")}).ID
		if forked := w.fork(id, sandbox.ForkSpec{Count: 1}).Sandboxes[0]; len(forked.Network.Allow) != 1 {
			t.Errorf("a fork has %+v", forked.Network)
		}
		if _, _, err := w.Create(t.Context(), globex, sandbox.Spec{Network: listOf("10.77.0.2/32")}); !fault.Is(err, fault.Invalid) {
			t.Errorf("another tenant's list: %v", err)
		}
	})
}

func TestNetwork_CeilingBesideDefault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, sandbox.Config{Networks: policy.Rules{MaxMode: policy.List}})
		if got := w.create(sandbox.Spec{}).Network.Mode; got != policy.None {
			t.Errorf("the default under the ceiling is %s", got)
		}
		w.create(sandbox.Spec{Network: listOf("198.51.100.0/24")})
		_, _, err := w.Create(t.Context(), acme, sandbox.Spec{Network: &policy.Network{Mode: policy.Internet}})
		if !fault.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), "network.max_mode") {
			t.Errorf("got %v", err)
		}
	})
	wrong := sandbox.Config{Networks: policy.Rules{MaxMode: policy.None}, DefaultNetwork: policy.Network{Mode: policy.Internet}}
	if err := wrong.Validate(); err == nil {
		t.Error("a default over the ceiling is accepted")
	}
}

func TestNetwork_ForkOfForbidden(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		private := map[string][]netip.Prefix{acme.Tenant: {netip.MustParsePrefix("10.77.0.0/16")}}
		w := newWorld(t, sandbox.Config{Networks: policy.Rules{Private: private}})
		id := w.create(sandbox.Spec{Network: listOf("10.77.0.2/32")}).ID
		delete(private, acme.Tenant) // the rules of the running server
		_, err := w.Fork(t.Context(), acme, id, sandbox.ForkSpec{Count: 1})
		if !fault.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), "network.private") {
			t.Errorf("got %v", err)
		}
		w.wantUnforked(id, 0)
	})
}

func TestNetwork_NarrowedAtRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, sandbox.Config{Networks: policy.Rules{Private: map[string][]netip.Prefix{policy.EveryTenant: {netip.MustParsePrefix("10.0.0.0/8")}}}})
		id := w.create(sandbox.Spec{Network: listOf("10.77.0.2/32", "198.51.100.0/24")}).ID
		w.cfg.Networks = policy.Rules{}
		w.restart()
		if got := w.get(id).Network; len(got.Allow) != 1 || got.Allow[0].String() != "198.51.100.0/24" {
			t.Errorf("after a restart it has %+v", got)
		}
		w.driver.mu.Lock()
		defer w.driver.mu.Unlock()
		if got := w.driver.boxes[id].req.Network; len(got.Allow) != 1 {
			t.Errorf("its driver enforces %+v", got)
		}
	})
}

func TestNetwork_NotNarrowedIsEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		private := map[string][]netip.Prefix{policy.EveryTenant: {netip.MustParsePrefix("10.0.0.0/8")}}
		w := newWorld(t, sandbox.Config{Networks: policy.Rules{Private: private}})
		id := w.create(sandbox.Spec{Network: listOf("10.77.0.2/32")}).ID
		w.cfg.Networks = policy.Rules{}
		w.driver.failWith(failing("change", 100, fault.New(fault.Unavailable, "the driver is away")))
		w.restart()
		if sb := w.get(id); sb.State != sandbox.StateEnded {
			t.Errorf("it is %s with %+v", sb.State, sb.Network)
		}
	})
}
