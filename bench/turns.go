package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"text/tabwriter"
)

// turnsCommand compares two versions: `make bench-turns BEFORE=COMMIT` checks the older one out and calls it.
const turnsCommand = "turns"

// measurement names one row of the results.
type measurement struct{ scenario, subject string }

// benchTurns runs the quick suite of two checkouts alternately, so that a machine that becomes slower or busier meets both
// versions, and compares the medians of the rounds.
func benchTurns(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet(turnsCommand, flag.ContinueOnError)
	before := flags.String("before", "", "`directory` of the older checkout, with bin/cove and bin/bench")
	after := flags.String("after", ".", "`directory` of the newer one, likewise")
	rounds := flags.Int("rounds", 5, "how many `times` each version is measured")
	only := flags.String("only", "", "run only these `scenarios`, separated by commas")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *before == "" || *rounds < 1 {
		return errors.New("turns needs -before DIRECTORY, and at least one round")
	}
	versions := []string{*before, *after}
	medians := []map[measurement][]float64{{}, {}}
	for round := range *rounds {
		for i := range versions {
			turn := (round + i) % 2 // each version is first in every second round
			rows, err := benchOnce(ctx, versions[turn], turn == 0, *only)
			if err != nil {
				return fmt.Errorf("round %d, %s: %w", round+1, versions[turn], err)
			}
			for _, r := range rows {
				if r.P50 != nil {
					m := measurement{r.Scenario, r.Subject}
					medians[turn][m] = append(medians[turn][m], *r.P50)
				}
			}
		}
	}
	fmt.Fprintln(os.Stdout, describeHost(ctx, options{}))
	return printTurns(os.Stdout, *rounds, medians[0], medians[1])
}

// benchOnce runs the quick suite of one checkout. The older one keeps its templates apart: versions that build them
// differently would replace each other's.
func benchOnce(ctx context.Context, dir string, older bool, only string) (rows []Row, err error) {
	out, err := os.MkdirTemp("", "cove-turns-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(out)) }()
	cmd := exec.CommandContext(ctx, "bin/bench", "-out", out, "-only", only)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it stops its server in order
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	if older {
		cache, err := os.UserCacheDir()
		if err != nil {
			return nil, err
		}
		cmd.Env = append(os.Environ(), "COVE_TEST_CACHE="+filepath.Join(cache, "cove-bench-before"))
	}
	if err := cmd.Run(); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(out, "latest.json"))
	if err != nil {
		return nil, err
	}
	return rows, json.Unmarshal(text, &rows)
}

// printTurns compares what both versions measured. The range shows how far single rounds were apart.
func printTurns(to io.Writer, rounds int, before, after map[measurement][]float64) error {
	byName := func(a, b measurement) int {
		return cmp.Or(cmp.Compare(a.scenario, b.scenario), cmp.Compare(a.subject, b.subject))
	}
	table := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	fmt.Fprintf(table, "median of the p50 of %d rounds\tbefore\tafter\tafter/before\trange of the ratio\n", rounds)
	for _, m := range slices.SortedFunc(maps.Keys(before), byName) {
		b, a := before[m], after[m]
		if len(a) != len(b) {
			continue
		}
		ratios := make([]float64, len(a))
		for i := range a {
			ratios[i] = a[i] / b[i]
		}
		fmt.Fprintf(table, "%s %s\t%.3f ms\t%.3f ms\t%.3f\t%.2f to %.2f\n",
			m.scenario, m.subject, median(b), median(a), median(a)/median(b), slices.Min(ratios), slices.Max(ratios))
	}
	return table.Flush()
}

// median is the mean of the two middle values where there is no single one.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	if len(sorted) == 0 {
		return 0
	}
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}
