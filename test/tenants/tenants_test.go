package tenants_test

import (
	"fmt"
	"slices"
	"testing"
)

// TestTenants tries every route of every dialect as its owner and as another tenant.
func TestTenants(t *testing.T) {
	w := newWorld(t)
	for _, p := range []*tenant{w.a, w.b} {
		w.furnishCove(p)
		w.furnishE2B(p)
		w.furnishOpenSandbox(p)
		w.furnishKubernetes(p)
	}
	w.settles()
	t.Run("native", func(t *testing.T) { w.run(t, "cove", coveTrials) })
	t.Run("links", func(t *testing.T) { w.run(t, "link", linkTrials) })
	t.Run("E2B", func(t *testing.T) {
		w.run(t, "e2b", e2bTrials)
		w.run(t, "e2bbuild", e2bBuildTrials)
		w.run(t, "envd", envdTrials)
		w.run(t, "interpreter", interpreterTrials)
		w.run(t, "port", portTrials)
	})
	t.Run("OpenSandbox", func(t *testing.T) {
		w.run(t, "opensandbox", opensandboxTrials)
		w.run(t, "execd", execdTrials)
		w.run(t, "egress", egressTrials)
		w.run(t, "opensandbox", osPortTrials)
	})
	t.Run("Kubernetes", func(t *testing.T) {
		w.discovered(t)
		w.run(t, "kubernetes", kubernetesTrials())
		w.run(t, "router", runtimeTrials)
		w.run(t, "router", routerPortTrials)
	})
	t.Run("last", func(t *testing.T) { w.run(t, "cove", lastTrials) })
}

func (w *world) run(t *testing.T, dialect string, trials []trial) {
	trials = slices.Clone(trials)
	// Listings first: B has not named anything of A's yet, so that all names in its answers are leaks.
	slices.SortStableFunc(trials, func(x, y trial) int { return rank(x) - rank(y) })
	for _, tr := range trials {
		tr.dialect = dialect
		if slices.Contains([]string{"envd", "interpreter", "port"}, dialect) {
			tr.differs = byStatus
		}
		t.Run(tr.title(), func(t *testing.T) {
			living := map[*tenant][]string{}
			for _, p := range []*tenant{w.a, w.b} {
				living[p] = w.living(p)
			}
			w.try(t, tr)
			if dialect == "kubernetes" { // the server follows objects after it has answered
				w.settles()
				return
			}
			for _, p := range []*tenant{w.a, w.b} { // what the trial made
				for _, id := range w.living(p) {
					if !slices.Contains(living[p], id) {
						_ = p.api.Sandbox(id).Kill(t.Context()) // it may just have ended
					}
				}
			}
		})
	}
}

// settles waits until two looks at what A has are the same: from then on only requests change it.
func (w *world) settles() {
	w.Helper()
	before := w.state(w.a)
	w.eventually("what A has stays as it is", func() error {
		after := w.state(w.a)
		diff := changes(before, after)
		before = after
		if len(diff) > 0 {
			return fmt.Errorf("%w: %s", errNotYet, diff)
		}
		return nil
	})
}

func rank(tr trial) int {
	if tr.kind == listing {
		return 0
	}
	return 1
}
