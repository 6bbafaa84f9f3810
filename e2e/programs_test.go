package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

// tried is a published program with an integration for a sandbox service. Its directory below e2e/programs has its lock file
// and a script that drives the integration without a model.
type tried struct {
	name string // of its directory, and of its row in docs/compatibility.md
	// byName: the SDK inside it sends no routing headers, so it needs E2B_DOMAIN.
	byName bool
	// open: the SDK inside it sends no access token with a cell and creates with secure: false, so
	// it needs a server with e2b.open_sandboxes.
	open bool
}

var triedPrograms = []tried{
	{name: "agno"},
	{name: "camel-ai", byName: true, open: true},
	{name: "crewai-tools", byName: true},
	{name: "e2b-mcp-server", byName: true, open: true},
	{name: "google-adk"},
	{name: "harbor"},
	{name: "inspect-sandboxes"},
	{name: "langchain-e2b"},
	{name: "langchain-opensandbox"},
	{name: "openai-agents"},
	{name: "opensandbox-mcp"},
	{name: "praisonai-sandbox"},
	{name: "pydantic-ai-harness"},
	{name: "smolagents"},
	{name: "verifiers"},
}

// programLimit is how long one program may take before something hangs.
const programLimit = 10 * time.Minute

// TestPrograms runs published programs of others, unmodified, against two servers, one of them
// with open sandboxes. docs/compatibility.md says what came out.
func TestPrograms(t *testing.T) {
	if os.Getenv("COVE_PROGRAMS") == "" {
		t.Skip("make test-programs runs it: it installs fifteen programs of others, a gigabyte and a half")
	}
	python, err := newerPython()
	if err != nil {
		t.Fatal(err)
	}
	registry := startRegistry(t)
	usual := newServer(t, "COVE_TLS_DOMAIN=cove.test")
	t.Cleanup(func() { removeImages(t, usual) })
	open := newServer(t, "COVE_TLS_DOMAIN=cove.test", "COVE_E2B_OPEN_SANDBOXES=true")
	names := startNames(t, "cove.test")
	rows := programRows(t)
	for _, p := range triedPrograms {
		t.Run(p.name, func(t *testing.T) {
			packages, err := venvBy(python, "program-"+p.name, filepath.Join("programs", p.name, "requirements.lock"))
			if err != nil {
				t.Fatal(err)
			}
			script, err := filepath.Abs(filepath.Join("programs", p.name, "program.py"))
			if err != nil {
				t.Fatal(err)
			}
			s := usual
			if p.open {
				s = open
			}
			domain, ca := s.domain(t)
			command := []string{filepath.Join(packages, "bin", "python"), "-B", script}
			env := append(s.e2b(), s.openSandbox(t)...)
			if p.byName {
				command = names.within(command)
				env = []string{"E2B_DOMAIN=" + domain, "E2B_API_KEY=" + s.key, "SSL_CERT_FILE=" + ca}
			}
			said := runProgram(t, command, append(env, "PROGRAM_REGISTRY="+registry.host))
			if row, ok := rows[p.name]; !ok || row.version != said.version || row.result != said.result() {
				t.Errorf("docs/compatibility.md says %+v, and this is version %s with %q", row, said.version, said.result())
			}
			s.killLeft(t)
		})
	}
}

// killLeft ends the sandboxes that a program left running, so that the next one has the server to itself.
func (s *server) killLeft(t *testing.T) {
	t.Helper()
	for left, err := range s.List(t.Context(), client.ListRequest{States: []string{"running"}}) {
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("the program left the sandbox %s running", left.ID)
		_ = s.Sandbox(left.ID).Kill(t.Context()) // it may have ended
	}
}

// trial is what the script of one program reported.
type trial struct {
	version       string
	steps, faults int // of the steps, those that the program itself gets wrong
}

func (t trial) result() string {
	if t.faults == 0 {
		return fmt.Sprintf("all %d steps", t.steps)
	}
	return fmt.Sprintf("%d of %d steps", t.steps-t.faults, t.steps)
}

// runProgram runs a script in a directory and a home of its own; each step that it reports is a subtest.
func runProgram(t *testing.T, command, env []string) trial {
	t.Helper()
	report := filepath.Join(t.TempDir(), "report.jsonl")
	ctx, cancel := context.WithTimeout(t.Context(), programLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Dir = t.TempDir()
	for _, pair := range os.Environ() {
		if !strings.HasPrefix(pair, "E2B_") && !strings.HasPrefix(pair, "OPEN_SANDBOX_") {
			cmd.Env = append(cmd.Env, pair)
		}
	}
	lib, err := filepath.Abs("programs")
	if err != nil {
		t.Fatal(err)
	}
	cmd.Env = append(cmd.Env, "HOME="+t.TempDir(), "PYTHONPATH="+lib, "PROGRAM_REPORT="+report)
	cmd.Env = append(cmd.Env, env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Errorf("%s: %v\n%s", strings.Join(command, " "), err, lastLines(out.String(), 60))
	}
	text, err := os.ReadFile(report)
	if err != nil {
		t.Fatal(err)
	}
	var said trial
	for lines := json.NewDecoder(bytes.NewReader(text)); lines.More(); {
		var line struct{ Version, Step, Fault, Error string }
		if err := lines.Decode(&line); err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
		if line.Step == "" {
			said.version = line.Version
			continue
		}
		said.steps++
		if line.Fault != "" {
			said.faults++
		}
		t.Run(line.Step, func(t *testing.T) {
			switch {
			case line.Fault == "" && line.Error != "":
				t.Error(line.Error)
			case line.Fault != "" && line.Error == "":
				t.Errorf("passes now, so it is not so any more that %s", line.Fault)
			case line.Fault != "":
				t.Logf("fails by the program itself: %s\n%s", line.Fault, line.Error)
			}
		})
	}
	if said.steps == 0 {
		t.Errorf("no step was reported\n%s", lastLines(out.String(), 60))
	}
	return said
}

// programRow is a program's row of the table in docs/compatibility.md.
type programRow struct{ version, result string }

var programRowPattern = regexp.MustCompile("(?m)^\\| `([a-z0-9-]+)` \\| ([0-9.]+) \\| [^|]+ \\| ([^|]+) \\|")

func programRows(t *testing.T) map[string]programRow {
	t.Helper()
	page, err := os.ReadFile("../docs/compatibility.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## Programs that were tried\n")
	section, _, _ = strings.Cut(section, "\n## ")
	rows := map[string]programRow{}
	for _, m := range programRowPattern.FindAllStringSubmatch(section, -1) {
		rows[m[1]] = programRow{version: m[2], result: m[3]}
	}
	return rows
}

// TestProgramsPage: the page has a row for every program that is tried, with the version that its lock file pins.
func TestProgramsPage(t *testing.T) {
	rows := programRows(t)
	for _, p := range triedPrograms {
		lock, err := os.ReadFile(filepath.Join("programs", p.name, "requirements.lock"))
		if err != nil {
			t.Fatal(err)
		}
		if row := rows[p.name]; row.version == "" || !strings.Contains("\n"+string(lock), "\n"+p.name+"=="+row.version+" ") {
			t.Errorf("docs/compatibility.md has %q as the version of %s, and its lock file another", row.version, p.name)
		}
	}
	if len(rows) != len(triedPrograms) {
		t.Errorf("docs/compatibility.md has %d programs, and %d are tried", len(rows), len(triedPrograms))
	}
}
