package maker_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// newBoxes returns the template "boxes", whose zygote imports a module of the host, and the directory of
// that module. It is not in a layer: there the maker compares the files with what was built, too.
func newBoxes(t *testing.T) (m *realMaker, boxes *template.Template, module string) {
	t.Helper()
	m = newMaker(t, map[string]string{"warm": withZygote})
	host, err := os.MkdirTemp("/opt", "cove-boxes")
	noError(t, err)
	t.Cleanup(func() { os.RemoveAll(host) })
	module = filepath.Join(host, "boxed")
	noError(t, os.Chmod(host, 0o755), os.Mkdir(module, 0o755), os.WriteFile(filepath.Join(module, "__init__.py"), []byte("lid = 1"), 0o644))

	python := m.build("warm").Python.Executable
	site, err := exec.CommandContext(t.Context(), python, "-I", "-c", "import site; print(site.getsitepackages()[0])").Output()
	noError(t, err)
	text := fmt.Sprintf("name = 'boxes'\n[host]\ntrees = ['/usr', '%[1]s']\n[python]\nfind = ['>=3.9,<3.15']\npreload = ['boxed']\n"+
		"[files]\n'%[2]s/boxes.pth' = '%[1]s'", host, strings.TrimSpace(string(site)))
	noError(t, os.WriteFile(filepath.Join(m.templates(), "boxes.toml"), []byte(text), 0o644))
	m.close() // a store reads the definitions when it opens
	m.open()
	return m, m.build("boxes"), module
}

func (m *realMaker) log() string {
	m.t.Helper()
	text, err := os.ReadFile(filepath.Join(m.dir, "maker", "log"))
	noError(m.t, err)
	return string(text)
}

func TestZygote_HollowModule(t *testing.T) {
	m, boxes, module := newBoxes(t)
	m.start(boxes).says("import boxed; print(boxed.lid)", "1")
	m.close()
	m.open()

	noError(t, os.Remove(filepath.Join(module, "__init__.py")))
	_, err := m.tryStart("acme", boxes)
	var said *fault.Error
	if !errors.As(err, &said) || said.Kind != fault.Unavailable || said.Message != "template boxes is damaged: its Python module boxed has no __init__.py" {
		t.Errorf("a start from a hollow package: %v", err)
	}
	if text := m.log(); !strings.Contains(text, "module=boxed") || !strings.Contains(text, "cove doctor --verify") {
		t.Errorf("the maker's log does not tell what is wrong and what to do:\n%s", text)
	}
}

// TestZygote_MissingModule starts: an import may fail, and kernels run without that module.
func TestZygote_MissingModule(t *testing.T) {
	m, boxes, module := newBoxes(t)
	noError(t, os.RemoveAll(module))
	m.start(boxes).says("print(1 + 1)", "2")
	if text := m.log(); !strings.Contains(text, "module=boxed") || !strings.Contains(text, "ModuleNotFoundError: No module named 'boxed'") {
		t.Errorf("the maker's log does not tell of the import:\n%s", text)
	}
}
