package native_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/test/slow"
)

// slim is what an image with Python and little else has: one of this host, its standard library and what they are linked with.
func slim(t testing.TB, python string) *layerTar {
	t.Helper()
	out, err := exec.Command(python, "-Ic", "import sysconfig, sys, os; print(sysconfig.get_path('stdlib')); print(os.path.realpath(sys.executable))").Output()
	if err != nil {
		t.Skipf("this host has no %s: %v", python, err)
	}
	stdlib, python, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	l := newLayer(t).dir("usr", 0o755).dir("usr/lib", 0o755).dir("usr/lib64", 0o755).dir("usr/bin", 0o755).
		link("lib", "usr/lib").link("lib64", "usr/lib64").link("bin", "usr/bin").
		file("etc/passwd", "root:x:0:0::/root:/sbin/nologin\nnonroot:x:65532:65532::/home/nonroot:/sbin/nologin\n").dir("home/nonroot", 0o777).
		host(python[1:], python).link("usr/bin/python3", python)
	programs := []string{python}
	err = filepath.WalkDir(stdlib, func(at string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "__pycache__" || d.Name() == "test" || d.Name() == "site-packages" || strings.HasPrefix(d.Name(), "config-")):
			return filepath.SkipDir
		case d.Type().IsRegular():
			l.host(at[1:], at)
			if strings.HasSuffix(at, ".so") {
				programs = append(programs, at)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, p := range programs {
		out, _ := exec.Command("ldd", p).Output()
		for _, word := range strings.Fields(string(out)) {
			if !filepath.IsAbs(word) || seen[word] {
				continue
			}
			seen[word] = true
			to := word
			if strings.HasPrefix(to, "/lib") {
				to = "/usr" + to
			}
			l.host(to[1:], word)
		}
	}
	return l
}

// pythons are those that a kernel is tried with: this host's own, and the oldest that it has to work with.
func pythons(t testing.TB) map[string]string {
	all := map[string]string{"of this host": "/usr/bin/python3"}
	if home, err := os.UserHomeDir(); err == nil {
		if old, _ := filepath.Glob(filepath.Join(home, ".pyenv/versions/3.8.*/bin/python3")); len(old) > 0 {
			all["3.8"] = old[0]
		}
	}
	return all
}

func TestAPythonKernelRunsInAnImageThatHasPython(t *testing.T) {
	slow.Test(t)
	m := imageMaker(t)
	for name, python := range pythons(t) {
		t.Run(name, func(t *testing.T) {
			made := m.image(t, func(r *sandbox.ImageRequest) { r.User, r.Workdir = "nonroot", "/home/nonroot" }, slim(t, python).bytes())
			tryPython(t, m.from(t, made))
		})
	}
}

func tryPython(t *testing.T, b *box) {
	t.Helper()
	ctx := t.Context()
	if err := b.driver.Kernel(ctx, b.id, agentapi.DefaultKernel); !fault.Is(err, fault.Unsupported) {
		t.Errorf("a kernel from a zygote: %v", err)
	}
	if _, err := b.agent.KernelStart(ctx, agentapi.KernelStartParams{Kernel: agentapi.DefaultKernel, Language: agentapi.LanguagePython}); err != nil {
		t.Fatal(err)
	}
	if k, err := b.agent.KernelWait(ctx, agentapi.KernelParams{Kernel: agentapi.DefaultKernel}); err != nil || k.State == agentapi.KernelDead {
		t.Fatalf("%+v %v", k, err)
	}
	if got := b.value("x = 41\nimport os; print(os.getuid(), os.getcwd(), os.environ['HOME'])"); got != "65532 /home/nonroot /home/nonroot" {
		t.Errorf("%q", got)
	}
	if got := b.run("x + 1"); got.text != "42" {
		t.Errorf("%+v", got)
	}
	if got := b.run("1/0"); got.err == nil || got.err.Name != "ZeroDivisionError" {
		t.Errorf("%+v", got)
	}
	_, err := b.driver.Fork(ctx, sandbox.ForkRequest{Parent: b.id, Children: []sandbox.ForkChild{{ID: "child"}}})
	if err == nil || !strings.Contains(fault.Message(err), "was started as a program") {
		t.Errorf("a fork without a zygote: %v", err)
	}
	for _, language := range []string{agentapi.LanguageBash, agentapi.LanguageJavaScript} {
		_, err := b.agent.KernelStart(ctx, agentapi.KernelStartParams{Kernel: "k", Language: language})
		if !fault.Is(err, fault.Unsupported) || !strings.Contains(fault.Message(err), "has no ") {
			t.Errorf("%s: %v", language, err)
		}
	}
}
