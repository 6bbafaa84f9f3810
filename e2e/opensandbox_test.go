package e2e_test

import (
	"context"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/slow"
)

// The published OpenSandbox packages against a server: the tests are in opensandbox/python and opensandbox/js, their lock
// files pin everything with hashes. The packages of June run the same Python tests once more.

func TestOpenSandbox(t *testing.T) {
	slow.Test(t)
	tools := openSandboxPackages(t)
	w := newOpenSandboxWorld(t)
	memory := rss(w.cmd.Process.Pid)
	t.Run("suites", func(t *testing.T) {
		for _, suite := range []struct {
			name    string
			command []string
		}{
			{"python", tools.pytest(t, tools.python, "--ignore-glob=*test_async*", "--ignore-glob=*test_wire*", "--ignore-glob=*test_cli*", "--ignore-glob=*test_example*")},
			{"python-async", tools.pytest(t, tools.python, "test_async_sandbox.py", "test_async_inside.py", "test_example.py")},
			{"wire", tools.pytest(t, tools.python, "test_wire.py", "test_cli.py")},
			{"javascript", tools.node(t, "sandbox.test.mjs", "inside.test.mjs")},
			{"python-june", tools.pytest(t, tools.june, tools.juneTests()...)},
		} {
			t.Run(suite.name, func(t *testing.T) {
				t.Parallel()
				runSuite(t, suite.command, w.suite(t))
			})
		}
	})
	if grown := rss(w.cmd.Process.Pid) - memory; grown > 256<<20 {
		t.Errorf("the server grew by %d MB", grown>>20)
	}
}

// TestOpenSandboxCompatibilityPage writes the tables of docs/compatibility.md from the report of the tests above:
// `make compat` asks for it.
func TestOpenSandboxCompatibilityPage(t *testing.T) {
	report := os.Getenv("OPENSANDBOX_SUITE_REPORT")
	if report == "" {
		t.Skip("make compat runs it")
	}
	tools := openSandboxPackages(t)
	cmd := exec.Command(filepath.Join(tools.python, "bin", "python"), "-B", "opensandbox/compat.py", report, tools.modules, "../docs/compatibility.md")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// openSandboxWorld is a server and what its sandboxes may be given: images, directories, another tenant.
type openSandboxWorld struct {
	*server
	registry    *testRegistry
	foreign     string // another tenant's key
	read, write string // directories of the host that the config allows
}

func newOpenSandboxWorld(t *testing.T, env ...string) *openSandboxWorld {
	t.Helper()
	w := &openSandboxWorld{registry: startRegistry(t)}
	w.read, w.write = hostDirectories(t)
	w.server = newServer(t, append([]string{"COVE_STORAGE_HOST_PATHS=" + w.read + "," + w.write + ":rw"}, env...)...)
	t.Cleanup(func() { removeImages(t, w.server) })
	foreign, err := w.CreateKey(t.Context(), client.KeyRequest{Tenant: "foreign", Name: "another tenant's"})
	if err != nil {
		t.Fatal(err)
	}
	w.foreign = foreign.Secret
	return w
}

// removeImages takes away the images and snapshots that a test left in the folder that all tests share. Their layers stay:
// other tests may be unpacking theirs, and the same ones come again with the next run.
func removeImages(t *testing.T, s *server) {
	removeSnapshots(t, s)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	all, err := s.Templates(ctx)
	if err != nil {
		t.Logf("list templates: %v", err)
		return
	}
	for _, each := range all {
		if each.Source == "image" {
			_ = s.RemoveTemplate(ctx, each.Name)
		}
	}
}

// hostDirectories are one to read, with a link that leads out of it, and one to write, which is an ordinary user's.
func hostDirectories(t *testing.T) (read, write string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "cove-e2e-host")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	read, write = filepath.Join(dir, "read"), filepath.Join(dir, "write")
	for _, step := range []func() error{
		func() error { return os.Chmod(dir, 0o755) },
		func() error { return os.MkdirAll(filepath.Join(read, "inner"), 0o755) },
		func() error { return os.Mkdir(write, 0o755) },
		func() error { return os.Chown(write, 4321, 4321) },
		func() error {
			return os.WriteFile(filepath.Join(read, "greeting.txt"), []byte("hello from the host\n"), 0o644)
		},
		func() error { return os.WriteFile(filepath.Join(read, "inner", "deep.txt"), []byte("deep\n"), 0o644) },
		func() error { return os.Symlink("/etc", filepath.Join(read, "out")) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	return read, write
}

// openSandbox is what the SDKs need to know.
func (s *server) openSandbox(t *testing.T) []string {
	t.Helper()
	u, err := url.Parse(s.url)
	if err != nil {
		t.Fatal(err)
	}
	return []string{"OPEN_SANDBOX_DOMAIN=" + u.Host, "OPEN_SANDBOX_API_KEY=" + s.key}
}

// suite is the environment of a suite; its home is empty, so that no configuration of this machine's is read.
func (w *openSandboxWorld) suite(t *testing.T) []string {
	t.Helper()
	example, err := filepath.Abs("../examples/opensandbox-langgraph")
	if err != nil {
		t.Fatal(err)
	}
	return append(w.openSandbox(t),
		"HOME="+t.TempDir(),
		"OPENSANDBOX_SUITE_FOREIGN_KEY="+w.foreign,
		"OPENSANDBOX_SUITE_REGISTRY="+w.registry.host,
		"OPENSANDBOX_SUITE_REGISTRY_USER="+registryUser,
		"OPENSANDBOX_SUITE_REGISTRY_PASSWORD="+registryPassword,
		"OPENSANDBOX_SUITE_HOST_READ="+w.read,
		"OPENSANDBOX_SUITE_HOST_WRITE="+w.write,
		"OPENSANDBOX_SUITE_EXAMPLE="+example,
	)
}

// openSandboxTools is where the packages of the suites are.
type openSandboxTools struct {
	python  string // a virtual environment
	june    string // one with the packages of June
	modules string // node_modules
}

func openSandboxPackages(t *testing.T) openSandboxTools {
	t.Helper()
	tools, err := installOpenSandbox()
	if err != nil {
		t.Fatal(err)
	}
	return tools
}

var installOpenSandbox = sync.OnceValues(func() (tools openSandboxTools, err error) {
	if tools.python, err = openSandboxPython(); err != nil {
		return tools, err
	}
	if tools.june, err = venv("opensandbox-june", "opensandbox/june/requirements.lock"); err != nil {
		return tools, err
	}
	tools.modules, err = nodeModules("opensandbox-js", "opensandbox/js/package-lock.json", tools.python)
	return tools, err
})

var openSandboxPython = sync.OnceValues(func() (string, error) {
	return venv("opensandbox-python", "opensandbox/python/requirements.lock")
})

// pytest is the command that runs tests of opensandbox/python with the packages of a virtual environment.
func (o openSandboxTools) pytest(t *testing.T, venv string, args ...string) []string {
	t.Helper()
	return pytest(t, venv, "opensandbox/python", args...)
}

// juneTests are those that the packages of June run: what differs between the two lines is inside the sandbox, and the
// asynchronous tests have all of it once. The whole takes as long as the newest.
func (o openSandboxTools) juneTests() []string {
	tests := []string{"test_async_sandbox.py", "test_async_inside.py"}
	if os.Getenv("COVE_E2E_FULL") != "" || os.Getenv("OPENSANDBOX_SUITE_REPORT") != "" {
		tests = append(tests, "test_lifecycle.py", "test_commands.py", "test_code.py", "test_files.py", "test_network.py", "test_volumes.py", "test_images.py", "test_pty.py")
	}
	return tests
}

// node is the command that runs tests of opensandbox/js.
func (o openSandboxTools) node(t *testing.T, files ...string) []string {
	t.Helper()
	return nodeTests(t, o.python, o.modules, "opensandbox/js", files...)
}
