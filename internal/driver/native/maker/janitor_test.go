package maker_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/fault"
)

func TestATemplateWhoseLayerWasChangedIsNotStartedFrom(t *testing.T) {
	m := newMaker(t, map[string]string{
		"changed": "[host]\ntrees = ['/usr']\n[files]\n'/etc/motd' = 'as built'",
		"other":   "[host]\ntrees = ['/usr']\n[files]\n'/etc/motd' = 'the other'",
	})
	changed, other := m.build("changed"), m.build("other")
	for _, tenant := range []string{"acme", "umbrella"} {
		r, err := m.tryStart(tenant, changed)
		noError(t, err)
		r.shows("as built", "cat", "/etc/motd")
		r.stop()
	}
	living := m.start(changed)

	layer := changed.Trees[0].Lower[0]
	noError(t, os.WriteFile(filepath.Join(layer, "etc", "hosts"), []byte("6.6.6.6 localhost\n"), 0o644))
	var refusal error
	await(t, "the refusal", func() bool {
		var r *room
		if r, refusal = m.tryStart("acme", changed); refusal == nil {
			r.stop()
		}
		return refusal != nil
	})
	want := "the layers of template changed were changed after they were built: no sandbox starts from it until it is built again"
	if !fault.Is(refusal, fault.Unavailable) || fault.Message(refusal) != want {
		t.Errorf("it is refused with %v", refusal)
	}
	_, again := m.tryStart("umbrella", changed)
	for claim, err := range map[string]error{"another who has used it": again, "one who has not": m.driver.Prepare(t.Context(), "initech", changed)} {
		if !fault.Is(err, fault.Unavailable) || fault.Message(err) != want {
			t.Errorf("%s is told %v", claim, err)
		}
	}
	living.shows("as built", "cat", "/etc/motd")
	m.start(other).shows("the other", "cat", "/etc/motd")

	noError(t, m.driver.Ready(t.Context()))
	if diff := cmp.Diff(map[string]string{"changed": changed.Digest}, m.driver.Spoilt()); diff != "" {
		t.Errorf("the maker tells these spoilt templates: %s", diff)
	}
	rebuilt, err := m.store.Repair(t.Context(), "changed", nil)
	noError(t, err)
	if rebuilt.Digest == changed.Digest {
		t.Error("a template that was built again has the digest of the spoilt one")
	}
	m.start(rebuilt).shows("as built", "cat", "/etc/motd")
	living.shows("as built", "cat", "/etc/motd")
}
