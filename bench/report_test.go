package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// exampleRun is a run in which one peer did not take part.
func exampleRun() results {
	row := func(scenario, subject string, p50 float64) Row {
		return Row{Scenario: scenario, Subject: subject, N: 20, OK: 20, P50: &p50, P95: &p50, P99: &p50, Value: p50, Unit: "ms"}
	}
	return results{
		rows: []Row{
			row("tti-data", "cove", 10), row("tti-data", "docker", 1480), ratio(row("tti-data", "docker", 1480), row("tti-data", "cove", 10)),
			row("rtt-cell", "cove", 1.48), {Scenario: "sustained", Subject: "cove", N: 3600, OK: 3600, Value: 61.2, Unit: "/s"},
		},
		host: host{
			Kernel: "6.18", Cores: 2, CPU: "a CPU", MemoryMB: 25274, Cgroup: "v1", Version: "cove 1", Date: time.Date(2026, 11, 15, 0, 0, 0, 0, time.UTC), Quiet: true,
			Peers: map[string]string{"docker": "Docker 20"}, Skipped: []skipped{{"crun", "there is none"}},
		},
	}
}

func TestTablesStandBetweenTheirMarkersAndOnlyThere(t *testing.T) {
	file := filepath.Join(t.TempDir(), "doc.md")
	before := "# Words\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nbetween\n<!-- bench:begin first -->\n<!-- bench:end -->\nafter\n"
	if err := os.WriteFile(file, []byte(before), 0o644); err != nil {
		t.Fatal(err)
	}
	r := exampleRun()
	var first string
	for range 2 {
		if err := r.fill(file); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if first == "" {
			first = string(text)
		}
		if string(text) != first {
			t.Errorf("a second time it is another:\n%s", text)
		}
	}
	for _, want := range []string{"# Words\n", "\nbetween\n", "\nafter\n", "| **10.0 ms** |", "1.48 s (148×)", "crun did not take part: there is none.", "61 /s", "15 November 2026"} {
		if !strings.Contains(first, want) {
			t.Errorf("%q is missing in:\n%s", want, first)
		}
	}
	if strings.Contains(first, "old") {
		t.Errorf("what was there is there still:\n%s", first)
	}
}

func TestAMarkerWithoutATableIsAnError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "doc.md")
	if err := os.WriteFile(file, []byte("<!-- bench:begin nothing -->\n<!-- bench:end -->\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := exampleRun().fill(file); err == nil || !strings.Contains(err.Error(), "nothing") {
		t.Errorf("got %v", err)
	}
}

// The documents' markers must have tables, whoever edits them.
func TestTheDocumentsHaveMarkersThatAreKnown(t *testing.T) {
	for _, file := range []string{"README.md", "docs/performance.md"} {
		text, err := os.ReadFile(filepath.Join("..", file))
		if err != nil {
			t.Fatal(err)
		}
		found := marked.FindAllStringSubmatch(string(text), -1)
		if len(found) == 0 || len(found) != strings.Count(string(text), "<!-- bench:begin") {
			t.Errorf("%s: %d complete pairs of markers of %d begun", file, len(found), strings.Count(string(text), "<!-- bench:begin"))
		}
		for _, part := range found {
			if tables[part[2]] == nil {
				t.Errorf("%s: there is no table %q", file, part[2])
			}
		}
	}
}
