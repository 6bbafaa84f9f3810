// Command cluster runs a real Kubernetes on this machine for tests: etcd, kube-apiserver, controller-manager, scheduler,
// kubelet, kube-proxy and a controller that enforces NetworkPolicies, on containerd and runc, in a network namespace and
// directories of its own. It ends what it started, by process id, and puts back what it changed.
//
//	go run ./test/cluster up        # about ten seconds once the programs are built; prints what to export
//	go run ./test/cluster down
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

// command is one verb.
type command struct {
	name string
	args string
	does string
	run  func(ctx context.Context, c *cluster, args []string) error
}

var commands = []command{
	{"build", "", "the programs of Kubernetes, and the images of tests, into the cache", build},
	{"up", "", "starts the cluster, and ends one that was left behind", up},
	{"down", "", "ends it and removes what it made", down},
	{"env", "", "prints what a shell exports to use it", env},
	{"load", "TAR…", "brings images into the node", load},
	{"deploy", "[VALUES…]", "installs Cove from its chart and prints what a client exports", deployServer},
	{"undeploy", "", "removes it and its sandboxes", undeployServer},
	{"start", "PART", "starts one part that was ended", startPart},
	{"kill", "PART", "ends one part at once, as a crash would", killPart},
	{"evict", "QUANTITY", "lets the kubelet evict Pods unless that much memory is available; 200Mi as a rule", evict},
	{"can", "", "says whether this machine can run it", can},
	{"built", "", "says whether Kubernetes is in the cache", built},
}

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out, log io.Writer) error {
	flags := flag.NewFlagSet("cluster", flag.ContinueOnError)
	flags.SetOutput(log)
	dir := flags.String("dir", "", "where the cluster lives; a folder of the user's cache by default")
	bare := flags.Bool("api-only", false, "etcd and kube-apiserver only, on loopback: no root, no node, no Pods that run")
	flags.Usage = func() { usage(log, flags) }
	if err := flags.Parse(args); err != nil {
		return err
	}
	i := slices.IndexFunc(commands, func(c command) bool { return c.name == flags.Arg(0) })
	if i < 0 {
		usage(log, flags)
		return fmt.Errorf("no command %q", flags.Arg(0))
	}
	c, err := newCluster(*dir, *bare, out, log)
	if err != nil {
		return err
	}
	return commands[i].run(ctx, c, flags.Args()[1:])
}

func usage(w io.Writer, flags *flag.FlagSet) {
	fmt.Fprintln(w, "usage: go run ./test/cluster [flags] COMMAND")
	for _, c := range commands {
		fmt.Fprintf(w, "  %-16s %s\n", strings.TrimSpace(c.name+" "+c.args), c.does)
	}
	flags.PrintDefaults()
}

func build(ctx context.Context, c *cluster, _ []string) error {
	if err := c.buildKube(ctx); err != nil || c.bare {
		return err
	}
	return c.buildImages(ctx)
}

func up(ctx context.Context, c *cluster, _ []string) error {
	if err := c.able(ctx); err != nil {
		return err
	}
	if err := build(ctx, c, nil); err != nil {
		return err
	}
	if err := c.down(ctx); err != nil {
		return fmt.Errorf("end what was left behind: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	if err := c.up(ctx); err != nil {
		// What failed is told; how the clean-up went matters only if it failed too. It may take its time after a deadline.
		return errors.Join(err, c.down(context.WithoutCancel(ctx)))
	}
	return env(ctx, c, nil)
}

func down(ctx context.Context, c *cluster, _ []string) error { return c.down(ctx) }

func can(ctx context.Context, c *cluster, _ []string) error { return c.able(ctx) }

func built(_ context.Context, c *cluster, _ []string) error {
	if !c.built() {
		return errors.New("the cache has no Kubernetes yet: go run ./test/cluster build does it, in about ten minutes")
	}
	return nil
}

// env is written so that `eval "$(go run ./test/cluster env)"` works.
func env(_ context.Context, c *cluster, _ []string) error {
	if _, err := os.Stat(c.path("kubeconfig")); err != nil {
		return errors.New("there is no cluster: start one with go run ./test/cluster up")
	}
	file := c.path("kubeconfig")
	pairs := [][2]string{
		{"COVE_TEST_KUBECONFIG", file}, {"COVE_TEST_CLUSTER", c.dir}, {"COVE_TEST_POD_IMAGE", sandboxImage}, {"COVE_TEST_IMAGE", coveImage},
		{"COVE_TEST_SERVER_RANGE", hostAddress + "/32"}, {"COVE_TEST_OUTSIDE", outsideAddress},
	}
	if c.bare {
		pairs = nil // those are for tests that need Pods to run
	}
	for _, pair := range append(pairs, [2]string{"KUBECONFIG", file}) {
		fmt.Fprintf(c.out, "export %s=%q\n", pair[0], pair[1])
	}
	fmt.Fprintf(c.out, "export PATH=%q:\"$PATH\"\n", c.bin)
	return nil
}

func load(ctx context.Context, c *cluster, files []string) error {
	if len(files) == 0 {
		return errors.New("load what? Name the archives of images")
	}
	return c.importImages(ctx, files...)
}

func startPart(ctx context.Context, c *cluster, args []string) error {
	p, err := c.part(args)
	if err != nil {
		return err
	}
	return c.start(ctx, p)
}

func killPart(ctx context.Context, c *cluster, args []string) error {
	p, err := c.part(args)
	if err != nil {
		return err
	}
	return c.end(ctx, p.name, syscall.SIGKILL, 10*time.Second)
}

func evict(ctx context.Context, c *cluster, args []string) error {
	if len(args) != 1 {
		return errors.New("how much memory must be available? Say a quantity such as 200Mi")
	}
	if err := c.end(ctx, "kubelet", syscall.SIGTERM, 10*time.Second); err != nil {
		return err
	}
	if err := c.writeKubelet(args[0]); err != nil {
		return err
	}
	return startPart(ctx, c, []string{"kubelet"})
}
