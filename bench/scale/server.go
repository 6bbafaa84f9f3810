package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/covehq/cove/internal/driver/kubernetes"
	"github.com/covehq/cove/internal/sandbox"
)

// setup is the first line that a server reads.
type setup struct {
	Kubeconfig string `json:"kubeconfig"`
	Namespace  string `json:"namespace"`
	Name       string `json:"name"`
	Pool       int    `json:"pool"`
}

// order is every other line.
type order struct {
	Starts  int    `json:"starts,omitempty"`  // sandboxes to start and keep
	Seconds int    `json:"seconds,omitempty"` // how long to start sandboxes and stop each at once
	Hands   int    `json:"hands,omitempty"`
	Prefix  string `json:"prefix,omitempty"` // of the sandboxes' ids
}

// answer is what it writes for each of them, with what it counted since the one before.
type answer struct {
	Took       []float64      `json:"took,omitempty"` // milliseconds of each start
	Failed     int            `json:"failed,omitempty"`
	Error      string         `json:"error,omitempty"` // the first
	Calls      map[string]int `json:"calls"`
	WatchBytes int64          `json:"watch_bytes"`
	HeapBytes  uint64         `json:"heap_bytes"`
	Seconds    float64        `json:"seconds"`
}

// server is one process of the simulation: the driver, and nothing above it.
type server struct {
	name    string
	driver  *kubernetes.Driver
	counter *counter
}

// serve obeys until its input ends.
func serve(ctx context.Context, in io.Reader, out io.Writer) (err error) {
	orders, answers := json.NewDecoder(in), json.NewEncoder(out)
	var s setup
	if err := orders.Decode(&s); err != nil {
		return fmt.Errorf("the first line: %w", err)
	}
	me := &server{name: s.Name, counter: newCounter()}
	if err := me.open(ctx, s); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, me.driver.Close()) }()
	if err := answers.Encode(me.say(answer{})); err != nil {
		return err
	}
	for {
		var o order
		if err := orders.Decode(&o); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		began := time.Now()
		a := me.obey(ctx, o)
		a.Seconds = time.Since(began).Seconds()
		if err := answers.Encode(me.say(a)); err != nil {
			return err
		}
	}
}

func (s *server) open(ctx context.Context, from setup) error {
	rest, err := clientcmd.BuildConfigFromFlags("", from.Kubeconfig)
	if err != nil {
		return err
	}
	rest.Wrap(s.counter.wrap)
	s.driver, err = kubernetes.New(ctx, kubernetes.Config{
		Rest: rest, Namespace: from.Namespace, Owner: from.Name, Image: "none", Policies: true,
		Servers:   map[string]string{"app.kubernetes.io/name": "cove"},
		Templates: map[string]kubernetes.Template{"python": {Image: "none", Pool: from.Pool}},
		Log:       slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	return err
}

// say adds what was counted.
func (s *server) say(a answer) answer {
	a.Calls, a.WatchBytes = s.counter.take()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	a.HeapBytes = m.HeapAlloc
	return a
}

// obey starts sandboxes with as many hands as it is told: each takes the next when it is done with one.
func (s *server) obey(ctx context.Context, o order) (a answer) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	next := 0
	end := time.Now().Add(time.Duration(o.Seconds) * time.Second)
	take := func() (string, bool) {
		mu.Lock()
		defer mu.Unlock()
		if ctx.Err() != nil || o.Seconds > 0 && time.Now().After(end) || o.Seconds == 0 && next >= o.Starts {
			return "", false
		}
		next++
		return fmt.Sprintf("%s-%s-%d", o.Prefix, s.name, next), true
	}
	for range o.Hands {
		wg.Go(func() {
			for id, more := take(); more; id, more = take() {
				took, err := s.start(ctx, id, o.Seconds > 0)
				mu.Lock()
				if err != nil {
					a.Failed++
					if a.Error == "" {
						a.Error = err.Error()
					}
				} else {
					a.Took = append(a.Took, took)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return a
}

// start takes as long as a caller waits for a sandbox; its stop, where one is asked for, is not in that.
func (s *server) start(ctx context.Context, id string, stop bool) (ms float64, err error) {
	began := time.Now()
	err = s.driver.Start(ctx, sandbox.StartRequest{ID: id, Tenant: "t1", Template: s.driver.Templates()[0]})
	ms = float64(time.Since(began).Microseconds()) / 1e3
	if err == nil && stop {
		err = s.driver.Stop(ctx, id, sandbox.CauseKilled)
	}
	return ms, err
}
