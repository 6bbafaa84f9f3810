package sandbox_test

import (
	"maps"
	"testing"

	"github.com/covehq/cove/internal/sandbox"
)

func TestACensusCountsTheLivingOfAllTenants(t *testing.T) {
	w := newWorld(t, sandbox.Config{})
	w.create(sandbox.Spec{})
	ended := w.create(sandbox.Spec{Template: "base"})
	if _, _, err := w.Create(t.Context(), globex, sandbox.Spec{}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Kill(t.Context(), acme, ended.ID); err != nil {
		t.Fatal(err)
	}
	want := map[sandbox.Standing]int{{State: sandbox.StateRunning, Template: "python"}: 2}
	if got := w.Census(); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
