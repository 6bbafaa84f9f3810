package agent_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/covehq/cove/internal/agentapi"
)

func TestACellTellsWhetherItsBoxIsEmpty(t *testing.T) {
	h := newHome(t, agentapi.Boot{ID: "a"})
	cmd := h.fork(t, "k", "t1")
	defer func() {
		_ = h.KernelStop(t.Context(), agentapi.KernelParams{Kernel: "k"})
		_ = cmd.Wait()
	}()
	dir := t.TempDir()
	empty, full, linked := filepath.Join(dir, "empty"), filepath.Join(dir, "full"), filepath.Join(dir, "linked")
	for _, d := range []string{empty, filepath.Join(full, "below")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(empty, linked); err != nil {
		t.Fatal(err)
	}
	for box, want := range map[string]bool{empty: true, full: false, linked: false, filepath.Join(dir, "missing"): false, "": false} {
		if _, end := h.cell(t, agentapi.RunParams{Kernel: "k", Code: "echo hi", Box: box}); end.Empty != want {
			t.Errorf("%q is told to be empty: %v", box, end.Empty)
		}
	}
}
