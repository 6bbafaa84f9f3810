package cli_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/covehq/cove/internal/cli"
)

func TestTemplateBuild_Rebuild(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("building templates needs root")
	}
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "templates"), 0o755); err != nil {
		t.Fatal(err)
	}
	definition := "name = 'own'\n[files]\n'/etc/own' = 'whole'\n"
	if err := os.WriteFile(filepath.Join(dir, "templates", "own.toml"), []byte(definition), 0o644); err != nil {
		t.Fatal(err)
	}
	build := func(more ...string) string {
		t.Helper()
		var out, log bytes.Buffer
		args := append([]string{"template", "build", "own", "--json", "--data-dir", dir}, more...)
		if code := cli.Main(t.Context(), args, cli.Streams{In: os.Stdin, Out: &out, Err: &log}); code != 0 {
			t.Fatalf("exit status %d: %s", code, &log)
		}
		var built struct{ Digest string }
		if err := json.Unmarshal(out.Bytes(), &built); err != nil || built.Digest == "" {
			t.Fatalf("it printed %s (%v)", &out, err)
		}
		return built.Digest
	}
	first := build()
	if again := build(); again != first {
		t.Errorf("nothing has changed, and the digest is %s after %s", again, first)
	}
	// The server refuses a template that does not work by its digest.
	if again := build("--rebuild"); again == first {
		t.Errorf("built again it has the digest of the template that does not work")
	}
}
