package archtest_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// prerequisites runs the script that names what a machine lacks; path is all that it finds programs by.
func prerequisites(t *testing.T, path string, args ...string) (out string, err error) {
	t.Helper()
	cmd := exec.Command("/bin/bash", append([]string{filepath.Join(root, "test", "prerequisites")}, args...)...)
	cmd.Env = []string{"PATH=" + path, "HOME=" + t.TempDir()}
	text, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(text)), err
}

func TestPrerequisites_NamesWhatIsMissing(t *testing.T) {
	out, err := prerequisites(t, t.TempDir())
	if err == nil {
		t.Error("a machine without any program has all that the tests need")
	}
	for _, want := range []string{"git", "gcc", "python3", "python3-venv", "apt-get install -y git", "Go 1."} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in: %s", want, out)
		}
	}
}

func TestPrerequisites_AreThoseOfTheDocuments(t *testing.T) {
	run, err := prerequisites(t, os.Getenv("PATH"), "--run")
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	if line := "sudo apt-get install -y " + run + "\n"; !strings.Contains(string(readme), line) {
		t.Errorf("the README's apt line is not: %s", line)
	}
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	script, err := os.ReadFile(filepath.Join(root, "test", "prerequisites"))
	if err != nil {
		t.Fatal(err)
	}
	_, floor, _ := strings.Cut(string(script), "\ngo_floor=")
	floor, _, _ = strings.Cut(floor, "\n")
	if floor == "" || !strings.Contains(string(mod), "\ngo "+floor) {
		t.Errorf("the script wants Go %q, go.mod another one", floor)
	}
}
