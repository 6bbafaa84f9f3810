package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"text/template"
	"time"

	"github.com/covehq/cove/client"
)

// kubernetesCommand measures a server whose sandboxes are Pods of the cluster that the tests use: `make bench-kubernetes` starts one.
const kubernetesCommand = "kubernetes"

// Templates of that server: one with Pods that wait, the same without, and one so small that many wait.
const (
	warmTemplate  = "python"
	coldTemplate  = "cold"
	plainTemplate = "plain"
)

type kubernetesOptions struct {
	options
	warm, cold int // samples
	pool       int // Pods that wait for the first jobs
	burst      int // Pods that wait to be claimed all at once
	hands      int // who claim them
}

func parseKubernetes(args []string) (o kubernetesOptions, err error) {
	flags := flag.NewFlagSet(kubernetesCommand, flag.ContinueOnError)
	flags.StringVar(&o.cove, "cove", "bin/cove", "the `program` to measure")
	flags.StringVar(&o.out, "out", "bench/results", "`directory` of kubernetes.json and of the host beside it")
	flags.IntVar(&o.warm, "n", 60, "`samples` with a Pod that waits")
	flags.IntVar(&o.cold, "cold", 6, "`samples` without one")
	flags.IntVar(&o.pool, "pool", 4, "`Pods` that wait for these")
	flags.IntVar(&o.burst, "burst", 60, "`Pods` that are claimed all at once")
	flags.IntVar(&o.hands, "hands", 16, "`claims` under way at once then")
	flags.DurationVar(&o.quiet, "quiet", 0, "how `long` to wait for a quiet machine")
	return o, flags.Parse(args)
}

// pods is a server of our own whose sandboxes are Pods.
type pods struct {
	kubernetesOptions
	*world
	api       *apiServer
	namespace string
}

// benchmarkKubernetes is a suite of its own: it needs a cluster and nobody else takes part.
func benchmarkKubernetes(ctx context.Context, args []string) (err error) {
	o, err := parseKubernetes(args)
	if err != nil {
		return err
	}
	begun := time.Now()
	host := describeHost(ctx, o.options)
	fmt.Fprintln(os.Stdout, host)
	p, err := openPods(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	var rows []Row
	for _, measure := range []func(context.Context) ([]Row, error){p.first, p.burstOfClaims} {
		got, err := measure(ctx)
		if rows = append(rows, got...); err != nil {
			return errors.Join(err, p.complain())
		}
	}
	host.Seconds = time.Since(begun).Seconds()
	printTable(os.Stdout, rows)
	return errors.Join(failures(rows), writeResults(o.out, kubernetesCommand, rows, host))
}

// podsConfig is the server's. The Pods' limit of processors is the machine's: what is measured is not how slow a small share makes them.
var podsConfig = template.Must(template.New("").Parse(`driver = "kubernetes"
[sandbox]
default_template = "python"
[template]
prepare = []
[agent_sandbox]
listen = "off"
[kubernetes]
kubeconfig = {{printf "%q" .Kubeconfig}}
namespace = "{{.Namespace}}"
image = "{{.Cove}}"
pull_policy = "Never"
name = "bench"
server_ranges = ["{{.Range}}"]
{{range .Kinds}}
[kubernetes.templates.{{.Name}}]
image = "{{$.Image}}"
pull_policy = "Never"
pool = {{.Pool}}
{{if .Python}}python = "/usr/bin/python3"
preload = ["numpy", "pandas"]
{{end}}cpus = 2
cpu_request = 0.01
memory = "512MiB"
memory_request = "{{.Memory}}"
{{end}}`))

type podsKind struct {
	Name   string
	Pool   int
	Python bool
	Memory string
}

func openPods(ctx context.Context, o kubernetesOptions) (_ *pods, err error) {
	p := &pods{kubernetesOptions: o, world: &world{options: o.options}, namespace: fmt.Sprintf("cove-bench-%d", os.Getpid())}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if p.api, err = openAPI(os.Getenv("COVE_TEST_CLUSTER")); err != nil {
		return nil, fmt.Errorf("no cluster to measure (make bench-kubernetes starts one): %w", err)
	}
	if err := p.api.makeNamespace(ctx, p.namespace); err != nil {
		return nil, err
	}
	if p.dir, err = os.MkdirTemp("", "cove-bench-"); err != nil {
		return nil, err
	}
	file, err := os.Create(filepath.Join(p.dir, "cove.toml"))
	if err != nil {
		return nil, err
	}
	err = podsConfig.Execute(file, map[string]any{
		"Kubeconfig": os.Getenv("COVE_TEST_KUBECONFIG"), "Namespace": p.namespace, "Cove": os.Getenv("COVE_TEST_IMAGE"),
		"Image": os.Getenv("COVE_TEST_POD_IMAGE"), "Range": os.Getenv("COVE_TEST_SERVER_RANGE"),
		"Kinds": []podsKind{{warmTemplate, o.pool, true, "64MiB"}, {coldTemplate, 0, true, "64MiB"}, {plainTemplate, o.burst, false, "16MiB"}},
	})
	if err := errors.Join(err, file.Close()); err != nil {
		return nil, err
	}
	return p, p.startServer(ctx, "--config", file.Name())
}

func (p *pods) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // also after an interrupt
	defer cancel()
	var errs []error
	if p.client != nil {
		p.client.Close()
	}
	if p.server != nil {
		errs = append(errs, p.stopServer())
	}
	if p.api != nil {
		errs = append(errs, p.api.removeNamespace(ctx, p.namespace))
	}
	if p.dir != "" {
		p.tellErrors(os.Stderr)
		errs = append(errs, os.RemoveAll(p.dir))
	}
	return errors.Join(errs...)
}

// complain is what the server said, for whoever wants to know why.
func (p *pods) complain() error {
	said, _ := os.ReadFile(filepath.Join(p.dir, "log"))
	lines := strings.Split(strings.TrimSpace(string(said)), "\n")
	return errors.New("the server said:\n" + strings.Join(lines[max(0, len(lines)-30):], "\n"))
}

// podFor is how long the cluster may take to have Pods ready.
const podFor = 5 * time.Minute

// full waits until as many Pods of a template wait as should, and no other is on its way in or out: a node that makes Pods has no processor to spare.
func (p *pods) full(ctx context.Context) error {
	return poll(ctx, podFor, 100*time.Millisecond, func() (bool, error) {
		ready, other, err := p.api.pods(ctx, p.namespace)
		return err == nil && ready == p.pool+p.burst && other == 0, err
	})
}

// sampled is what one sandbox took: until it was there, and until it had done its first job.
type sampled struct{ create, job series }

func (p *pods) sample(ctx context.Context, template string, j job, into *sampled) error {
	if err := p.full(ctx); err != nil {
		return fmt.Errorf("wait for Pods: %w", err)
	}
	awaitIdle(ctx)
	began := time.Now()
	sb, err := p.client.Create(ctx, client.CreateRequest{Template: template})
	created := time.Since(began)
	if err == nil {
		err = j.in(ctx, sb)
	}
	done := time.Since(began)
	into.create.add(created, err)
	into.job.add(done, err)
	if sb != nil {
		err = errors.Join(err, sb.Kill(ctx))
	}
	return err
}

// first times a sandbox from asking for it until its first job is done, with a Pod that waits and without; and counts what the API server wrote for
// those that waited.
func (p *pods) first(ctx context.Context) (rows []Row, err error) {
	var warm, cold [2]sampled // of a command, and of a cell with pandas
	jobs := []job{sayJob, dataJob}
	if err := p.sample(ctx, warmTemplate, dataJob, &sampled{}); err != nil { // warms up
		return nil, err
	}
	var wrote writes
	for i := range p.cold {
		before, err := p.settledWrites(ctx)
		if err != nil {
			return nil, err
		}
		for n := range p.warm / p.cold {
			if err := p.sample(ctx, warmTemplate, jobs[n%2], &warm[n%2]); err != nil {
				return nil, err
			}
		}
		after, err := p.settledWrites(ctx)
		if err != nil {
			return nil, err
		}
		wrote = wrote.plus(after.minus(before))
		if err := p.sample(ctx, coldTemplate, jobs[i%2], &cold[i%2]); err != nil {
			return nil, err
		}
	}
	for i, name := range []string{"pod-first-cmd", "pod-first-data"} {
		w, c := warm[i].job.row(name, "warm"), cold[i].job.row(name, "cold")
		rows = append(rows, w, warm[i].create.row(name, "warm-create"), c, ratio(c, w))
	}
	n := p.warm / p.cold * p.cold
	for _, kind := range slices.Sorted(maps.Keys(wrote)) {
		fmt.Fprintf(os.Stdout, "%6.2f %s for each sandbox\n", wrote[kind]/float64(n), kind)
	}
	return append(rows,
		counted("pod-writes", "claim", n, wrote.claims()), counted("pod-writes", "sandbox", n, wrote.ours()), counted("pod-writes", "sandbox-all", n, wrote.total()),
	), nil
}

// settledWrites counts once nothing goes on any more.
func (p *pods) settledWrites(ctx context.Context) (writes, error) {
	if err := p.full(ctx); err != nil {
		return nil, err
	}
	return p.api.writes(ctx)
}

func counted(scenario, subject string, n int, writes float64) Row {
	return Row{Scenario: scenario, Subject: subject, N: n, OK: n, Value: round(writes / float64(n)), Unit: "writes"}
}

// burstOfClaims has one server claim every Pod that waits, many at a time.
func (p *pods) burstOfClaims(ctx context.Context) ([]Row, error) {
	if err := p.full(ctx); err != nil {
		return nil, err
	}
	awaitIdle(ctx)
	var mu sync.Mutex
	var taken series
	var all sync.WaitGroup
	var made []*client.Sandbox
	turns := make(chan struct{}, p.hands)
	begun := time.Now()
	// Some fewer than there are: one that finds none would wait for a node.
	n := p.burst * 9 / 10
	for range n {
		turns <- struct{}{}
		all.Go(func() {
			defer func() { <-turns }()
			began := time.Now()
			sb, err := p.client.Create(ctx, client.CreateRequest{Template: plainTemplate})
			took := time.Since(began)
			mu.Lock()
			defer mu.Unlock()
			if taken.add(took, err); sb != nil {
				made = append(made, sb)
			}
		})
	}
	all.Wait()
	took := time.Since(begun)
	latency := taken.row("pod-burst", "warm-create")
	rate := Row{Scenario: "pod-burst", Subject: "warm", N: n, OK: len(made), Value: round(float64(len(made)) / took.Seconds()), Unit: "claims/s"}
	return []Row{latency, rate}, errors.Join(taken.err(), disperse(ctx, made))
}
