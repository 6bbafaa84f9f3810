package acceptance

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// Outcome is how one test ended: pass, fail or skip.
type Outcome struct{ Test, State string }

// module is what packages are called below.
const module = "github.com/covehq/cove/"

// roots are where the tests of a suite's report are, by the name of the report.
var roots = map[string]string{
	"agentsandbox":           "e2e/agentsandbox/python/",
	"agentsandbox-langchain": "e2e/agentsandbox/langchain/",
	"e2b":                    "e2e/e2b/python/",
	"opensandbox":            "e2e/opensandbox/python/",
	"python":                 "python/",
}

// ReadOutcomes reads every report in a directory: what `go test -json` wrote (*.json), and the lines that pytest wrote (*.jsonl).
func ReadOutcomes(dir string) ([]Outcome, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json*"))
	if err != nil {
		return nil, err
	}
	var all []Outcome
	for _, file := range files {
		name, kind, _ := strings.Cut(filepath.Base(file), ".json")
		read := goOutcome
		if kind == "l" {
			read = pytestOutcome(roots[name])
		}
		found, err := readLines(file, read)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		all = append(all, found...)
	}
	return all, nil
}

func readLines(file string, read func([]byte) (Outcome, bool)) ([]Outcome, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []Outcome
	lines := bufio.NewReader(f)
	for {
		line, err := lines.ReadBytes('\n')
		if o, ok := read(line); ok {
			all = append(all, o)
		}
		if err == io.EOF {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// goOutcome reads an event of `go test -json`; what is none, such as a compiler's words, is passed over.
func goOutcome(line []byte) (Outcome, bool) {
	var e struct{ Action, Package, Test string }
	if json.Unmarshal(line, &e) != nil || e.Test == "" {
		return Outcome{}, false
	}
	switch e.Action {
	case "pass", "fail", "skip":
		return Outcome{strings.TrimPrefix(e.Package, module) + ":" + e.Test, e.Action}, true
	}
	return Outcome{}, false
}

func pytestOutcome(root string) func([]byte) (Outcome, bool) {
	states := map[string]string{"passed": "pass", "failed": "fail", "skipped": "skip", "pass": "pass", "fail": "fail", "skip": "skip"}
	return func(line []byte) (Outcome, bool) {
		var e struct{ SDK, Test, NodeID, Outcome string }
		if json.Unmarshal(line, &e) != nil || states[e.Outcome] == "" {
			return Outcome{}, false
		}
		test := e.Test + e.NodeID
		if !strings.Contains(test, "::") {
			return Outcome{}, false // a suite in another language: its tests prove methods, not rows
		}
		return Outcome{root + plain(test), states[e.Outcome]}, true
	}
}

// plain is a test of pytest without its parameters. Where the class names rows and the test none, as in a suite that is inherited, it
// is the class.
func plain(test string) string {
	test, _, _ = strings.Cut(test, "[")
	parts := strings.Split(test, "::")
	if len(parts) == 3 && len(IDs(parts[1])) > 0 && len(IDs(parts[2])) == 0 {
		parts = parts[:2]
	}
	return strings.Join(parts, "::")
}
