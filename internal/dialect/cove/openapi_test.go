package cove_test

import (
	"bytes"
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/dialect/cove"
)

var update = flag.Bool("update", false, "write the OpenAPI files anew")

// The file is served from beside the code and read by people in docs.
var openapiFiles = []string{"openapi.json", "../../../docs/openapi.json"}

func TestTheOpenAPIFileIsCurrent(t *testing.T) {
	want, err := cove.OpenAPI(comments(t, "../../../client/wire.go", "../../../client/wire_images.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range openapiFiles {
		if *update {
			if err := os.WriteFile(name, want, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what routes and types say: run go test ./internal/dialect/cove -run OpenAPI -update", name)
		}
	}
}

// comments reads what the source says of types and fields.
func comments(t *testing.T, files ...string) map[string]string {
	t.Helper()
	texts := map[string]string{}
	var decls []ast.Decl
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		decls = append(decls, f.Decls...)
	}
	for _, d := range decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.TYPE {
			continue
		}
		name := g.Specs[0].(*ast.TypeSpec)
		texts[name.Name.Name] = flat(g.Doc)
		s, ok := name.Type.(*ast.StructType)
		if !ok {
			continue
		}
		for _, field := range s.Fields.List {
			for _, n := range field.Names {
				texts[name.Name.Name+"."+n.Name] = flat(field.Doc)
			}
		}
	}
	return texts
}

func flat(c *ast.CommentGroup) string {
	return strings.ReplaceAll(strings.TrimSpace(c.Text()), "\n", " ")
}
