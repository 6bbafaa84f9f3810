// Command bench measures a server on this machine: it starts one, runs scenarios against it, prints a table with what
// was hoped for, writes bench/results and leaves nothing else behind. The full suite does the same job with docker, runc,
// crun, bubblewrap and plain processes in turn, from the same files.
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
	name  string
	quick bool // part of the quick suite too
	peers bool // others do the same
	run   func(ctx context.Context, w *world) ([]Row, error)
}

// Each leaves the server as it found it, but for the last: its sandboxes end with the server.
var scenarios = []scenario{
	{"create", true, false, measureCreate},
	{"tti-cmd", false, true, measureFirstCommand},
	{"tti-py", false, true, measureFirstSum},
	{"tti-data", true, true, measureFirstFrame},
	{"rtt-cell", true, false, measureCell},
	{"rtt-cmd", true, false, measureCommand},
	{"pause", false, false, measurePause}, // and resume
	{"fork-50mb", false, false, measureFork(50)},
	{"fork-256mb", false, false, measureFork(256)},
	{"fork-n10", false, false, measureForkMany},
	{"growth-heap", false, false, measureForkByHeap},
	{"growth-upper", false, false, measureForkByUpper},
	{"burst-100", true, true, measureBurst},
	{"sustained", false, true, measureSustained},
	{"files-100mb", true, false, measureFiles}, // its writing goes on in the background for a while
	{"density", true, false, measureDensity},   // and growth-live
}

// options are the flags.
type options struct {
	cove    string // the program that is measured
	out     string // where the results go
	only    []string
	n       int
	full    bool          // every scenario, with peers
	smoke   bool          // so little that it only shows that everything works
	quiet   time.Duration // how long to wait for a quiet machine
	live    int           // sandboxes of density
	seconds int           // of sustained
}

// results are the name of the files that a suite writes.
func (o options) results() string {
	if o.full {
		return "peers"
	}
	return "latest"
}

func main() {
	if len(os.Args) == 3 && os.Args[1] == baselineCommand {
		exit(serveBaseline(os.Args[2]))
	}
	if len(os.Args) > 1 && os.Args[1] == reportCommand {
		exit(report(os.Args[2:]))
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if len(os.Args) > 1 && os.Args[1] == kubernetesCommand {
		exit(benchmarkKubernetes(ctx, os.Args[2:]))
	}
	if len(os.Args) > 1 && os.Args[1] == turnsCommand {
		exit(benchTurns(ctx, os.Args[2:]))
	}
	o := parseFlags()
	exit(run(ctx, o))
}

func parseFlags() options {
	var o options
	var only string
	flag.StringVar(&o.cove, "cove", "bin/cove", "the `program` to measure")
	flag.StringVar(&o.out, "out", "bench/results", "`directory` of latest.json, or peers.json with -full, and of the host beside it")
	flag.StringVar(&only, "only", "", "run only these `scenarios`, separated by commas: "+strings.Join(names(func(scenario) bool { return true }), ", "))
	flag.IntVar(&o.n, "n", 0, "`samples` of each latency; default: as many as fit into a minute, 20 where others take part")
	flag.BoolVar(&o.full, "full", false, "run every scenario, and the same job with docker, runc, crun, bubblewrap and plain processes in turn")
	flag.BoolVar(&o.smoke, "smoke", false, "so few samples that the numbers mean nothing: shows that every scenario works")
	flag.DurationVar(&o.quiet, "quiet", -1, "how `long` to wait for a quiet machine; default: 2m with -full, else not at all")
	flag.IntVar(&o.live, "live", 0, "`sandboxes` of density; default: 300, with -full 1000")
	flag.IntVar(&o.seconds, "seconds", 60, "how many `seconds` sustained takes")
	flag.Parse()
	if only != "" {
		o.only = strings.Split(only, ",")
	}
	return o.withDefaults()
}

func (o options) withDefaults() options {
	pick := func(set, smoke, full, quick int) int {
		switch {
		case set > 0:
			return set
		case o.smoke:
			return smoke
		case o.full:
			return full
		}
		return quick
	}
	o.live = pick(o.live, 20, 1000, 300)
	if o.smoke {
		o.n, o.seconds = pick(o.n, 2, 0, 0), min(o.seconds, 3)
	}
	if o.quiet < 0 {
		o.quiet = 0
		if o.full && !o.smoke {
			o.quiet = 2 * time.Minute
		}
	}
	return o
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func names(which func(scenario) bool) []string {
	var all []string
	for _, s := range scenarios {
		if which(s) {
			all = append(all, s.name)
		}
	}
	return all
}

// chosen are the scenarios to run, by name.
func (o options) chosen() ([]string, error) {
	every := names(func(scenario) bool { return true })
	for _, name := range o.only {
		if !slices.Contains(every, name) {
			return nil, fmt.Errorf("there is no scenario %q; there are %s", name, strings.Join(every, ", "))
		}
	}
	if len(o.only) > 0 {
		return o.only, nil
	}
	return names(func(s scenario) bool { return s.quick || o.full }), nil
}

func run(ctx context.Context, o options) (err error) {
	chosen, err := o.chosen()
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("this starts a server with real sandboxes and needs root")
	}
	begun := time.Now()
	host := describeHost(ctx, o)
	fmt.Fprintln(os.Stdout, host)
	w, err := open(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	if o.full && slices.ContainsFunc(scenarios, func(s scenario) bool { return s.peers && slices.Contains(chosen, s.name) }) {
		w.peers = openPeers(ctx, w)
		host.Peers, host.Skipped = w.peers.about()
		for _, s := range host.Skipped {
			fmt.Fprintf(os.Stdout, "%s does not take part: %s\n", s.Subject, s.Reason)
		}
	}
	rows, failed := w.measure(ctx, chosen)
	host.Seconds = time.Since(begun).Seconds()
	printTable(os.Stdout, rows)
	fmt.Fprintf(os.Stdout, "\n%s\n%.0f s\n", host, host.Seconds)
	return errors.Join(failed, failures(rows), writeResults(o.out, o.results(), rows, host))
}

// measure runs the scenarios; one that breaks does not keep the others from running.
func (w *world) measure(ctx context.Context, chosen []string) (rows []Row, failed error) {
	for _, s := range scenarios {
		if !slices.Contains(chosen, s.name) {
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

// budget is how often a latency is measured and how long that may take: a busy machine gets fewer samples, so that the
// quick suite stays below a minute. Whoever asks for a number of samples gets it, and so does the full suite.
type budget struct {
	samples int
	limit   time.Duration // zero: none
}

// fewest samples are taken however long they take.
const fewest = 20

func (w *world) budget(samples int, limit time.Duration) budget {
	switch {
	case w.options.n > 0:
		return budget{samples: w.options.n}
	case w.options.full:
		return budget{samples: samples}
	}
	return budget{samples, limit}
}

// spent tells whether n samples since begun are enough.
func (b budget) spent(n int, begun time.Time) bool {
	return n >= b.samples || b.limit > 0 && n >= fewest && time.Since(begun) > b.limit
}
