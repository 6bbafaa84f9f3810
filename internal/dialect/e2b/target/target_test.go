package target_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/sandbox"
)

func TestTokens(t *testing.T) {
	a, b := target.NewTokens([]byte("one secret of a server, long enough")), target.NewTokens([]byte("another"))
	for claim, holds := range map[string]bool{
		"a sandbox keeps its token":           target.Same(a.Envd("x"), a.Envd("x")),
		"each sandbox has its own":            !target.Same(a.Envd("x"), a.Envd("y")),
		"each purpose has its own":            !target.Same(a.Envd("x"), a.Traffic("x")),
		"another server's are others":         !target.Same(a.Envd("x"), b.Envd("x")),
		"nothing is not a token":              !target.Same(a.Envd("x"), ""),
		"it can stand in a header and a path": len(a.Envd("x")) == 64,
	} {
		if !holds {
			t.Error(claim)
		}
	}
}

func TestOptions(t *testing.T) {
	yes := true
	want := target.Options{
		TemplateID: "base", Secure: true, Timeout: 300, AutoPause: true, Internet: &yes,
		Network: json.RawMessage(`{"allowOut":["1.1.1.1"]}`), MaskHost: "x:${PORT}",
	}
	got, err := target.Decode(sandbox.Sandbox{Annotations: map[string]string{target.Annotation: want.Encode()}})
	if err != nil || !cmp.Equal(want, got) {
		t.Errorf("%v %s", err, cmp.Diff(want, got))
	}
	t.Run("a sandbox of another dialect is guarded on every port", func(t *testing.T) {
		o, err := target.Decode(sandbox.Sandbox{Template: "python"})
		if err != nil || !o.Secure || !o.PrivateTraffic || o.TemplateID != "python" {
			t.Errorf("%+v, %v", o, err)
		}
	})
	t.Run("what cannot be read is said", func(t *testing.T) {
		if _, err := target.Decode(sandbox.Sandbox{Annotations: map[string]string{target.Annotation: "{"}}); err == nil {
			t.Error("nothing was said")
		}
	})
}
