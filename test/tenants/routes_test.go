package tenants_test

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/covehq/cove/test/testserver"
)

// allTrials are the trials of all dialects whose routes are listed.
var allTrials = map[string][]trial{
	"cove":        slices.Concat(coveTrials, lastTrials),
	"link":        linkTrials,
	"e2b":         e2bTrials,
	"e2bbuild":    e2bBuildTrials,
	"envd":        envdTrials,
	"interpreter": interpreterTrials,
	"opensandbox": opensandboxTrials,
	"execd":       execdTrials,
	"egress":      egressTrials,
	"runtime":     runtimeTrials,
}

// The Kubernetes dialect has no table: its trials are compared with what the running server discovers. The paths of the
// package sandboxd are reached through its port-forward alone, which has trials.

// tables says in which files a dialect's routes are. A route is a text such as "GET /path", "/path", or the two texts
// "GET", "/path" side by side, where the code registers it.
var tables = map[string][]string{
	"cove":        {"internal/dialect/cove/cove.go"}, // and docs/openapi.json, which is made from routes.go
	"link":        {"internal/dialect/cove/links.go"},
	"e2b":         {"internal/dialect/e2b/routes.go", "internal/dialect/e2b/e2b.go"},
	"e2bbuild":    {"internal/dialect/e2b/build/serve.go"},
	"envd":        {"internal/dialect/e2b/envd/envd.go", "internal/dialect/e2b/envd/envdpb/envdpbconnect"},
	"interpreter": {"internal/dialect/e2b/interpreter/interpreter.go"},
	"opensandbox": {"internal/dialect/opensandbox/routes.go", "internal/dialect/opensandbox/opensandbox.go"},
	"execd":       {"internal/dialect/opensandbox/execd/execd.go"},
	"egress":      {"internal/dialect/opensandbox/egress/egress.go"},
	"runtime":     {"internal/dialect/agentsandbox/runtime/runtime.go"},
}

// notRoutes are patterns that answer for everything else, and paths without a method whose methods are listed too.
var notRoutes = map[string][]string{
	"link": {"/artifacts/"},
	"e2b": { // those of templates are in a table of their own
		"/", "/templates", "/templates/", "/default-templates", "/v2/templates", "/v2/templates/", "/v3/templates", "/v3/templates/", "DELETE /templates/tags",
	},
	"envd":        {"/"},
	"interpreter": {"/", "/health", "/execute", "/contexts", "/contexts/{id}", "/contexts/{id}/restart"},
	"execd":       {"/"},
	"egress":      {"/", "/policy"},
	"cove":        {"/"},
	"opensandbox": {"/", "/sandboxes"}, // the first of roots, which are served without a prefix too
}

// withoutTable are the files below internal/dialect that look at a request's path, or answer
// requests, and register no route of a table. Each has its reason.
var withoutTable = map[string]string{
	"internal/dialect/e2b/build/upload.go":           "serves the upload that e2b.go registers",
	"internal/dialect/e2b/edge/edge.go":              "passes requests on to envd, the interpreter or a port (portTrials)",
	"internal/dialect/e2b/edge/route.go":             "reads which sandbox and port a host name or path is about",
	"internal/dialect/e2b/interpreter/decode.go":     "names the path in an error",
	"internal/dialect/opensandbox/execd/fault.go":    "names paths in errors",
	"internal/dialect/opensandbox/proxy.go":          "passes requests on to execd, egress or a port (osPortTrials)",
	"internal/dialect/agentsandbox/discovery.go":     "is what the trials of Kubernetes are compared with",
	"internal/dialect/agentsandbox/openapi.go":       "describes the kinds that discovery.go lists",
	"internal/dialect/agentsandbox/route.go":         "has no table: its trials are compared with what the server discovers",
	"internal/dialect/agentsandbox/router/access.go": "reads which sandbox a request is about",
	"internal/dialect/agentsandbox/router/router.go": "passes requests on to the runtime or a port (routerPortTrials)",
	"internal/dialect/agentsandbox/sandboxd":         "is reached through the port-forward alone, which has trials",
}

// TestEveryRouteFileHasATable fails for a file of a dialect whose routes TestEveryRouteHasATrial
// would not see.
func TestEveryRouteFileHasATable(t *testing.T) {
	listed := map[string]bool{}
	for _, files := range tables {
		for _, name := range files {
			listed[name] = false
		}
	}
	for name := range withoutTable {
		if _, twice := listed[name]; twice {
			t.Errorf("%s is in a table and in withoutTable", name)
		}
		listed[name] = false
	}
	root := filepath.Join(testserver.Root(), "internal", "dialect")
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(file) != ".go" || strings.HasSuffix(file, "_test.go") || !answersRequests(t, file) {
			return err
		}
		name, err := filepath.Rel(testserver.Root(), file)
		if err != nil {
			return err
		}
		for at := name; at != "."; at = filepath.Dir(at) { // a directory stands for its files
			if _, ok := listed[at]; ok {
				listed[at] = true
				return nil
			}
		}
		t.Errorf("%s answers requests: add it to tables, with trials of its routes, or to withoutTable with the reason", name)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(listed)) {
		if !listed[name] {
			t.Errorf("%s is listed here and answers no requests", name)
		}
	}
}

// answersRequests reports whether a file registers a handler, is one, spells out a route with its
// method, or looks at the path of a request.
func answersRequests(t *testing.T, file string) (found bool) {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			found = found || n.Recv != nil && n.Name.Name == "ServeHTTP"
		case *ast.CallExpr:
			if call, ok := n.Fun.(*ast.SelectorExpr); ok {
				found = found || slices.Contains([]string{"Handle", "HandleFunc", "EscapedPath"}, call.Sel.Name)
			}
		case *ast.SelectorExpr:
			of, ok := n.X.(*ast.SelectorExpr)
			found = found || ok && n.Sel.Name == "Path" && of.Sel.Name == "URL"
		case *ast.CompositeLit:
			found = found || slices.ContainsFunc(routesOf(n), func(route string) bool { return !strings.HasPrefix(route, "/") })
		}
		return !found
	})
	return found
}

func TestEveryRouteHasATrial(t *testing.T) {
	for dialect, trials := range allTrials {
		tried := map[string]bool{}
		for _, tr := range trials {
			tried[tr.route] = true
		}
		have := documentedIf(t, dialect == "cove")
		for _, file := range tables[dialect] {
			have = append(have, routesIn(t, file)...)
		}
		if dialect == "runtime" {
			have = append(have, "/") // the empty case of its switch
		}
		have = slices.DeleteFunc(have, func(route string) bool { return slices.Contains(notRoutes[dialect], route) })
		if len(have) == 0 {
			t.Errorf("%s: no route was found in %v", dialect, tables[dialect])
		}
		for _, route := range have {
			if !tried[route] {
				t.Errorf("%s serves %s, and no trial says what another tenant may have of it: add one to test/tenants", dialect, route)
			}
			delete(tried, route)
		}
		for _, route := range slices.Sorted(maps.Keys(tried)) {
			t.Errorf("%s has a trial of %s, which is not served any more", dialect, route)
		}
	}
}

// documentedIf are the routes of the native API.
func documentedIf(t *testing.T, native bool) (routes []string) {
	t.Helper()
	if !native {
		return nil
	}
	text, err := os.ReadFile(filepath.Join(testserver.Root(), "docs", "openapi.json"))
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Paths      map[string]map[string]json.RawMessage
		Components struct {
			PathItems map[string]map[string]json.RawMessage
		}
	}
	decode(t, string(text), &doc)
	for _, item := range doc.Components.PathItems { // where a connection changes its protocol
		var path string
		decode(t, string(item["x-path"]), &path)
		for method := range item {
			if methodForm.MatchString(strings.ToUpper(method)) {
				routes = append(routes, strings.ToUpper(method)+" "+path)
			}
		}
	}
	for path, methods := range doc.Paths {
		for method := range methods {
			if method != "parameters" {
				routes = append(routes, strings.ToUpper(method)+" "+path)
			}
		}
	}
	return routes
}

var routeForm = regexp.MustCompile(`^((GET|HEAD|POST|PUT|PATCH|DELETE) )?/([a-z0-9A-Z.{}_/$-]|…)*$`)

var methodForm = regexp.MustCompile(`^(GET|HEAD|POST|PUT|PATCH|DELETE)$`)

// routesIn are the routes of a file or of all files of a directory.
func routesIn(t *testing.T, name string) (routes []string) {
	t.Helper()
	at := filepath.Join(testserver.Root(), name)
	files := []string{at}
	if !strings.HasSuffix(name, ".go") {
		var err error
		if files, err = filepath.Glob(filepath.Join(at, "*.connect.go")); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			routes = append(routes, routesOf(n)...)
			return true
		})
	}
	slices.Sort(routes)
	return slices.Compact(routes)
}

// routesOf are the routes that one node of a syntax tree registers: an argument of Handle or HandleFunc, a key or a field
// of a table, a constant of generated code, or what a switch compares a path with.
func routesOf(n ast.Node) (routes []string) {
	switch n := n.(type) {
	case *ast.CallExpr:
		f, ok := n.Fun.(*ast.SelectorExpr)
		if ok && len(n.Args) > 0 && (f.Sel.Name == "Handle" || f.Sel.Name == "HandleFunc") {
			routes = append(routes, textOf(n.Args[0]))
		}
	case *ast.CompositeLit:
		routes = fieldsOf(n)
	case *ast.ValueSpec:
		for i, name := range n.Names {
			if strings.HasSuffix(name.Name, "Procedure") {
				routes = append(routes, "POST "+textOf(n.Values[i]))
			}
		}
	case *ast.CaseClause:
		for _, e := range n.List {
			text := textOf(e)
			if text != "" && !methodForm.MatchString(text) {
				routes = append(routes, "/"+strings.TrimPrefix(text, "/"))
			}
		}
	}
	return slices.DeleteFunc(routes, func(r string) bool { return !routeForm.MatchString(r) })
}

func fieldsOf(lit *ast.CompositeLit) (routes []string) {
	for i, e := range lit.Elts {
		switch e := e.(type) {
		case *ast.KeyValueExpr:
			if name, ok := e.Key.(*ast.Ident); ok && name.Name == "pattern" {
				routes = append(routes, textOf(e.Value))
			}
			routes = append(routes, textOf(e.Key))
		case *ast.BasicLit, *ast.BinaryExpr:
			text := textOf(e)
			if i > 0 && methodForm.MatchString(textOf(lit.Elts[i-1])) {
				text = textOf(lit.Elts[i-1]) + " " + text
			}
			if i == 0 || methodForm.MatchString(textOf(lit.Elts[0])) {
				routes = append(routes, text)
			}
		}
	}
	return routes
}

// constants are those that tables use.
var constants = map[string]string{"LinkPrefix": "/artifacts/"}

func textOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if text, err := strconv.Unquote(e.Value); err == nil && e.Kind == token.STRING {
			return text
		}
	case *ast.BinaryExpr:
		return textOf(e.X) + textOf(e.Y)
	case *ast.Ident:
		return constants[e.Name]
	}
	return ""
}
