package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Row is one line of the results. Latencies have percentiles, and their value is the median; everything else has a
// value only.
type Row struct {
	Scenario string   `json:"scenario"`
	Subject  string   `json:"subject"` // cove, or what it is compared with
	N        int      `json:"n"`       // tried
	OK       int      `json:"ok"`      // of which succeeded; only these are in the numbers
	P50      *float64 `json:"p50_ms"`
	P95      *float64 `json:"p95_ms"`
	P99      *float64 `json:"p99_ms"`
	Max      *float64 `json:"-"` // printed only
	Value    float64  `json:"value"`
	Unit     string   `json:"unit"` // MB is 10^6 bytes; x is a ratio
}

// series collects how long one thing took, again and again.
type series struct {
	n     int
	took  []time.Duration
	fails []error
}

func (s *series) add(d time.Duration, err error) {
	s.n++
	if err != nil {
		s.fails = append(s.fails, err)
		return
	}
	s.took = append(s.took, d)
}

// row sums a series up.
func (s *series) row(scenario, subject string) Row {
	p50, p95, p99 := ms(percentile(s.took, 50)), ms(percentile(s.took, 95)), ms(percentile(s.took, 99))
	slowest := ms(percentile(s.took, 100))
	return Row{Scenario: scenario, Subject: subject, N: s.n, OK: len(s.took), P50: &p50, P95: &p95, P99: &p99, Max: &slowest, Value: p50, Unit: "ms"}
}

// err is the first failure; the others are usually the same.
func (s *series) err() error {
	if len(s.fails) == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d failed, the first: %w", len(s.fails), s.n, s.fails[0])
}

func ms(d time.Duration) float64 { return round(float64(d.Microseconds()) / 1e3) }

// round keeps what a measurement can carry.
func round(v float64) float64 { return math.Round(v*1e3) / 1e3 }

// percentile by nearest rank: the smallest sample that p percent of the samples do not exceed. Nothing is interpolated
// or trimmed; below a hundred samples the 99th is the slowest.
func percentile(took []time.Duration, p int) time.Duration {
	if len(took) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(took))
	rank := (len(sorted)*p + 99) / 100
	return sorted[max(rank, 1)-1]
}

// ratio compares what two rows say.
func ratio(a, b Row) Row {
	r := Row{Scenario: a.Scenario, Subject: a.Subject + "/" + b.Subject, N: min(a.N, b.N), OK: min(a.OK, b.OK), Unit: "x"}
	if b.Value != 0 {
		r.Value = round(a.Value / b.Value)
	}
	return r
}

// bar is what a row should reach on a quiet machine. Ratios count; absolute values are guides.
type bar struct {
	scenario, subject string
	field             string // p50, p99 or value
	atLeast           bool   // else at most
	limit             float64
}

var bars = []bar{
	{"create", "cove", "p50", false, 8},
	{"create", "cove", "p99", false, 30},
	{"create", "cove/zygote-fork", "value", false, 1.5},
	{"create", "cove-driver/zygote-fork", "value", false, 1.5},
	{"tti-data", "cove", "p50", false, 15},
	{"tti-data", "docker/cove", "value", true, 100},
	{"tti-data", "runc/cove", "value", true, 60},
	{"tti-data", "crun/cove", "value", true, 60},
	{"tti-data", "bwrap/cove", "value", true, 60},
	{"rtt-cell", "cove", "p50", false, 1.5},
	{"rtt-cmd", "cove", "p50", false, 5},
	{"pause", "cove", "p50", false, 2},
	{"resume", "cove", "p50", false, 2},
	{"fork-50mb", "cove-array", "p50", false, 20},
	{"fork-50mb", "cove-array-stall", "p50", false, 12},
	{"fork-50mb", "cove-objects", "p50", false, 20},
	{"fork-50mb", "cove-objects-stall", "p50", false, 12},
	{"fork-n10", "cove-array", "p50", false, 10},
	{"fork-n10", "cove-objects", "p50", false, 10},
	{"density", "cove", "value", false, 6},
	{"density", "cove-all", "value", false, 6},
	{"growth-live", "cove-1000/cove-10", "value", false, 2},
	{"burst-100", "cove", "value", false, 3},
	{"sustained", "cove", "value", true, 60},
	{"sustained", "cove-server-growth", "value", false, 8},
	{"sustained", "cove-maker-growth", "value", false, 8},
	{"sustained", "cove-descriptor-growth", "value", false, 16},
	{"sustained", "cove-cgroup-growth", "value", false, 0},
	{"files-100mb", "cove-put/loopback-put", "value", true, 0.5},
	{"files-100mb", "cove-get/loopback-get", "value", true, 0.5},
	{"files-100mb", "cove-growth", "value", false, 32},
	{"pod-first-cmd", "warm", "p50", false, 50},
	{"pod-first-cmd", "cold/warm", "value", true, 20},
	{"pod-writes", "claim", "value", false, 2},
}

func (b bar) value(r Row) (v float64, unit string) {
	switch {
	case b.field == "p50" && r.P50 != nil:
		return *r.P50, "ms"
	case b.field == "p99" && r.P99 != nil:
		return *r.P99, "ms"
	}
	return r.Value, r.Unit
}

func (b bar) met(r Row) bool {
	v, _ := b.value(r)
	if r.OK < r.N || r.OK == 0 {
		return false
	}
	return v <= b.limit && !b.atLeast || v >= b.limit && b.atLeast
}

func (b bar) text(r Row) string {
	_, unit := b.value(r)
	field, sign, verdict := "", "≤", "missed"
	if b.field != "value" {
		field = b.field + " "
	}
	if b.atLeast {
		sign = "≥"
	}
	if b.met(r) {
		verdict = "met"
	}
	return fmt.Sprintf("%s%s %s: %s", field, sign, strings.TrimSpace(fmt.Sprintf("%g %s", b.limit, unit)), verdict)
}

// verdicts of all bars that are about a row.
func verdicts(r Row) string {
	var all []string
	for _, b := range bars {
		if b.scenario == r.Scenario && b.subject == r.Subject {
			all = append(all, b.text(r))
		}
	}
	return strings.Join(all, "; ")
}

func printTable(out io.Writer, rows []Row) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\nscenario\tsubject\tok/n\tp50 ms\tp95 ms\tp99 ms\tmax ms\tvalue\tunit\tbar")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%s\t%d/%d\t%s\t%s\t%s\t%s\t%.5g\t%s\t%s\n", r.Scenario, r.Subject, r.OK, r.N,
			number(r.P50), number(r.P95), number(r.P99), number(r.Max), r.Value, r.Unit, verdicts(r))
	}
	t.Flush()
}

func number(v *float64) string {
	if v == nil {
		return "–"
	}
	return fmt.Sprintf("%.2f", *v)
}

// failures names the rows in which an operation did not succeed.
func failures(rows []Row) error {
	var all []error
	for _, r := range rows {
		if r.OK < r.N {
			all = append(all, fmt.Errorf("%s, %s: %d of %d succeeded", r.Scenario, r.Subject, r.OK, r.N))
		}
	}
	return errors.Join(all...)
}

// writeResults writes NAME.json and, beside it, NAME.host.json.
func writeResults(dir, name string, rows []Row, h host) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var list strings.Builder // a row per line, so that two results can be compared by eye
	for i, r := range rows {
		text, err := json.Marshal(r)
		if err != nil {
			return err
		}
		list.WriteString([]string{"[\n  ", ",\n  "}[min(i, 1)] + string(text))
	}
	if len(rows) == 0 {
		list.WriteString("[")
	}
	list.WriteString("\n]\n")
	about, err := json.MarshalIndent(h, "", "  ")
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, name+".json"), []byte(list.String()), 0o644),
		os.WriteFile(filepath.Join(dir, name+".host.json"), append(about, '\n'), 0o644),
	)
}
