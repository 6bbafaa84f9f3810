// Command bench measures a server on this machine: it starts one, runs scenarios against it, prints a table with what
// was hoped for, writes bench/results/latest.json and leaves nothing else behind.
//
// A missed bar is a finding and not a failure: the exit status tells only whether every operation succeeded.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

// scenario is one thing that is measured.
type scenario struct {
	name string
	run  func(ctx context.Context, w *world) ([]Row, error)
}

// Each leaves the server as it found it, but for the last: its sandboxes end with the server.
var scenarios = []scenario{
	{"create", measureCreate},
	{"tti-data", measureFirstCell},
	{"rtt-cell", measureCell},
	{"rtt-cmd", measureCommand},
	{"burst-100", measureBurst},
	{"files-100mb", measureFiles}, // its writing goes on in the background for a while
	{"density", measureDensity},
}

// options are the flags.
type options struct {
	cove string // the program that is measured
	out  string // where the results go
	only []string
	n    int
}

func main() {
	if len(os.Args) == 3 && os.Args[1] == baselineCommand {
		exit(serveBaseline(os.Args[2]))
	}
	var o options
	var only string
	flag.StringVar(&o.cove, "cove", "bin/cove", "the `program` to measure")
	flag.StringVar(&o.out, "out", "bench/results", "`directory` of latest.json and latest.host.json")
	flag.StringVar(&only, "only", "", "run only these `scenarios`, separated by commas: "+strings.Join(names(), ", "))
	flag.IntVar(&o.n, "n", 0, "`samples` of each latency; default: as many as fit into a minute")
	flag.Parse()
	if only != "" {
		o.only = strings.Split(only, ",")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	exit(run(ctx, o))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func names() []string {
	var all []string
	for _, s := range scenarios {
		all = append(all, s.name)
	}
	return all
}

func run(ctx context.Context, o options) (err error) {
	for _, name := range o.only {
		if !slices.Contains(names(), name) {
			return fmt.Errorf("there is no scenario %q; there are %s", name, strings.Join(names(), ", "))
		}
	}
	if os.Geteuid() != 0 {
		return errors.New("this starts a server with real sandboxes and needs root")
	}
	begun := time.Now()
	host := describeHost(ctx, o.cove)
	fmt.Fprintln(os.Stdout, host)
	w, err := open(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	rows, failed := w.measure(ctx, o.only)
	host.Seconds = time.Since(begun).Seconds()
	printTable(os.Stdout, rows)
	fmt.Fprintf(os.Stdout, "\n%.0f s\n", host.Seconds)
	return errors.Join(failed, failures(rows), writeResults(o.out, rows, host))
}

// measure runs the scenarios; one that breaks does not keep the others from running.
func (w *world) measure(ctx context.Context, only []string) (rows []Row, failed error) {
	for _, s := range scenarios {
		if len(only) > 0 && !slices.Contains(only, s.name) {
			continue
		}
		begun := time.Now()
		got, err := s.run(ctx, w)
		rows = append(rows, got...)
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", s.name, err))
		}
		fmt.Fprintf(os.Stderr, "%-12s %5.1f s\n", s.name, time.Since(begun).Seconds())
		if ctx.Err() != nil {
			return rows, failed
		}
	}
	return rows, failed
}

// budget is how often a latency is measured and how long that may take: a busy machine gets fewer samples, so that all
// of it stays below a minute. Whoever asks for a number of samples gets it.
type budget struct {
	samples int
	limit   time.Duration // zero: none
}

// fewest samples are taken however long they take.
const fewest = 20

func (w *world) budget(samples int, limit time.Duration) budget {
	if w.options.n > 0 {
		return budget{samples: w.options.n}
	}
	return budget{samples, limit}
}

// spent tells whether n samples since begun are enough.
func (b budget) spent(n int, begun time.Time) bool {
	return n >= b.samples || b.limit > 0 && n >= fewest && time.Since(begun) > b.limit
}
