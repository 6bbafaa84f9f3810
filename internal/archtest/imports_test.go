package archtest_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/covehq/cove"

// pkg is what `go list` tells of a package.
type pkg struct {
	ImportPath   string
	Dir          string
	Doc          string
	Standard     bool
	DepOnly      bool
	GoFiles      []string
	TestGoFiles  []string
	XTestGoFiles []string
	Imports      []string
}

// load asks `go list` once, for all tests.
var load = sync.OnceValues(func() (map[string]*pkg, error) {
	// A result of `go test` is kept as long as the files that the test itself looked at are the same; what go list reads
	// does not count. So look at all of them.
	if err := walk(".go", func(string) error { return nil }); err != nil {
		return nil, err
	}
	cmd := exec.Command("go", "list", "-e", "-deps",
		"-json=ImportPath,Dir,Doc,Standard,DepOnly,GoFiles,TestGoFiles,XTestGoFiles,Imports", "./...")
	cmd.Dir = root
	// The agent is built without cgo, and so is everything that counts here.
	cmd.Env = append(os.Environ(), "GOOS=linux", "CGO_ENABLED=0")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w: %s", err, stderr.String())
	}
	all := map[string]*pkg{}
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		p := &pkg{}
		err := decoder.Decode(p)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		all[p.ImportPath] = p
	}
})

// root is the top of the repository, seen from this package.
var root = filepath.Join("..", "..")

// walk visits every file of the repository that ends in suffix.
func walk(suffix string, visit func(name string) error) error {
	return filepath.WalkDir(root, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() {
			base := e.Name()
			hidden := strings.HasPrefix(base, ".") && name != root
			if hidden && base != ".ci" && base != ".github" || base == "node_modules" || name == filepath.Join(root, "bin") {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, suffix) {
			return nil
		}
		if _, err := os.Stat(name); err != nil {
			return err
		}
		return visit(name)
	})
}

func packages(t *testing.T) map[string]*pkg {
	t.Helper()
	all, err := load()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// ours is the path below the module, or false for everybody else's package.
func ours(importPath string) (string, bool) {
	return strings.CutPrefix(importPath, module+"/")
}

// matches tells whether a path is named by one of the patterns.
func matches(path string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		if tree, ok := strings.CutSuffix(p, "/..."); ok {
			return path == tree || strings.HasPrefix(path, tree+"/")
		}
		return p == "*" || p == path
	})
}

// fromGuest tells whether an import path lies in one of the modules.
func fromGuest(path string, modules []string) bool {
	return slices.ContainsFunc(modules, func(m string) bool { return path == m || strings.HasPrefix(path, m+"/") })
}

// wrong says what is wrong with one import of a package; empty when nothing is.
func (l line) wrong(imported string, standard bool) string {
	if matches(imported, l.group.never) {
		return fmt.Sprintf("no package of the group %q imports it", l.group.name)
	}
	if path, our := ours(imported); our {
		if matches(path, l.group.may) || matches(path, l.also) {
			return ""
		}
		return fmt.Sprintf("neither the group %q nor its own line allows it; let the caller define an interface, or move the code", l.group.name)
	}
	if standard || fromGuest(imported, l.guests) {
		return ""
	}
	return "a new guest needs a reason in the commit and a place in this package's line (guests)"
}

func TestImports(t *testing.T) {
	all := packages(t)
	lines := map[string]line{}
	for _, l := range table {
		if _, twice := lines[l.path]; twice {
			t.Errorf("%s has two lines in table_test.go", l.path)
		}
		lines[l.path] = l
		if p := all[module+"/"+l.path]; p == nil || p.DepOnly {
			t.Errorf("%s has a line in table_test.go and does not exist; remove the line", l.path)
		}
	}
	for _, p := range all {
		path, our := ours(p.ImportPath)
		if !our {
			continue
		}
		l, known := lines[path]
		if !known {
			t.Errorf("%s is new: decide which group it belongs to (docs/ARCHITECTURE.md) and give it a line in internal/archtest/table_test.go", path)
			continue
		}
		for _, imported := range p.Imports {
			standard := all[imported] != nil && all[imported].Standard || imported == "C" || imported == "unsafe"
			if why := l.wrong(imported, standard); why != "" {
				t.Errorf("%s imports %s: %s", path, imported, why)
			}
		}
	}
}

func TestAgentLinksLittle(t *testing.T) {
	all := packages(t)
	const top = module + "/cmd/cove-agent"
	if all[top] == nil {
		t.Fatalf("%s is gone; this test guards what it links", top)
	}
	via := map[string]string{top: ""} // package → who brought it in
	for queue := []string{top}; len(queue) > 0; queue = queue[1:] {
		p := all[queue[0]]
		if p == nil {
			continue
		}
		for _, imported := range p.Imports {
			if _, seen := via[imported]; !seen {
				via[imported] = p.ImportPath
				queue = append(queue, imported)
			}
		}
	}
	for path := range via {
		short, our := ours(path)
		if !our {
			short = path
			if all[path] != nil && all[path].Standard && isInternal(path) {
				continue
			}
		}
		if !slices.Contains(agentLinks, short) {
			t.Errorf("cove-agent links %s (%s): every sandbox pays for it; do without, or add it to agentLinks with a reason in the commit", short, chain(via, path))
		}
	}
}

// isInternal tells parts of the standard library that only it can import.
func isInternal(path string) bool {
	return strings.HasPrefix(path, "vendor/") || slices.Contains(strings.Split(path, "/"), "internal")
}

func chain(via map[string]string, path string) string {
	var links []string
	for at := path; at != ""; at = via[at] {
		links = append(links, strings.TrimPrefix(at, module+"/"))
	}
	slices.Reverse(links)
	return strings.Join(links, " → ")
}

func TestEveryPackageSaysWhatItIsFor(t *testing.T) {
	for _, p := range packages(t) {
		path, our := ours(p.ImportPath)
		if !our || p.Doc != "" || len(p.GoFiles) == 0 && testDoc(t, p) {
			continue
		}
		t.Errorf("%s has no doc comment: say in one sentence what it is for and what it refuses to know", path)
	}
}

// testDoc tells whether a package that is all tests has a doc comment.
func testDoc(t *testing.T, p *pkg) bool {
	t.Helper()
	return slices.ContainsFunc(slices.Concat(p.TestGoFiles, p.XTestGoFiles), func(name string) bool {
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.PackageClauseOnly|parser.ParseComments)
		if err != nil {
			t.Error(err)
			return false
		}
		return f.Doc != nil
	})
}
