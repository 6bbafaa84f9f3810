package main

import (
	"strings"
	"testing"
)

func TestPrintTurns_ComparesMedians(t *testing.T) {
	create, cell, gone := measurement{"create", "cove"}, measurement{"rtt-cell", "cove"}, measurement{"old", "cove"}
	before := map[measurement][]float64{create: {2, 9, 2}, cell: {1, 2}, gone: {1}}
	after := map[measurement][]float64{create: {3, 3, 30}, cell: {1, 4}}
	var out strings.Builder
	if err := printTurns(&out, 3, before, after); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	want := []string{"2.000 ms 3.000 ms 1.500 0.33 to 15.00", "1.500 ms 2.500 ms 1.667 1.00 to 2.00"}
	if len(lines) != len(want)+1 {
		t.Fatalf("got %d lines, want a head and %d rows:\n%s", len(lines), len(want), out.String())
	}
	for i, row := range want {
		if got := strings.Join(strings.Fields(lines[i+1])[2:], " "); got != row {
			t.Errorf("row %d: got %q, want %q", i, got, row)
		}
	}
}
