package maker_test

import (
	"os"
	"path/filepath"
	"testing"

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
	want := "the layers of template changed were changed after they were built; end the maker (cove maker stop), remove the layer that its log names and start the server, which builds it again"
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

	// As the refusal says.
	m.close()
	for filepath.Base(filepath.Dir(layer)) != "layers" {
		layer = filepath.Dir(layer)
	}
	noError(t, os.RemoveAll(layer))
	m.open()
	m.start(m.build("changed")).shows("as built", "cat", "/etc/motd")
}
