package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestPercentilesAreSamplesByNearestRank(t *testing.T) {
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(100 - i)
	}
	for _, c := range []struct {
		took []time.Duration
		p    int
		want time.Duration
	}{
		{nil, 50, 0},
		{[]time.Duration{7}, 50, 7},
		{[]time.Duration{7}, 99, 7},
		{[]time.Duration{4, 1, 3, 2}, 50, 2},
		{[]time.Duration{5, 1, 3, 2, 4}, 50, 3},
		{[]time.Duration{5, 1, 3, 2, 4}, 95, 5},
		{hundred, 50, 50},
		{hundred, 95, 95},
		{hundred, 99, 99},
	} {
		if got := percentile(c.took, c.p); got != c.want {
			t.Errorf("p%d of %d samples is %d, want %d", c.p, len(c.took), got, c.want)
		}
	}
}

func TestAFailureIsCountedAndInNoNumber(t *testing.T) {
	var s series
	s.add(2*time.Millisecond, nil)
	s.add(time.Hour, errors.New("no"))
	r := s.row("create", "cove")
	if r.N != 2 || r.OK != 1 || *r.P99 != 2 || s.err() == nil || failures([]Row{r}) == nil {
		t.Errorf("%+v, %v", r, s.err())
	}
	for _, b := range bars {
		if b.scenario == r.Scenario && b.subject == r.Subject && b.met(r) {
			t.Errorf("a row with a failure meets a bar: %s", b.text(r))
		}
	}
}

func TestResultsAreAListOfRowsAndAHost(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "results")
	p := 1.5
	rows := []Row{{Scenario: "a", Subject: "cove", N: 1, OK: 1, P50: &p, P95: &p, P99: &p, Value: 1.5, Unit: "ms"}, {Scenario: "a", Subject: "cove/x", Unit: "x"}}
	for _, rows := range [][]Row{rows, nil} {
		if err := writeResults(dir, "latest", rows, host{Cores: 2}); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(dir, "latest.json"))
		if err != nil {
			t.Fatal(err)
		}
		var back []map[string]any
		if err := json.Unmarshal(text, &back); err != nil || len(back) != len(rows) {
			t.Fatalf("%v: %s", err, text)
		}
		for _, r := range back {
			if len(r) != 9 {
				t.Errorf("%d fields: %v", len(r), r)
			}
		}
	}
}
