package e2b_test

import (
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/dialect/e2b"
	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/sandbox"
)

func TestASandboxFindsWhatItIsInFilesOfRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the agent of this test is a goroutine, and only root can write as root")
	}
	dir := filepath.Join(t.TempDir(), "e2b")
	w := newWorld(t, func(c *e2b.Config, _ *sandbox.Config) { c.Facts = dir })
	facts := func() map[string]string {
		all := map[string]string{}
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			text, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				t.Fatal(err)
			}
			all[e.Name()] = string(text)
		}
		return all
	}
	check := func(id, template string) {
		t.Helper()
		want := map[string]string{".E2B_SANDBOX": "true", ".E2B_SANDBOX_ID": id, ".E2B_TEMPLATE_ID": template}
		if diff := cmp.Diff(want, facts()); diff != "" {
			t.Error(diff)
		}
	}

	// The start command looks for them: they are there before it runs.
	w.builder.start = &build.Start{Command: "cp " + dir + "/.E2B_SANDBOX_ID " + dir + ".seen", Ready: "test -s " + dir + ".seen"}
	sb := w.create(`{"templateID":"server"}`)
	check(sb.SandboxID, "tmpl1")
	if seen, err := os.ReadFile(dir + ".seen"); err != nil || string(seen) != sb.SandboxID {
		t.Errorf("the start command saw %q: %v", seen, err)
	}

	w.builder.start = nil
	var copies []e2b.Forked
	w.ask(http.StatusCreated, "POST", "/sandboxes/"+sb.SandboxID+"/fork", `{"timeout":60}`, &copies)
	check(copies[0].Sandbox.SandboxID, "tmpl1")
}

// Where a driver isolates nothing, /run is the host's, which may have such files itself.
func TestTheHostsOwnFactsStay(t *testing.T) {
	const file = "/run/e2b/.E2B_SANDBOX_ID"
	before, _ := os.ReadFile(file)
	w := newWorld(t)
	w.create(`{"templateID":"base"}`)
	if after, _ := os.ReadFile(file); string(after) != string(before) {
		t.Errorf("%s was %q and is %q", file, before, after)
	}
}
