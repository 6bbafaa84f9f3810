package kernel_test

import (
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/kernel"
	"github.com/covehq/cove/test/slow"
)

// packages are what the tests of rich results and of preloading need.
var packages = []string{"ipython", "numpy", "pandas<3", "matplotlib"}

func TestTheFilesAreThere(t *testing.T) {
	for _, name := range []string{"kernel.py", "charts.py", "state.py", "node.js", "kernel.java", "kernel.R", "zygote.py", "native/shim.c", "native/serve.c", "native/branch.c", "native/README"} {
		if b, err := fs.ReadFile(kernel.Files(), name); err != nil || len(b) == 0 {
			t.Errorf("%s: %d bytes, %v", name, len(b), err)
		}
	}
	if got := kernel.Shim("arm64"); got != "native/shim-arm64.so" {
		t.Errorf("Shim: %q", got)
	}
}

func TestKernelWithoutIPython(t *testing.T) {
	slow.Test(t)
	t.Parallel()
	claims(t, "test_kernel.py", "COVE_TEST_SHELL=plain", "COVE_TEST_PYTHON="+python3(t))
}

func TestKernelWithIPython(t *testing.T) {
	t.Parallel()
	claims(t, "test_kernel.py", "COVE_TEST_SHELL=ipython", "COVE_TEST_PYTHON="+richPython(t))
}

// TestPreload_HollowPackage imports a directory without an __init__.py, which Python takes for a namespace package.
func TestPreload_HollowPackage(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "hollow"), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(python3(t), "-c", "import zygote; r, empty = zygote.preload(['hollow', 'json', 'time']); print(empty, r['hollow'], type(r['json']), type(r['time']))")
	cmd.Env = append(os.Environ(), "PYTHONPATH="+dir, "PYTHONDONTWRITEBYTECODE=1")
	out, err := cmd.CombinedOutput()
	want := "['hollow'] ImportError: there is a directory of that name and no module: a part of its package is missing <class 'float'> <class 'float'>\n"
	if err != nil || string(out) != want {
		t.Errorf("got %q, %v", out, err)
	}
}

func TestNode(t *testing.T) {
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("this host has no Node")
	}
	t.Parallel()
	claims(t, "test_node.py", "COVE_TEST_NODE="+node)
}

func TestJava(t *testing.T) {
	java, err := exec.LookPath("java")
	if err != nil {
		t.Skip("this host has no Java")
	}
	if _, err := exec.LookPath("jshell"); err != nil {
		t.Skip("this host has no JShell")
	}
	t.Parallel()
	claims(t, "test_java.py", "COVE_TEST_JAVA="+java)
}

func TestZygoteAsRootByShim(t *testing.T) {
	needRoot(t)
	t.Parallel()
	claims(t, "test_zygote.py", "COVE_TEST_WAY=shim", "COVE_TEST_PYTHON="+richPython(t), "COVE_TEST_KERNEL_DIR="+built(t))
}

func TestZygoteAsRootByPython(t *testing.T) {
	slow.Test(t)
	needRoot(t)
	t.Parallel()
	claims(t, "test_zygote.py", "COVE_TEST_WAY=python", "COVE_TEST_PYTHON="+richPython(t), "COVE_TEST_KERNEL_DIR="+built(t))
}

// claims runs a file of Python tests and reports each of them as a test of its own.
func claims(t *testing.T, file string, env ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, python3(t), filepath.Join("testdata", file))
	cmd.Env = append(os.Environ(), append(env, "PYTHONDONTWRITEBYTECODE=1")...)
	out, err := cmd.CombinedOutput()
	ran := 0
	for line := range strings.Lines(string(out)) {
		name, rest, found := strings.Cut(line, " (__main__.")
		if !found || !strings.HasPrefix(name, "test_") || !strings.Contains(rest, " ... ") {
			continue
		}
		ran++
		t.Run(strings.TrimPrefix(name, "test_"), func(t *testing.T) {
			switch word := strings.TrimSpace(rest[strings.LastIndex(rest, " ... ")+5:]); {
			case strings.HasPrefix(word, "FAIL"), strings.HasPrefix(word, "ERROR"):
				t.Fail()
			case strings.HasPrefix(word, "skipped"):
				t.Skip(word)
			}
		})
	}
	if err != nil || ran == 0 {
		t.Fatalf("%s: %v\n%s", file, err, out)
	}
}

func python3(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Fatalf("these tests need python3: %v", err)
	}
	// A version manager's wrapper decides anew in each folder; ask for the program itself.
	out, err := exec.Command(path, "-c", "import sys; print(sys.executable)").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// richPython is an interpreter that has IPython and the usual libraries: COVE_TEST_PYTHON, or a virtual environment that is
// made once and kept.
func richPython(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("COVE_TEST_PYTHON"); path != "" {
		return path
	}
	path, err := virtualenv(python3(t))
	if err != nil {
		t.Fatalf("no Python with %s; set COVE_TEST_PYTHON to one: %v", strings.Join(packages, ", "), err)
	}
	return path
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root can play the maker: it makes user namespaces that another user owns")
	}
}

// built is a kernel directory with a freshly compiled shim.
func built(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, kernel.Files()); err != nil {
		t.Fatal(err)
	}
	for at := dir; at != os.TempDir() && at != "/"; at = filepath.Dir(at) {
		if err := os.Chmod(at, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	shim := filepath.Join(dir, kernel.Shim(runtime.GOARCH))
	source := func(name string) string { return filepath.Join(dir, "native", name) }
	if err := os.RemoveAll(shim); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", shim, source("shim.c"), source("serve.c"), source("branch.c")).CombinedOutput(); err != nil {
		t.Fatalf("compile the shim: %v\n%s", err, out)
	}
	return dir
}
