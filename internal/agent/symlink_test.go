package agent_test

import (
	"os"
	"testing"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
)

func TestSymlink(t *testing.T) {
	h := newHome(t, agentapi.Boot{})
	link := func(path, target string, remove bool) error {
		return h.Symlink(t.Context(), agentapi.SymlinkParams{Path: path, Target: target, Remove: remove})
	}
	leads := func(claim, path, want string) {
		t.Helper()
		if got, _ := os.Readlink(h.dir + "/" + path); got != want {
			t.Errorf("%s: %s leads to %q", claim, path, got)
		}
	}
	if err := link("deep/er/a", "/datasets/a", false); err != nil {
		t.Fatal(err)
	}
	leads("made, with what is above it", "deep/er/a", "/datasets/a")
	if err := link("deep/er/a", "/datasets/a", false); err != nil {
		t.Errorf("made again: %v", err)
	}
	if err := link("deep/er/a", "/elsewhere", false); !fault.Is(err, fault.Conflict) {
		t.Errorf("over another link: %v", err)
	}
	leads("what is there stays", "deep/er/a", "/datasets/a")
	if err := os.WriteFile(h.dir+"/file", []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := link("file", "/datasets/a", false); !fault.Is(err, fault.Conflict) {
		t.Errorf("over a file: %v", err)
	}
	if err := link("file", "/datasets/a", true); err != nil {
		t.Errorf("to remove a link that is a file: %v", err)
	}
	if err := link("deep/er/a", "/elsewhere", true); err != nil {
		t.Errorf("to remove a link that leads elsewhere: %v", err)
	}
	leads("removed only where it leads there", "deep/er/a", "/datasets/a")
	for range 2 {
		if err := link("deep/er/a", "/datasets/a", true); err != nil {
			t.Errorf("to remove: %v", err)
		}
		leads("removed", "deep/er/a", "")
	}
	if err := link("none/such/a", "/datasets/a", true); err != nil {
		t.Errorf("to remove one of a directory that is not there: %v", err)
	}
	if text, err := os.ReadFile(h.dir + "/file"); err != nil || string(text) != "mine" {
		t.Errorf("the file: %q %v", text, err)
	}
	if err := link("x", "", false); !fault.Is(err, fault.Invalid) {
		t.Errorf("to nowhere: %v", err)
	}
}
