// Command scale simulates a large cluster: servers of Cove, each a process of its own with the real driver, claim Pods at a real API server.
// Nodes are played by this program, which says of every Pod that it runs and answers for all of them, so that thousands fit on one
// machine and what is left to measure is the path of a claim.
//
//	go build -o bin/cluster ./test/cluster && go run ./bench/scale
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// options are the flags.
type options struct {
	cluster string // program that starts an API server
	out     string
	servers []int
	pods    []int
	hands   int
	seconds int
}

// serverCommand has this program be one of the servers.
const serverCommand = "server"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	if len(os.Args) == 2 && os.Args[1] == serverCommand {
		return serve(ctx, os.Stdin, os.Stdout)
	}
	return simulate(ctx, parseFlags())
}

func parseFlags() options {
	o := options{servers: []int{1, 2, 4}, pods: []int{1000, 5000, 10000}}
	numbers := func(to *[]int) func(string) error {
		return func(text string) error {
			*to = nil
			for part := range strings.SplitSeq(text, ",") {
				n, err := strconv.Atoi(part)
				if err != nil || n < 1 {
					return fmt.Errorf("%q is not a number of things", part)
				}
				*to = append(*to, n)
			}
			return nil
		}
	}
	flag.StringVar(&o.cluster, "cluster", "bin/cluster", "the `program` of test/cluster, which starts the API server")
	flag.StringVar(&o.out, "out", "bench/results/scale.json", "`file` for the results")
	flag.Func("servers", "`numbers` of servers that claim from the first of the pools; default 1,2,4", numbers(&o.servers))
	flag.Func("pods", "`sizes` of pools; default 1000,5000,10000", numbers(&o.pods))
	flag.IntVar(&o.hands, "hands", 32, "`claims` under way at a time, of all servers together")
	flag.IntVar(&o.seconds, "seconds", 20, "how many `seconds` sandboxes come and go")
	flag.Parse()
	return o
}

// round is one pool, and servers that claim from it.
type round struct{ servers, pods int }

// rounds: more servers on a pool of one size, then larger pools for one server.
func (o options) rounds() (list []round) {
	for _, n := range o.servers {
		list = append(list, round{n, o.pods[0]})
	}
	for _, n := range o.pods[1:] {
		list = append(list, round{1, n})
	}
	return list
}

func simulate(ctx context.Context, o options) (err error) {
	w, err := newWorld(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	here := describe()
	var all []result
	for i, r := range o.rounds() {
		began := time.Now()
		found, err := w.play(ctx, r, "scale-"+strconv.Itoa(i))
		if err != nil {
			return fmt.Errorf("%d servers, %d Pods: %w", r.servers, r.pods, err)
		}
		fmt.Fprintf(os.Stderr, "%d servers, %d Pods: %v\n", r.servers, r.pods, time.Since(began).Round(time.Second))
		all = append(all, found)
		if err := write(o.out, here, all); err != nil { // what is known survives whatever comes
			return err
		}
	}
	fmt.Fprint(os.Stdout, tables(all))
	return nil
}
