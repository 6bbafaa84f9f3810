package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// reportCommand makes this program write the figures of a full run into the documents.
const reportCommand = "report"

// report puts tables between the markers of documents: <!-- bench:begin NAME --> and <!-- bench:end -->. Everything else
// in them is somebody's own words.
func report(args []string) error {
	flags := flag.NewFlagSet(reportCommand, flag.ExitOnError)
	dir := flags.String("results", "bench/results", "`directory` of peers.json and peers.host.json")
	if err := flags.Parse(args); err != nil {
		return err
	}
	files := flags.Args()
	if len(files) == 0 {
		files = []string{"README.md", "docs/performance.md"}
	}
	r, err := readResults(*dir)
	if err != nil {
		return err
	}
	for _, file := range files {
		if err := r.fill(file); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

// results are one full run.
type results struct {
	rows []Row
	host host
}

func readResults(dir string) (r results, err error) {
	for file, to := range map[string]any{"peers.json": &r.rows, "peers.host.json": &r.host} {
		text, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			return r, fmt.Errorf("%w: run make bench first", err)
		}
		if err := json.Unmarshal(text, to); err != nil {
			return r, fmt.Errorf("%s: %w", file, err)
		}
	}
	return r, nil
}

var marked = regexp.MustCompile(`(?s)(<!-- bench:begin ?([a-z-]*) -->\n).*?(<!-- bench:end -->)`)

// fill replaces what is between the markers of one document.
func (r results) fill(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var failed error
	filled := marked.ReplaceAllStringFunc(string(text), func(all string) string {
		part := marked.FindStringSubmatch(all)
		table, known := tables[part[2]]
		if !known {
			failed = errors.Join(failed, fmt.Errorf("there is no table %q", part[2]))
			return all
		}
		return part[1] + "\n" + strings.TrimSpace(table(r)) + "\n\n" + part[3]
	})
	if failed != nil || filled == string(text) {
		return failed
	}
	return os.WriteFile(file, []byte(filled), 0o644)
}

// tables by the name in their marker; the one without a name is the README's.
var tables = map[string]func(results) string{
	"":         results.summary,
	"host":     results.about,
	"first":    results.first,
	"use":      table("create", "rtt-cell", "rtt-cmd"),
	"fork":     table("fork-50mb", "fork-256mb", "fork-n10"),
	"heap":     table("growth-heap"),
	"upper":    table("growth-upper"),
	"pause":    table("pause", "resume"),
	"load":     table("burst-100", "sustained"),
	"live":     table("growth-live"),
	"density":  table("density"),
	"transfer": table("files-100mb"),
}

// ways are the columns of a comparison: a subject and what people call it.
var ways = []struct{ subject, title string }{
	{"cove", "**Cove**"}, {"zygote-fork", "fork of the zygote"}, {"python3", "plain process"}, {"bwrap", "bwrap"}, {"crun", "crun"},
	{"runc", "runc"}, {"docker", "`docker run`"},
}

// firsts are its lines.
var firsts = []struct{ scenario, title string }{
	{"tti-cmd", "create → `echo` has ended"},
	{"tti-py", "create → `1+1` answered"},
	{"tti-data", "create → pandas `DataFrame.sum()` answered"},
}

func (r results) find(scenario, subject string) (Row, bool) {
	for _, row := range r.rows {
		if row.Scenario == scenario && row.Subject == subject {
			return row, true
		}
	}
	return Row{}, false
}

// about is the machine in one paragraph.
func (r results) about() string {
	h := r.host
	text := fmt.Sprintf("%s; %d cores (%s), %.0f GB, Linux %s, cgroup %s; %s.", h.Version, h.Cores, h.CPU, float64(h.MemoryMB)/1e3, h.Kernel, h.Cgroup,
		h.Date.Format("2 January 2006"))
	if h.Quiet {
		text += " The machine was quiet."
	} else {
		text += fmt.Sprintf(" **The machine was not quiet** (load %.2f): compare ratios, not milliseconds.", h.Load)
	}
	for _, w := range ways {
		if v, found := h.Peers[w.subject]; found {
			text += fmt.Sprintf(" %s: %s.", w.subject, v)
		}
	}
	for _, s := range h.Skipped {
		text += fmt.Sprintf(" %s did not take part: %s.", s.Subject, s.Reason)
	}
	return text
}

// compared is the table of the first answers, medians with how many times ours.
func (r results) compared() string {
	var b strings.Builder
	b.WriteString("| p50 |")
	for _, w := range ways {
		b.WriteString(" " + w.title + " |")
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(ways)) + "\n")
	for _, f := range firsts {
		b.WriteString("| " + f.title + " |")
		ours, _ := r.find(f.scenario, "cove")
		for _, w := range ways {
			row, found := r.find(f.scenario, w.subject)
			if !found && w.subject == plainName {
				row, found = r.find(f.scenario, "exec")
			}
			switch {
			case !found || row.OK == 0:
				b.WriteString(" – |")
			case w.subject == "cove" || ours.Value == 0:
				b.WriteString(" **" + amount(row.Value, row.Unit) + "** |")
			default:
				fmt.Fprintf(&b, " %s (%s) |", amount(row.Value, row.Unit), times(row.Value/ours.Value))
			}
		}
		b.WriteString("\n")
	}
	return b.String()
}

// first is the comparison and every row of it.
func (r results) first() string {
	return r.compared() + "\n" + table("tti-cmd", "tti-py", "tti-data")(r)
}

// facts are the README's other lines: what, which rows, and what is said of them.
var facts = []struct {
	title, scenario, subject string
	more                     string // another subject, for the last column
	say                      string
}{
	{"`1+1` in a warm kernel", "rtt-cell", "cove", "", ""},
	{"`true` in a warm sandbox", "rtt-cmd", "cove", "", ""},
	{"fork with a 50 MB array → first cell in the child", "fork-50mb", "cove-array", "cove-array-stall", "the parent takes no cell for %s"},
	{"fork with 50 MB of Python objects → the same", "fork-50mb", "cove-objects", "cove-objects-stall", "the parent takes no cell for %s"},
	{"10 forks at once with a 50 MB array, each", "fork-n10", "cove-array", "", ""},
	{"pause", "pause", "cove", "", ""},
	{"resume", "resume", "cove", "cove-first-cell", "%s with the first cell"},
	{"100 creates at once", "burst-100", "cove", "", ""},
	{"create, cell, destroy with 16 clients for 60 s", "sustained", "cove", "cove-worst-second", "%s in the worst second"},
	{"memory of one of 1,000 living sandboxes, everything counted", "density", "cove-all", "cove-pss", "%s by PSS"},
	{"create → pandas answered, with 1,000 alive", "growth-live", "cove-1000", "cove-1000/cove-10", "%s of that with 10 alive"},
}

// summary is the README's.
func (r results) summary() string {
	var b strings.Builder
	b.WriteString(r.about() + "\n\n" + r.compared() + "\n| | n | p50 | p99 | |\n|---|---|---|---|---|\n")
	for _, f := range facts {
		row, found := r.find(f.scenario, f.subject)
		if !found {
			continue
		}
		said := ""
		if row.Unit != "ms" {
			said = amount(row.Value, row.Unit)
		}
		if more, found := r.find(f.scenario, f.more); found {
			said = strings.TrimPrefix(said+"; "+fmt.Sprintf(f.say, amount(more.Value, more.Unit)), "; ")
		}
		if row.OK < row.N {
			said += fmt.Sprintf("; %d of %d failed", row.N-row.OK, row.N)
		}
		p50, p99 := percent(row.P50), percent(row.P99)
		if row.Unit != "ms" {
			p50, p99 = "", "" // of something else than the line is about
		}
		fmt.Fprintf(&b, "| %s | %d | %s | %s | %s |\n", f.title, row.N, p50, p99, said)
	}
	b.WriteString("\n![the three jobs, each way, on a logarithmic scale](bench/results/peers.png)\n")
	return b.String()
}

// table lists every row of some scenarios.
func table(scenarios ...string) func(results) string {
	return func(r results) string {
		var b strings.Builder
		b.WriteString("| scenario | subject | ok / n | p50 | p95 | p99 | value | bar |\n|---|---|---|---|---|---|---|---|\n")
		for _, name := range scenarios {
			for _, row := range r.rows {
				if row.Scenario == name {
					fmt.Fprintf(&b, "| %s | %s | %d / %d | %s | %s | %s | %s | %s |\n", name, row.Subject, row.OK, row.N,
						percent(row.P50), percent(row.P95), percent(row.P99), amount(row.Value, row.Unit), verdicts(row))
				}
			}
		}
		return b.String()
	}
}

func percent(v *float64) string {
	if v == nil {
		return ""
	}
	return amount(*v, "ms")
}

// amount is a value as people write it, with no more digits than it is worth.
func amount(v float64, unit string) string {
	switch {
	case unit == "ms" && v >= 1000:
		return fmt.Sprintf("%.2f s", v/1000)
	case unit == "x":
		return times(v)
	case unit == "":
		return fmt.Sprintf("%g", v)
	}
	return digits(v) + " " + unit
}

func times(v float64) string { return digits(v) + "×" }

// digits are two or three of them.
func digits(v float64) string {
	switch {
	case v < 1:
		return fmt.Sprintf("%.2f", v)
	case v < 20:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}
