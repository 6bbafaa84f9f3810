package template_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
	"github.com/covehq/cove/test/slow"
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("building templates needs root")
	}
}

// shared builds a built-in template once per machine.
func shared(t *testing.T, name string) (*template.Store, *template.Template) {
	t.Helper()
	needRoot(t)
	cache := os.Getenv("COVE_TEST_CACHE")
	if cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		cache = filepath.Join(dir, "cove-test")
	}
	dir := filepath.Join(cache, "templates")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	store := open(t, dir)
	built, err := store.Ensure(t.Context(), name, nil)
	if err != nil {
		t.Fatal(err)
	}
	return store, built
}

func ensure(t *testing.T, store *template.Store, name string) (*template.Template, []template.Progress) {
	t.Helper()
	var told []template.Progress
	built, err := store.Ensure(t.Context(), name, func(p template.Progress) { told = append(told, p) })
	if err != nil {
		t.Fatal(err)
	}
	return built, told
}

func steps(told []template.Progress) []string {
	var names []string
	for _, p := range told {
		names = append(names, p.Step)
	}
	return slices.Compact(names)
}

// try runs a shell line in the template.
func try(t *testing.T, built *template.Template, line string) string {
	t.Helper()
	out, err := built.Try(t.Context(), t.TempDir(), "/bin/bash", "-c", line)
	if err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
	return strings.TrimSpace(string(out))
}

func TestBase(t *testing.T) {
	slow.Test(t)
	_, built := shared(t, "base")
	if built.Trees[0].Target != "/" || !slices.ContainsFunc(built.Trees, func(tree template.Tree) bool { return tree.Target == "/usr" }) {
		t.Errorf("trees are %+v", built.Trees)
	}
	want := template.Limits{CPUs: 1, MemoryBytes: 512 << 20, Pids: 512, OpenFiles: 4096}
	if built.Limits != want || built.User != "user" || built.Workdir != "/home/user" || !built.Sudo {
		t.Errorf("got %+v", built)
	}
	for line, says := range map[string]string{
		"id -un 1000":                              "user",
		"getent passwd user":                       "user:x:1000:1000::/home/user:/bin/bash",
		"readlink /usr/bin/sudo":                   "/run/cove/bin/sudo",
		"ls -A /usr/src /usr/local/share /mnt":     "/mnt:\n\n/usr/local/share:\n\n/usr/src:",
		"stat -c '%a %u' /tmp /home /etc":          "1777 0\n755 0\n755 0",
		"cat /etc/resolv.conf":                     "nameserver 10.213.0.1",
		"git --version":                            "git version",
		"curl --version":                           "curl",
		"python3 --version":                        "Python " + built.Python.Version,
		"python --version":                         "Python " + built.Python.Version,
		"pip --version":                            "(python 3.",
		"pip config list":                          "break-system-packages='true'",
		"python3 -c 'import sys; print(sys.path)'": built.Python.UserSite,
		"python3 -c 'import ssl; print(ssl.create_default_context().cert_store_stats())'": "x509_ca",
		"! type dpkg || dpkg --verify bash && dpkg-query -W bash":                         "",
		"ls ~/.local/bin 2>&1; echo $PATH":                                                "/home/user/.local/bin",
	} {
		if got := try(t, built, line); !strings.Contains(got, says) {
			t.Errorf("%s: got %q, want %q", line, got, says)
		}
	}
}

func TestPython(t *testing.T) {
	slow.Test(t)
	_, built := shared(t, "python")
	if built.Limits.MemoryBytes != 1<<30 {
		t.Errorf("memory is %d", built.Limits.MemoryBytes)
	}
	for line, says := range map[string]string{
		"python3 -W ignore -c \"import pandas as pd; print(pd.date_range('2024-01', periods=12, freq='M')[-1])\"":                      "2024-12-31",
		"python3 -c 'import numpy, pandas, matplotlib, scipy, sklearn, seaborn, pyarrow, openpyxl, PIL, requests, IPython; print(42)'": "42",
		"python3 -c 'import matplotlib.pyplot as p; p.plot([1, 2]); p.savefig(\"/tmp/x.png\")' && wc -c < /tmp/x.png":                  "",
		"ipython --version": ".",
		"pip check":         "No broken requirements found",
		"python3 -c 'import numpy, sys; print(numpy.__cached__)'": "__pycache__",
	} {
		if got := try(t, built, line); !strings.Contains(got, says) {
			t.Errorf("%s: got %q, want %q", line, got, says)
		}
	}
	found, err := filepath.Glob(built.Trees[0].Lower[0] + "/home/user/.config/matplotlib/fontlist-*.json")
	if err != nil || len(found) != 1 || owner(t, found[0]) != 1000 {
		t.Errorf("matplotlib's list of fonts: %q, %v", found, err)
	}
}

func TestNothingOfTheHostsUsersIsInATemplate(t *testing.T) {
	slow.Test(t)
	_, built := shared(t, "python")
	secrets := append(hostHashes(t), "PRIVATE KEY-----")
	if id, err := os.ReadFile("/etc/machine-id"); err == nil && len(bytes.TrimSpace(id)) > 8 {
		secrets = append(secrets, string(bytes.TrimSpace(id)))
	}
	users := hostUsers(t)
	for _, tree := range built.Trees {
		for _, dir := range tree.Lower {
			if !strings.Contains(dir, "/built/layers/") {
				continue
			}
			walk(t, dir, func(at, inside string, info fs.FileInfo) {
				inside = filepath.Join(tree.Target, inside)
				for _, bad := range []string{"/etc/ssh", "/etc/sudoers", "/etc/machine-id", "/etc/ssl/private", "/etc/apt/auth.conf", "/etc/gshadow", filepath.Join("/root", ".ssh"), "/etc/shadow-", "/etc/passwd-"} {
					if strings.HasPrefix(inside, bad) {
						t.Errorf("%s is in the template", inside)
					}
				}
				if mode := info.Mode(); mode&(fs.ModeSetuid|fs.ModeSetgid) != 0 || mode.Perm()&0o002 != 0 && mode&fs.ModeSymlink == 0 && mode&fs.ModeSticky == 0 && mode.IsRegular() {
					t.Errorf("%s has mode %s", inside, mode)
				}
				if id := owner(t, at); id != 0 && !strings.HasPrefix(inside, "/home/user") {
					t.Errorf("%s belongs to %d", inside, id)
				}
				if !info.Mode().IsRegular() {
					return
				}
				content, err := os.ReadFile(at)
				if err != nil {
					t.Fatal(err)
				}
				if inside == "/etc/environment" && len(content) > 0 { // Cove's own is empty
					t.Errorf("%s has %d bytes", inside, len(content))
				}
				for _, secret := range secrets {
					// Packages quote the header of a key file in their own code and tests.
					if bytes.Contains(content, []byte(secret)) && (secret != "PRIVATE KEY-----" || strings.HasPrefix(inside, "/etc/")) {
						t.Errorf("%s holds a secret of the host", inside)
					}
				}
				if strings.HasPrefix(inside, "/etc/") {
					for _, user := range users {
						if slices.Contains(strings.FieldsFunc(string(content), func(r rune) bool { return strings.ContainsRune(" :,\t\n/", r) }), user) {
							t.Errorf("%s names the host's user %s", inside, user)
						}
					}
				}
			})
		}
	}
}

func TestUnchangedInputsAreNotBuiltAgain(t *testing.T) {
	slow.Test(t)
	store, first := shared(t, "python")
	second, told := ensure(t, store, "python")
	if got := steps(told); len(got) > 0 {
		t.Errorf("the second time took %q", got)
	}
	if first.Digest != second.Digest {
		t.Errorf("digest changed from %s to %s", first.Digest, second.Digest)
	}
	if err := store.Verify(t.Context(), "", "python"); err != nil {
		t.Error(err)
	}
	resolved, err := store.Resolve(t.Context(), "python")
	if err != nil || resolved.Digest != first.Digest {
		t.Errorf("got %+v, %v", resolved, err)
	}
}

func TestTheDistributionsPythonWorksToo(t *testing.T) {
	slow.Test(t)
	needRoot(t)
	if _, err := os.Stat("/usr/bin/python3"); err != nil {
		t.Skip("no /usr/bin/python3")
	}
	built, _ := ensure(t, open(t, write(t, map[string]string{"distro.toml": "name = 'distro'\nfrom = 'base'\n[python]\nfind = ['/usr/bin/python3']"})), "distro")
	for line, says := range map[string]string{
		"python3 -c 'import sys; print(sys.prefix)'": "/usr",
		"python --version":                           "Python " + built.Python.Version,
		"pip --version":                              "/usr/local/lib/python3",
	} {
		if got := try(t, built, line); !strings.Contains(got, says) {
			t.Errorf("%s: got %q, want %q", line, got, says)
		}
	}
}

// small is a template that takes a moment to build.
const small = "name = 'small'\n[files]\n'/etc/motd' = 'hello'\n"

func TestAHalfBuiltLayerIsCleanedAway(t *testing.T) {
	needRoot(t)
	dir := write(t, map[string]string{"small.toml": small})
	half := filepath.Join(dir, "built/layers/.building-123/trees")
	if err := os.MkdirAll(half, 0o755); err != nil {
		t.Fatal(err)
	}
	ensure(t, open(t, dir), "small")
	if _, err := os.Stat(half); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
}

func TestALayerWithoutItsDescriptionIsBuiltAgain(t *testing.T) {
	needRoot(t)
	dir := write(t, map[string]string{"small.toml": small})
	built, _ := ensure(t, open(t, dir), "small")
	layer := filepath.Dir(filepath.Dir(built.Trees[0].Lower[0]))
	if err := os.Remove(filepath.Join(layer, "layer.json")); err != nil {
		t.Fatal(err)
	}
	again, told := ensure(t, open(t, dir), "small")
	if !slices.Contains(steps(told), template.StepFiles) || again.Digest != built.Digest {
		t.Errorf("steps %q, digests %s and %s", steps(told), built.Digest, again.Digest)
	}
}

func TestConcurrentBuildersBuildOnce(t *testing.T) {
	needRoot(t)
	dir := write(t, map[string]string{"small.toml": small})
	var builds atomic.Int64
	var group sync.WaitGroup
	for range 8 {
		store := open(t, dir)
		group.Go(func() {
			_, err := store.Ensure(t.Context(), "small", func(p template.Progress) {
				if p.Step == template.StepFiles {
					builds.Add(1)
				}
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if builds.Load() != 1 {
		t.Errorf("built %d times", builds.Load())
	}
}

func TestAWaitingBuilderCanBeStopped(t *testing.T) {
	needRoot(t)
	dir := write(t, map[string]string{"small.toml": small})
	if err := os.MkdirAll(filepath.Join(dir, "built"), 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(dir, "built/lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err = open(t, dir).Ensure(ctx, "small", func(p template.Progress) {
		if p.Step == template.StepWait {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestAChangedDefinitionGetsANewDigestAndTheOldStaysUntilSwept(t *testing.T) {
	needRoot(t)
	dir := write(t, map[string]string{"small.toml": small})
	store := open(t, dir)
	old, _ := ensure(t, store, "small")
	if err := os.WriteFile(filepath.Join(dir, "small.toml"), []byte(strings.Replace(small, "hello", "good day", 1)), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := store.Refresh(); err != nil {
		t.Fatal(err)
	}
	fresh, _ := ensure(t, store, "small")
	if fresh.Digest == old.Digest {
		t.Fatal("the digest is the same")
	}
	if earlier, err := store.Earlier("small", old.Digest); err != nil || earlier.Digest != old.Digest {
		t.Errorf("the earlier one: %+v, %v", earlier, err)
	}
	if err := store.Sweep(t.Context(), nil, time.Hour); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(old.Trees[0].Lower[0]); err != nil {
		t.Errorf("it was replaced a moment ago: %v", err)
	}
	for _, inUse := range [][]*template.Template{{old}, nil} {
		if err := store.Sweep(t.Context(), inUse, 0); err != nil {
			t.Fatal(err)
		}
		_, err := os.Stat(old.Trees[0].Lower[0])
		if kept := err == nil; kept != (inUse != nil) {
			t.Errorf("with %d in use, the old layer was kept: %v", len(inUse), kept)
		}
		if err := store.Verify(t.Context(), "", "small"); err != nil {
			t.Errorf("the current one: %v", err)
		}
	}
}

func TestATamperedLayerIsNoticed(t *testing.T) {
	needRoot(t)
	store := open(t, write(t, map[string]string{"small.toml": small}))
	built, _ := ensure(t, store, "small")
	if err := os.WriteFile(built.Trees[0].Lower[0]+"/etc/motd", []byte("boo"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := store.Verify(t.Context(), "", "small"); err == nil {
		t.Error("nobody noticed")
	}
}

// hostDir is a directory of the host outside those that no template contains.
func hostDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/srv", "cove-test-")
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func put(t *testing.T, name, content string, mode fs.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(name, mode); err != nil {
		t.Fatal(err)
	}
}

func TestOnlyWhatEverybodyMayReadIsCopied(t *testing.T) {
	needRoot(t)
	from := hostDir(t)
	put(t, from+"/plain", "x", 0o644)
	put(t, from+"/setuid", "x", 0o755|fs.ModeSetuid)
	put(t, from+"/private", "x", 0o600)
	put(t, from+"/locked/inner", "x", 0o644)
	put(t, from+"/key.pem", "-----BEGIN PRIVATE KEY-----", 0o644)
	put(t, from+"/sources", "deb https://alice:secret@example.org/ x", 0o644)
	for name, target := range map[string]string{"/shadow": "/etc/shadow", "/dangling": "/nowhere", "/inner": "/usr/bin/env"} {
		if err := os.Symlink(target, from+name); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Chmod(from+"/locked", 0o700), syscall.Mkfifo(from+"/fifo", 0o644)); err != nil {
		t.Fatal(err)
	}
	built, _ := ensure(t, open(t, write(t, map[string]string{"x.toml": "name = 'x'\n[host]\ntrees = ['/usr']\ncopy = ['" + from + "']"})), "x")
	var got []string
	walk(t, built.Trees[0].Lower[0]+from, func(_, inside string, info fs.FileInfo) { got = append(got, inside+" "+info.Mode().String()) })
	want := []string{". drwxr-xr-x", "inner Lrwxrwxrwx", "plain -rw-r--r--", "setuid -rwxr-xr-x"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if len(built.Warnings) != 2 {
		t.Errorf("warnings are %q", built.Warnings)
	}
}

func TestPrivatePartsOfAHostTreeAreHidden(t *testing.T) {
	needRoot(t)
	from := hostDir(t)
	put(t, from+"/open/plain", "x", 0o644)
	put(t, from+"/open/private", "x", 0o640)
	put(t, from+"/locked/inner", "x", 0o644)
	put(t, from+"/hidden/inner", "x", 0o644)
	if err := os.Chmod(from+"/locked", 0o750); err != nil {
		t.Fatal(err)
	}
	built, _ := ensure(t, open(t, write(t, map[string]string{"x.toml": "name = 'x'\n[host]\ntrees = ['/usr', '" + from + "']\nhide = ['" + from + "/hidden']"})), "x")
	if got, want := try(t, built, "cd "+from+" && find . | sort"), ".\n./hidden\n./open\n./open/plain"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestAnUpgradedPythonIsANewTemplate(t *testing.T) {
	needRoot(t)
	host, err := template.FindPython(t.Context(), []string{">=3.9"})
	if err != nil || host.Prefix == "/usr" {
		t.Skip("no Python that can be copied")
	}
	prefix := hostDir(t)
	executable := prefix + "/bin/" + filepath.Base(host.Executable)
	program, err := os.ReadFile(host.Executable)
	if err != nil {
		t.Fatal(err)
	}
	put(t, executable, string(program), 0o755)
	copyLibrary(t, host, prefix)
	dir := write(t, map[string]string{"x.toml": "name = 'x'\n[host]\ntrees = ['/usr']\n[python]\nfind = ['" + executable + "']"})
	store := open(t, dir)
	old, _ := ensure(t, store, "x")
	if old.Python.Executable != executable {
		t.Fatalf("found %+v", old.Python)
	}
	same, _ := ensure(t, store, "x")
	if err := os.Chtimes(executable, time.Now(), time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	upgraded, told := ensure(t, store, "x")
	if old.Digest != same.Digest || old.Digest == upgraded.Digest || !slices.Contains(steps(told), template.StepFiles) {
		t.Errorf("digests %s, %s, %s", old.Digest, same.Digest, upgraded.Digest)
	}
}

// copyLibrary links the standard library into another prefix, without what is not needed to start.
func copyLibrary(t *testing.T, host *template.Interpreter, prefix string) {
	t.Helper()
	err := filepath.WalkDir(host.Prefix+"/lib", func(at string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() && slices.Contains([]string{"test", "site-packages", "idlelib", "__pycache__"}, e.Name()) {
			return fs.SkipDir
		}
		to := prefix + strings.TrimPrefix(at, host.Prefix)
		switch {
		case e.IsDir():
			return os.MkdirAll(to, 0o755)
		case e.Type().IsRegular():
			content, err := os.ReadFile(at)
			if err != nil {
				return err
			}
			return os.WriteFile(to, content, 0o644)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(prefix+"/lib/python"+host.Minor()+"/site-packages", 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestAMissingPythonIsSaid(t *testing.T) {
	needRoot(t)
	dir := write(t, map[string]string{"x.toml": "name = 'x'\n[python]\nfind = ['>=9.0']", "y.toml": "name = 'y'\n[python]\nfind = ['>=9.0']\noptional = true"})
	store := open(t, dir)
	if _, err := store.Ensure(t.Context(), "x", nil); !fault.Is(err, fault.Unsupported) {
		t.Errorf("got %v", err)
	}
	built, _ := ensure(t, store, "y")
	if len(built.Warnings) == 0 || built.Python.Executable != "" {
		t.Errorf("got %+v", built)
	}
}

// TestEnsure_HollowModule refuses a module that is a directory without an __init__.py: no zygote would start from it.
func TestEnsure_HollowModule(t *testing.T) {
	needRoot(t)
	python := "[host]\ntrees = ['/usr']\n[python]\nfind = ['>=3.9,<3.15']\n"
	store := open(t, write(t, map[string]string{"x.toml": "name = 'x'\n" + python}))
	built, _ := ensure(t, store, "x")
	site := try(t, built, built.Python.Executable+" -I -c 'import site; print(site.getsitepackages()[0])'")
	for file, refused := range map[string]bool{"__init__.py": false, "part.py": true} {
		text := fmt.Sprintf("name = 'boxes'\n%spreload = ['boxed', 'sys']\n[files]\n'%s/boxed/%s' = ''", python, site, file)
		store := open(t, write(t, map[string]string{"boxes.toml": text}))
		_, err := store.Ensure(t.Context(), "boxes", nil)
		if (err != nil) != refused || refused && !strings.Contains(err.Error(), "boxed is a directory without an __init__.py") {
			t.Errorf("a package with %s alone: %v", file, err)
		}
	}
}

func TestAFileThatOthersMayReplaceIsNotRun(t *testing.T) {
	needRoot(t)
	dir := hostDir(t)
	put(t, dir+"/bin/python3", "\x7fELF", 0o755)
	if err := os.Chmod(dir+"/bin", 0o777); err != nil {
		t.Fatal(err)
	}
	_, err := template.FindPython(t.Context(), []string{dir + "/bin/python3"})
	if err == nil || !strings.Contains(err.Error(), "others than root may change "+dir+"/bin") {
		t.Errorf("got %v", err)
	}
}

func TestTryLeavesNothingBehind(t *testing.T) {
	needRoot(t)
	built, _ := ensure(t, open(t, write(t, map[string]string{"x.toml": "name = 'x'\n[host]\ntrees = ['/usr']"})), "x")
	read := func() string {
		text, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	before, scratch := read(), t.TempDir()
	out, err := built.Try(t.Context(), scratch, "/bin/bash", "-c", "id -u; echo x > ~/x; echo > /etc/x; ls /sys /proc; exit 3")
	if err == nil || !strings.HasPrefix(string(out), "65534\n") || !strings.Contains(string(out), "/etc/x: Permission denied") {
		t.Errorf("got %q, %v", out, err)
	}
	left, err := os.ReadDir(scratch)
	if after := read(); after != before || len(left) != 0 || err != nil {
		t.Errorf("mounts:\n%s\nfiles: %v, %v", after, left, err)
	}
}

func walk(t *testing.T, dir string, visit func(at, inside string, info fs.FileInfo)) {
	t.Helper()
	err := filepath.WalkDir(dir, func(at string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		inside, err := filepath.Rel(dir, at)
		visit(at, inside, info)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func owner(t *testing.T, name string) int {
	t.Helper()
	info, err := os.Lstat(name)
	if err != nil {
		t.Fatal(err)
	}
	return int(info.Sys().(*syscall.Stat_t).Uid)
}

func colons(t *testing.T, name string, visit func(fields []string)) {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		visit(strings.Split(lines.Text(), ":"))
	}
}

func hostUsers(t *testing.T) []string {
	var users []string
	colons(t, "/etc/passwd", func(fields []string) {
		if id, err := strconv.Atoi(fields[2]); err == nil && id >= 1000 && id != 65534 && fields[0] != "user" {
			users = append(users, fields[0])
		}
	})
	return users
}

func hostHashes(t *testing.T) []string {
	var hashes []string
	colons(t, "/etc/shadow", func(fields []string) {
		if len(fields) > 1 && len(fields[1]) > 8 {
			hashes = append(hashes, fields[1])
		}
	})
	return hashes
}

// rootHome is root's in a sandbox.
const rootHome = "/root/"

func TestTemplateOfRootHasRootsHome(t *testing.T) {
	needRoot(t)
	roots, _ := ensure(t, open(t, write(t, map[string]string{
		"small.toml": small + "'/home/user/.cache/prepared' = 'once'\n",
		"roots.toml": "name = 'roots'\nfrom = 'small'\nuser = 'root'\nworkdir = '/srv/here'",
	})), "roots")
	if roots.User != "root" || roots.Workdir != "/srv/here" || !strings.HasPrefix(roots.Env["PATH"], rootHome+".local/bin:") {
		t.Errorf("got %+v", roots)
	}
	users, _ := ensure(t, open(t, write(t, map[string]string{"users.toml": "name = 'users'\nworkdir = '/srv/users'"})), "users")
	for _, c := range []struct {
		built *template.Template
		path  string
		owner uint32
	}{{roots, "/srv/here", 0}, {roots, rootHome + ".cache/prepared", 0}, {users, "/srv/users", 1000}} {
		info, err := os.Lstat(c.built.Trees[0].Lower[0] + c.path)
		if err != nil {
			t.Error(err)
			continue
		}
		if owner := info.Sys().(*syscall.Stat_t).Uid; owner != c.owner {
			t.Errorf("%s is %d's", c.path, owner)
		}
	}
}

func TestCodeInterpreterIsPythonOfRoots(t *testing.T) {
	slow.Test(t)
	store, built := shared(t, "code-interpreter")
	python, err := store.Resolve(t.Context(), "python")
	if err != nil {
		t.Fatal(err)
	}
	if built.User != "root" || built.Workdir != "/workspace" || built.Env["MPLCONFIGDIR"] != rootHome+".config/matplotlib" || !slices.Equal(built.Python.Preload, python.Python.Preload) {
		t.Errorf("got %+v", built)
	}
	for i, tree := range built.Trees { // its layers are python's, and one more
		if lower := python.Trees[i].Lower; !slices.Equal(tree.Lower[len(tree.Lower)-len(lower):], lower) {
			t.Errorf("%s has other layers: %v", tree.Target, tree.Lower)
		}
	}
	if got := try(t, built, "ls -d /workspace && python -c 'print(1)' && python3 -c 'print(2)' && ls /home/user/.config/matplotlib"); !strings.HasPrefix(got, "/workspace\n1\n2\n") {
		t.Errorf("got %q", got)
	}
}

// TestHostChange_RebuildsOneLayer changes a file of the host that the lowest of two definitions copies.
func TestHostChange_RebuildsOneLayer(t *testing.T) {
	needRoot(t)
	host := hostDir(t)
	put(t, host+"/state", "one", 0o644)
	dir := write(t, map[string]string{
		"low.toml":  "name = 'low'\n[host]\ncopy = ['" + host + "']",
		"high.toml": "name = 'high'\nfrom = 'low'\n[files]\n'/etc/motd' = 'hello'",
	})
	before, _ := ensure(t, open(t, dir), "high")
	put(t, host+"/state", "two two", 0o644)
	after, told := ensure(t, open(t, dir), "high")
	var built []string
	for _, p := range told {
		if p.Step == template.StepFiles {
			built = append(built, p.Message)
		}
	}
	if !slices.Equal(built, []string{"low"}) {
		t.Errorf("built again: %q, want low alone", built)
	}
	if before.Digest == after.Digest || before.Trees[0].Lower[0] != after.Trees[0].Lower[0] || before.Trees[0].Lower[1] == after.Trees[0].Lower[1] {
		t.Errorf("before %s %q, after %s %q", before.Digest, before.Trees[0].Lower, after.Digest, after.Trees[0].Lower)
	}
}

func TestPythonIsAskedOnce(t *testing.T) {
	needRoot(t)
	find := "\n[python]\nfind = ['>=3.9']\noptional = true\n"
	dir := write(t, map[string]string{"one.toml": "name = 'one'" + find, "two.toml": "name = 'two'" + find})
	probes := func(store *template.Store, name string) int {
		_, told := ensure(t, store, name)
		n := 0
		for _, p := range told {
			if p.Step == template.StepPython {
				n++
			}
		}
		return n
	}
	store := open(t, dir)
	if n := probes(store, "one"); n != 1 {
		t.Skipf("no interpreter on this host, %d probes", n)
	}
	if n := probes(store, "two"); n != 0 {
		t.Error("the second template asks every interpreter again")
	}
	if n := probes(open(t, dir), "one"); n != 0 {
		t.Error("the next process asks every interpreter again")
	}
}

func TestPython_OnlyAnswersAreKept(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		name, code string
		probes     int
		says       string
	}{
		{"refuses", `write(2, "no library", 10); _exit(1);`, 1, "no library"},
		{"is killed", `kill(getpid(), 9);`, 2, "did not answer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := filepath.Join(dir, strings.ReplaceAll(c.name, " ", "-"))
			source := "#include <signal.h>\n#include <unistd.h>\nint main(void) { " + c.code + " }\n"
			if err := os.WriteFile(name+".c", []byte(source), 0o600); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command("cc", "-o", name, name+".c").CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			probes, err := template.Inspect(t.Context(), name)
			if probes != c.probes || err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("asked %d times, %v; want %d, %q", probes, err, c.probes, c.says)
			}
		})
	}
}

func TestRecord_DirectoryIsMoved(t *testing.T) {
	needRoot(t)
	dir := write(t, map[string]string{"small.toml": small})
	before, _ := ensure(t, open(t, dir), "small")
	moved := filepath.Join(t.TempDir(), "elsewhere")
	if err := os.Rename(dir, moved); err != nil {
		t.Fatal(err)
	}
	after, err := open(t, moved).Resolve(t.Context(), "small")
	if err != nil {
		t.Fatal(err)
	}
	if after.Digest != before.Digest || !strings.HasPrefix(after.Trees[0].Lower[0], moved+"/") {
		t.Errorf("got %s in %q", after.Digest, after.Trees[0].Lower)
	}
	if text, err := os.ReadFile(filepath.Join(moved, "built/small.json")); err != nil || bytes.Contains(text, []byte(dir)) {
		t.Errorf("%v; the record names the directory: %s", err, text)
	}
}

func TestCheck_DamagedLayerIsBuiltAgain(t *testing.T) {
	needRoot(t)
	store := open(t, write(t, map[string]string{"small.toml": small + "'/etc/issue' = 'here'\n"}))
	before, _ := ensure(t, store, "small")
	if bad, err := store.Checker().Check(t.Context(), "small"); err != nil || len(bad) != 0 {
		t.Errorf("as it was built: %q, %v", bad, err)
	}
	root := before.Trees[0].Lower[0]
	layer := filepath.Base(filepath.Dir(filepath.Dir(root)))
	const sameSize = "a file has other content"
	for claim, damage := range map[string]func() error{
		"a file is gone":    func() error { return os.Remove(root + "/etc/issue") },
		"a file is cut":     func() error { return os.Truncate(root+"/etc/issue", 1) },
		"a file is renamed": func() error { return os.Rename(root+"/etc/issue", root+"/etc/other") },
		sameSize:            func() error { return os.WriteFile(root+"/etc/issue", []byte("gone"), 0o644) },
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		bad, err := store.Checker().Check(t.Context(), "small")
		if claim != sameSize && (err != nil || len(bad) != 1 || bad[layer] == "") { // only Verify and Repair read the content
			t.Errorf("%s: %q, %v", claim, bad, err)
		}
		after, err := store.Repair(t.Context(), "small", nil)
		if err != nil {
			t.Fatal(err)
		}
		if text, err := os.ReadFile(root + "/etc/issue"); err != nil || string(text) != "here" {
			t.Errorf("%s: built again it has %q, %v", claim, text, err)
		}
		// The maker has zygotes and pools for each digest.
		if after.Digest == before.Digest {
			t.Errorf("%s: the template has the digest of the damaged one", claim)
		}
		before = after
	}
	if err := store.Sweep(t.Context(), nil, 0); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(filepath.Dir(root))), ".damaged-*")); len(left) != 0 {
		t.Errorf("damaged layers are left: %q", left)
	}
}

// TestRebuild_NothingChanged builds a template that is as it was built, and one that cannot be
// built any more.
func TestRebuild_NothingChanged(t *testing.T) {
	needRoot(t)
	dir := write(t, map[string]string{"small.toml": small + "'/etc/issue' = 'here'\n"})
	store := open(t, dir)
	before, _ := ensure(t, store, "small")
	if same, err := store.Repair(t.Context(), "small", nil); err != nil || same.Digest != before.Digest {
		t.Errorf("Repair of a template that is as it was built: %v, %v", same, err)
	}
	after, err := store.Rebuild(t.Context(), "small", nil)
	if err != nil || after.Digest == before.Digest {
		t.Fatalf("Rebuild: %v, %v; its digest was %s", after, err, before.Digest)
	}
	if err := store.Verify(t.Context(), "", "small"); err != nil {
		t.Errorf("after Rebuild: %v", err)
	}
	if same, _ := ensure(t, store, "small"); same.Digest != after.Digest {
		t.Errorf("Ensure after Rebuild has the digest %s, want %s", same.Digest, after.Digest)
	}

	t.Run("the build fails", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		_, err := store.Rebuild(ctx, "small", func(template.Progress) { cancel() }) // it has begun
		if err == nil {
			t.Skip("it was built before its end was seen")
		}
		if same, err := open(t, dir).Resolve(t.Context(), "small"); err != nil || same.Digest != after.Digest {
			t.Errorf("the template is %v, %v", same, err)
		}
		if err := store.Verify(t.Context(), "", "small"); err != nil {
			t.Error(err)
		}
	})
}
