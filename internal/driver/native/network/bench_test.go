package network_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/network"
)

// BenchmarkAttach is the cost of a wire, in the pool. Namespaces are made and ended outside the clock.
func BenchmarkAttach(b *testing.B) {
	w := newWorld(b)
	n := w.open(network.Options{Tag: "b"})
	var took []time.Duration
	const round = 200
	for b.Loop() {
		var spaces []int
		for range round {
			spaces = append(spaces, newNetns(b))
		}
		for i, netns := range spaces {
			start := time.Now()
			_, err := n.Attach(i, netns)
			took = append(took, time.Since(start))
			must(b, err)
		}
		for i := range spaces {
			must(b, n.Detach(i))
		}
		must(b, n.Sweep(func(int) bool { return false }))
	}
	report(b, took)
}

// BenchmarkSetPolicy is the cost on a request's path, among 200 sandboxes with lists of their own.
func BenchmarkSetPolicy(b *testing.B) {
	w := newWorld(b)
	for _, others := range []int{0, 16} {
		b.Run(fmt.Sprintf("lists of %d among 200", others), func(b *testing.B) {
			n := w.open(network.Options{Tag: "b"})
			for i := range 200 {
				_, err := n.Attach(i, newNetns(b))
				must(b, err)
				must(b, n.SetPolicy(i, internet))
				if others > 0 {
					must(b, n.SetPolicy(i, list(many(others)...)))
				}
			}
			var took []time.Duration
			for i := 0; b.Loop(); i++ {
				p := internet
				switch i % 2 {
				case 0:
					p = none
				case 1:
					if others > 0 {
						p = list(many(others)...)
					}
				}
				start := time.Now()
				must(b, n.SetPolicy(i/2%200, p))
				took = append(took, time.Since(start))
			}
			report(b, took)
			must(b, n.Close())
		})
	}
}

// BenchmarkDetach is what ending a sandbox waits for.
func BenchmarkDetach(b *testing.B) {
	w := newWorld(b)
	n := w.open(network.Options{Tag: "b"})
	var took []time.Duration
	for i := 0; b.Loop(); i++ {
		netns := newNetns(b)
		_, err := n.Attach(i, netns)
		must(b, err)
		must(b, n.SetPolicy(i, internet))
		start := time.Now()
		must(b, n.Detach(i))
		took = append(took, time.Since(start))
		_ = unix.Close(netns)
	}
	report(b, took)
}

func many(n int) []string {
	var list []string
	for i := range n {
		list = append(list, fmt.Sprintf("203.0.%d.0/24", i*2))
	}
	return list
}

func report(b *testing.B, took []time.Duration) {
	slices.Sort(took)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
}
