package acceptance

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"
)

// Named finds the tests of a source tree whose names name rows, and all tests there are: functions of Go and Python, and the
// words of Go's subtests.
type Named struct {
	Rows  map[string][]string // row → where it is named
	Tests map[string]bool     // dir:TestName, file::test_name and file::TestClass
}

var pythonTest = regexp.MustCompile(`(?m)^\s*(?:(?:async )?def (test_\w+)|class (Test\w+))`)

// ReadSources reads the tests below a directory.
func ReadSources(tree fs.FS) (Named, error) {
	found := Named{Rows: map[string][]string{}, Tests: map[string]bool{}}
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (strings.HasPrefix(d.Name(), ".") && name != "." || d.Name() == "node_modules" || name == "bin"):
			return fs.SkipDir
		case strings.HasSuffix(name, "_test.go"):
			return found.readGo(tree, name)
		case strings.HasSuffix(name, ".py") && strings.HasPrefix(path.Base(name), "test_"):
			return found.readPython(tree, name)
		}
		return nil
	})
	return found, err
}

func (n *Named) add(test, name string) {
	n.Tests[test] = true
	for _, id := range IDs(name) {
		n.Rows[id] = append(n.Rows[id], test)
	}
}

func (n *Named) readPython(tree fs.FS, name string) error {
	text, err := fs.ReadFile(tree, name)
	for _, m := range pythonTest.FindAllSubmatch(text, -1) {
		word := string(m[1]) + string(m[2])
		n.add(name+"::"+word, word)
	}
	return err
}

func (n *Named) readGo(tree fs.FS, name string) error {
	text, err := fs.ReadFile(tree, name)
	if err != nil {
		return err
	}
	file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || f.Recv != nil {
			continue
		}
		test := path.Dir(name) + ":" + f.Name.Name
		if strings.HasPrefix(f.Name.Name, "Test") {
			n.add(test, f.Name.Name)
		}
		ast.Inspect(f, func(node ast.Node) bool { return n.subtest(test, node) })
	}
	return nil
}

// subtest notes words that begin with a row: the name of a subtest, wherever it is written down. Words of failures are none.
func (n *Named) subtest(test string, node ast.Node) bool {
	switch node := node.(type) {
	case *ast.CallExpr:
		call, ok := node.Fun.(*ast.SelectorExpr)
		if ok && (strings.HasSuffix(call.Sel.Name, "f") || call.Sel.Name == "Error" || call.Sel.Name == "Fatal" || call.Sel.Name == "Log") {
			return false
		}
	case *ast.BasicLit:
		words, err := strconv.Unquote(node.Value)
		if node.Kind == token.STRING && err == nil && idPattern.FindStringIndex(words) != nil && idPattern.FindStringIndex(words)[0] == 0 {
			for _, id := range IDs(words) {
				n.Rows[id] = append(n.Rows[id], test+"/"+strings.ReplaceAll(words, " ", "_"))
			}
		}
	}
	return true
}
