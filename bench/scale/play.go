package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// result is what one round found.
type result struct {
	Servers int     `json:"servers"`
	Pods    int     `json:"pods"`
	Fill    float64 `json:"fill_pods_per_second"`
	// What one server needs to know that many Pods, and what the API server does.
	HeapMB   float64 `json:"server_heap_mb"`
	ServerMB float64 `json:"server_rss_mb"`
	APIMB    float64 `json:"api_rss_mb"`
	Come     *starts `json:"come_and_go,omitempty"` // the pool is filled meanwhile
	Claim    starts  `json:"claim"`                 // nobody fills it
}

// starts is a number of sandboxes, and what they cost. What is counted for each is counted over all servers, but bytes, which are one server's.
type starts struct {
	N          int                `json:"n"`
	Failed     int                `json:"failed"`
	PerSecond  float64            `json:"per_second"`
	P50        float64            `json:"p50_ms"`
	P99        float64            `json:"p99_ms"`
	Lost       int                `json:"lost"`              // writes that another server was faster with
	Cold       int                `json:"cold,omitempty"`    // found no Pod that waited; where others make Pods too, nobody can tell
	Writes     float64            `json:"writes"`            // to the API server, by Cove
	NodeWrites float64            `json:"node_writes"`       // by the nodes
	Calls      map[string]float64 `json:"calls"`             // of Cove's, by kind
	Watch      float64            `json:"watch_bytes"`       // that one server hears
	APICPU     float64            `json:"api_cpu_ms"`        // of the API server
	EtcdCPU    float64            `json:"etcd_cpu_ms"`       //
	ServerCPU  float64            `json:"server_cpu_ms"`     // of all servers together
	Seconds    float64            `json:"seconds,omitempty"` // how long it took
}

// roundFor bounds one round.
const roundFor = 20 * time.Minute

// play makes a pool, has servers use it and removes everything.
func (w *world) play(ctx context.Context, r round, namespace string) (found result, err error) {
	ctx, cancel := context.WithTimeout(ctx, roundFor)
	defer cancel()
	if err := w.settle(ctx, namespace); err != nil {
		return found, err
	}
	n, err := newNodes(ctx, w.core, namespace)
	if err != nil {
		return found, err
	}
	defer func() { err = errors.Join(err, n.close(), w.clear(context.WithoutCancel(ctx), namespace)) }()
	began := time.Now()
	var f fleet
	defer func() { err = errors.Join(err, f.end()) }()
	for i := range r.servers {
		p, err := launch(ctx, setup{Kubeconfig: w.kubeconfig(), Namespace: namespace, Name: fmt.Sprintf("server-%d", i), Pool: r.pods})
		if err != nil {
			return found, err
		}
		f = append(f, p)
	}
	if err := n.await(ctx, r.pods); err != nil {
		return found, err
	}
	found = result{Servers: r.servers, Pods: r.pods, Fill: float64(r.pods) / time.Since(began).Seconds()}
	return found, w.measure(ctx, namespace, n, f, &found)
}

func (w *world) measure(ctx context.Context, namespace string, n *nodes, f fleet, found *result) error {
	if found.Pods == w.pods[0] {
		come, err := w.start(ctx, n, f, order{Seconds: w.seconds, Hands: w.hands, Prefix: "come"})
		if err != nil {
			return err
		}
		found.Come = &come
		if err := n.await(ctx, found.Pods); err != nil {
			return err
		}
	}
	release, err := w.usurp(ctx, namespace)
	if err != nil {
		return err
	}
	defer release()
	if err := f.calm(ctx); err != nil {
		return err
	}
	all, err := f.ask(order{Hands: len(f)})
	if err != nil {
		return err
	}
	found.HeapMB, found.ServerMB = float64(all[0].HeapBytes)/1e6, float64(resident(f[0].cmd.Process.Pid))/1e6
	found.APIMB = float64(resident(w.pid("kube-apiserver"))) / 1e6
	// Not all of them: a pool that is empty measures something else.
	found.Claim, err = w.start(ctx, n, f, order{Starts: found.Pods * 4 / 5, Hands: w.hands, Prefix: "claim"})
	found.Claim.Cold = int(found.Claim.Calls["POST pods"]*float64(found.Claim.N) + 0.5)
	return err
}

// start gives an order and sums up what came of it.
func (w *world) start(ctx context.Context, n *nodes, f fleet, o order) (s starts, err error) {
	if err := f.calm(ctx); err != nil {
		return s, err
	}
	before, written := w.cpu(f), n.writes.Load()
	all, err := f.ask(o)
	if err != nil {
		return s, err
	}
	used := w.cpu(f).since(before)
	var took []float64
	calls, watched := map[string]int{}, int64(0)
	for _, a := range all {
		took, s.Failed, s.Seconds = append(took, a.Took...), s.Failed+a.Failed, max(s.Seconds, a.Seconds)
		watched += a.WatchBytes
		if a.Error != "" {
			err = errors.New(a.Error)
		}
		for name, n := range a.Calls {
			calls[name] += n
		}
	}
	if len(took) == 0 || s.Failed > 0 {
		return s, fmt.Errorf("%d of %d starts failed, the first: %w", s.Failed, s.Failed+len(took), err)
	}
	slices.Sort(took)
	s.N = len(took)
	each := func(v float64) float64 { return v / float64(s.N) }
	s.PerSecond, s.P50, s.P99 = float64(s.N)/s.Seconds, rank(took, 50), rank(took, 99)
	s.Watch = each(float64(watched) / float64(len(f)))
	s.APICPU, s.EtcdCPU, s.ServerCPU = each(used.api*1e3), each(used.etcd*1e3), each(used.servers*1e3)
	s.NodeWrites, s.Calls = each(float64(n.writes.Load()-written)), map[string]float64{}
	for name, n := range calls {
		if strings.HasPrefix(name, "GET") || strings.HasSuffix(name, "leases") {
			continue // of the election, whatever is claimed
		}
		s.Calls[name] = each(float64(n))
		s.Writes += each(float64(n))
		if strings.HasSuffix(name, lost) {
			s.Lost += n
		}
	}
	return s, nil
}

// rank is a percentile of sorted samples, by nearest rank.
func rank(sorted []float64, p int) float64 {
	return sorted[max((len(sorted)*p+99)/100, 1)-1]
}
