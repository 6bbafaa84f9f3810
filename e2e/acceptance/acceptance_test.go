package acceptance_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/covehq/cove/e2e/acceptance"
)

const (
	tree     = "../.."
	jsonFile = tree + "/docs/acceptance.json"
	pageFile = tree + "/docs/acceptance.md"
)

func sources(t *testing.T) acceptance.Named {
	t.Helper()
	found, err := acceptance.ReadSources(os.DirFS(tree))
	if err != nil {
		t.Fatal(err)
	}
	for id, tests := range found.Rows { // the samples below are nobody's proof
		found.Rows[id] = slices.DeleteFunc(tests, func(test string) bool { return strings.HasPrefix(test, "e2e/acceptance:") })
	}
	return found
}

func report(t *testing.T) []acceptance.Entry {
	t.Helper()
	text, err := os.ReadFile(jsonFile)
	if err != nil {
		t.Fatal(err)
	}
	var entries []acceptance.Entry
	if err := json.Unmarshal(text, &entries); err != nil {
		t.Fatal(err)
	}
	return entries
}

// TestTheReportIsWritten writes the report of a run: `make acceptance` asks for it.
func TestTheReportIsWritten(t *testing.T) {
	dir := os.Getenv("COVE_ACCEPTANCE")
	if dir == "" {
		t.Skip("make acceptance runs it")
	}
	outcomes, err := acceptance.ReadOutcomes(dir)
	if err != nil {
		t.Fatal(err)
	}
	entries := acceptance.Judge(outcomes)
	var text bytes.Buffer
	lines := json.NewEncoder(&text)
	lines.SetEscapeHTML(false)
	text.WriteString("[\n")
	for i, e := range entries {
		if i > 0 {
			text.Truncate(text.Len() - 1)
			text.WriteString(",\n")
		}
		if err := lines.Encode(e); err != nil {
			t.Fatal(err)
		}
	}
	text.WriteString("]\n")
	if err := os.WriteFile(jsonFile, text.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(pageFile, []byte(acceptance.Page(entries)), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.State == "fail" {
			t.Errorf("%s: %s %s", e.ID, e.Why, e.Test)
		}
	}
}

func TestEveryRowIsInTheReportOnceAndInOrder(t *testing.T) {
	entries, rows := report(t), acceptance.Rows()
	if len(entries) != len(rows) {
		t.Fatalf("the report has %d rows of %d: make acceptance", len(entries), len(rows))
	}
	for i, e := range entries {
		if e.ID != rows[i].ID {
			t.Fatalf("row %d is %s, want %s", i, e.ID, rows[i].ID)
		}
		switch e.State {
		case "pass":
			if e.Test == "" {
				t.Errorf("%s passes by no test", e.ID)
			}
		case "fail", "excluded":
			if e.Why == "" {
				t.Errorf("%s is %s without a reason", e.ID, e.State)
			}
		default:
			t.Errorf("%s has the state %q", e.ID, e.State)
		}
	}
}

func TestEveryTestInTheReportExists(t *testing.T) {
	there := sources(t).Tests
	for _, e := range report(t) {
		for _, test := range append([]string{e.Test}, e.Also...) {
			name := declared(test)
			if test != "" && !there[name] {
				t.Errorf("%s names %s, which is not there: make acceptance", e.ID, test)
			}
		}
	}
}

// declared is the function or class of a test, without the class around it and the subtest in it.
func declared(test string) string {
	if parts := strings.Split(test, "::"); len(parts) > 1 {
		return parts[0] + "::" + parts[len(parts)-1]
	}
	dir, name, _ := strings.Cut(test, ":")
	name, _, _ = strings.Cut(name, "/")
	return dir + ":" + name
}

func TestThePageIsThatOfTheReport(t *testing.T) {
	page, err := os.ReadFile(pageFile)
	if err != nil {
		t.Fatal(err)
	}
	if string(page) != acceptance.Page(report(t)) {
		t.Error("docs/acceptance.md is not that of docs/acceptance.json: make acceptance")
	}
}

func TestEveryRowIsNamedByATestOrExcluded(t *testing.T) {
	named, excluded := sources(t).Rows, acceptance.Excluded()
	known := map[string]bool{}
	for _, row := range acceptance.Rows() {
		known[row.ID] = true
		if excluded[row.ID] == "" && len(named[row.ID]) == 0 {
			t.Errorf("%s (%s) is named by no test", row.ID, row.Text)
		}
	}
	for id, tests := range named {
		if !known[id] && len(tests) > 0 {
			t.Errorf("%s is no row, but %s names it", id, tests[0])
		}
	}
	for id := range excluded {
		if !known[id] {
			t.Errorf("%s is excluded and no row", id)
		}
	}
}

func TestNamesOfRows(t *testing.T) {
	for name, want := range map[string][]string{
		"test_S4_40_S4_41_variables_stay":           {"S4.40", "S4.41"},
		"TestOpenSandboxS3_2ServeWithoutArguments":  {"S3.2"},
		"S2.11 S2.12 S2.11 is ended in time":        {"S2.11", "S2.12"},
		"TestS5_1AndS0AreNone, nor is http://S3/_2": nil,
	} {
		if got := acceptance.IDs(name); !reflect.DeepEqual(got, want) {
			t.Errorf("%q names %v, want %v", name, got, want)
		}
	}
}

func TestARowIsJudgedByItsTests(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, lines ...string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(strings.Join(lines, "\n")), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("go.json",
		`{"Action":"run","Package":"github.com/covehq/cove/e2e","Test":"TestA"}`,
		`{"Action":"pass","Package":"github.com/covehq/cove/e2e","Test":"TestA/S0.1_it_works"}`,
		`{"Action":"skip","Package":"github.com/covehq/cove/e2e","Test":"TestS0_7Elsewhere"}`,
		`{"Action":"fail","Package":"github.com/covehq/cove/e2e","Test":"TestS0_2B/inner"}`,
		`{"Action":"fail","Package":"github.com/covehq/cove/e2e","Test":"TestS0_2B"}`,
		`not of the test at all`)
	write("cluster.json", `{"Action":"pass","Package":"github.com/covehq/cove/e2e","Test":"TestS0_7Elsewhere"}`)
	write("python.jsonl",
		`{"nodeid":"tests/test_x.py::test_S0_3_x[a]","outcome":"failed"}`,
		`{"nodeid":"tests/test_x.py::test_S0_3_x[b]","outcome":"passed"}`,
		`{"nodeid":"tests/test_x.py::test_S0_4_x","outcome":"skipped"}`,
		`{"nodeid":"tests/test_x.py::TestS0_5_All::test_one","outcome":"passed"}`,
		`{"nodeid":"tests/test_x.py::TestS0_5_All::test_two","outcome":"passed"}`,
		`{"nodeid":"tests/test_x.py::TestOthers::test_S0_6_x","outcome":"passed"}`,
		`{"nodeid":"tests/test_x.py::test_S0_1_S1_56_x","outcome":"passed"}`)
	outcomes, err := acceptance.ReadOutcomes(dir)
	if err != nil {
		t.Fatal(err)
	}
	entries := acceptance.Judge(outcomes)
	want := []acceptance.Entry{
		{ID: "S0.1", State: "pass", Test: "e2e:TestA/S0.1_it_works", Also: []string{"python/tests/test_x.py::test_S0_1_S1_56_x"}},
		{ID: "S0.2", State: "fail", Test: "e2e:TestS0_2B", Also: []string{}, Why: "the test failed"},
		{ID: "S0.3", State: "fail", Test: "python/tests/test_x.py::test_S0_3_x", Also: []string{}, Why: "the test failed"},
		{ID: "S0.4", State: "fail", Test: "python/tests/test_x.py::test_S0_4_x", Why: "the test was skipped"},
		{ID: "S0.5", State: "pass", Test: "python/tests/test_x.py::TestS0_5_All", Also: []string{}},
		{ID: "S0.6", State: "pass", Test: "python/tests/test_x.py::TestOthers::test_S0_6_x", Also: []string{}},
		{ID: "S0.7", State: "pass", Test: "e2e:TestS0_7Elsewhere", Also: []string{}}, // skipped in one run, and not in another
		{ID: "S0.8", State: "fail", Why: "no test that ran names it"},
	}
	if !reflect.DeepEqual(entries[:8], want) {
		t.Errorf("got  %+v\nwant %+v", entries[:8], want)
	}
	if i := slices.IndexFunc(entries, func(e acceptance.Entry) bool { return e.ID == "S1.56" }); entries[i].State != "excluded" || entries[i].Why == "" {
		t.Errorf("what waits is %+v", entries[i])
	}
}

func TestSourcesAreReadForNames(t *testing.T) {
	found, err := acceptance.ReadSources(fstest.MapFS{
		"e2e/a_test.go":    {Data: []byte("package x\nfunc TestS0_1A(t *testing.T) {\n\tt.Run(\"S0.2 it is so\", nil)\n\tt.Errorf(\"S0.3 is not\")\n\t_ = map[string]int{\"S0.4 as a key\": 1}\n}\n")},
		"python/test_x.py": {Data: []byte("async def test_S0_5_x():\n    def test_inner(): pass\n")},
		"python/x.py":      {Data: []byte("def test_S0_6_x(): pass\n")},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]string{
		"S0.1": {"e2e:TestS0_1A"}, "S0.2": {"e2e:TestS0_1A/S0.2_it_is_so"}, "S0.4": {"e2e:TestS0_1A/S0.4_as_a_key"}, "S0.5": {"python/test_x.py::test_S0_5_x"},
	}
	if !reflect.DeepEqual(found.Rows, want) {
		t.Errorf("got %v, want %v", found.Rows, want)
	}
}
