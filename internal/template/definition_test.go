package template_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// write puts definition files into a fresh templates directory.
func write(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func open(t *testing.T, dir string) *template.Store {
	t.Helper()
	store, err := template.Open(template.Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	return store
}

func TestABadDefinitionIsRefusedByFileAndKey(t *testing.T) {
	for claim, c := range map[string]struct{ text, says string }{
		"an unknown key":                {"name = 'x'\n[limits]\nmemroy = '1GiB'", "unknown key limits.memroy"},
		"no TOML":                       {"name = 'x'\nenv = {", "line 2"},
		"a size nobody knows":           {"name = 'x'\n[limits]\nmemory = 'lots'", `"lots" is not a size`},
		"a number where text belongs":   {"name = 3", "name"},
		"no name":                       {"description = 'x'", "name:"},
		"a name that is a path":         {"name = '../x'", "name:"},
		"an unknown parent":             {"name = 'x'\nfrom = 'bsae'", `from: there is no template "bsae"; there are base, code-interpreter, python, x`},
		"itself as a parent":            {"name = 'x'\nfrom = 'x'", "from: x is made from itself"},
		"a relative tree":               {"name = 'x'\n[host]\ntrees = ['usr']", "host.trees:"},
		"a tree that climbs":            {"name = 'x'\n[host]\ntrees = ['/usr/../home']", "host.trees:"},
		"all of the host":               {"name = 'x'\n[host]\ntrees = ['/']", "host.trees:"},
		"the users' homes":              {"name = 'x'\n[host]\ntrees = ['/home']", "/home is never part of a template"},
		"the passwords":                 {"name = 'x'\n[host]\netc = ['shadow']", "/etc/shadow is never part of a template"},
		"keys of TLS servers":           {"name = 'x'\n[host]\netc = ['ssl/private']", "/etc/ssl/private is never part of a template"},
		"a pattern that climbs":         {"name = 'x'\n[host]\netc = ['../root/*']", "host.etc:"},
		"a Python condition in words":   {"name = 'x'\n[python]\nfind = ['newest']", "python.find:"},
		"a lock file that is not there": {"name = 'x'\n[python]\npackages = 'mine.lock'", "python.packages:"},
		"a lock file elsewhere":         {"name = 'x'\n[python]\npackages = '../mine.lock'", "python.packages:"},
		"a user nobody knows":           {"name = 'x'\nuser = 'alice'", "user:"},
	} {
		t.Run(claim, func(t *testing.T) {
			dir := write(t, map[string]string{"mine.toml": c.text})
			_, err := template.Open(template.Options{Dir: dir})
			if !fault.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), filepath.Join(dir, "mine.toml")) || !strings.Contains(fault.Message(err), c.says) {
				t.Errorf("got %v, want invalid, the file and %q", err, c.says)
			}
		})
	}
}

func TestTwoFilesCannotDefineOneName(t *testing.T) {
	dir := write(t, map[string]string{"a.toml": "name = 'x'", "b.toml": "name = 'x'"})
	if _, err := template.Open(template.Options{Dir: dir}); !fault.Is(err, fault.Invalid) {
		t.Errorf("got %v", err)
	}
}

func TestDefinitionsOfOnesOwnAddAndReplace(t *testing.T) {
	dir := write(t, map[string]string{
		"mine.toml": "name = 'mine'\nfrom = 'python'\ndescription = 'my own'",
		"base.toml": "name = 'base'\ndescription = 'replaced'",
	})
	var got []template.Info
	for _, info := range open(t, dir).List() {
		if strings.HasPrefix(info.Source, dir) {
			got = append(got, info)
		}
	}
	want := []template.Info{
		{Name: "base", Description: "replaced", Source: dir + "/base.toml"},
		{Name: "mine", Description: "my own", From: "python", Source: dir + "/mine.toml"},
	}
	if len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestResolveSaysWhatIsMissing(t *testing.T) {
	store := open(t, t.TempDir())
	_, err := store.Resolve(t.Context(), "pyhton")
	if !fault.Is(err, fault.NotFound) || !strings.Contains(fault.Message(err), "there are base, code-interpreter, python") {
		t.Errorf("unknown: got %v", err)
	}
	if _, err := store.Resolve(t.Context(), "python"); !fault.Is(err, fault.Unavailable) {
		t.Errorf("not built: got %v", err)
	}
}

// FuzzDefinition reads whatever a person may have written: it is a definition, or it is refused as invalid and by name.
func FuzzDefinition(f *testing.F) {
	for _, name := range []string{"base.toml", "python.toml", "code-interpreter.toml"} {
		text, err := os.ReadFile(filepath.Join("defaults", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte("name = 'x'\nsudo = true\nenv = {A = '1'}\n[limits]\ncpus = 1e308\nmemory = '9223372036854775807TiB'\npids = -1"))
	f.Add([]byte("name = 'x'\n[host]\ntrees = ['/usr', '/usr/../etc']\netc = ['[', '**']\n[files]\n'/etc/motd' = ''\n[links]\n'/a' = '../..'"))
	f.Add([]byte("name = 'x'\n[python]\nfind = ['>=3.12,<3.15', '/usr/bin/python3', '==']\npackages = 'x.lock'"))
	f.Fuzz(func(t *testing.T, text []byte) {
		d, err := template.Parse("mine.toml", text, func(string) ([]byte, error) { return []byte("six==1.17.0"), nil })
		if err == nil && (d == nil || d.Name == "") {
			t.Fatal("nothing was read, and nothing refused")
		}
		if err != nil && (!fault.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), "mine.toml")) {
			t.Fatalf("refused with %v", err)
		}
	})
}
