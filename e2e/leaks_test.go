package e2e_test

import (
	"context"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

// number reads a count that `make test-all` sets higher.
func number(t testing.TB, name string, small int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return small
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

const (
	leakWorkers = 4
	perCrash    = 40 // cycles between two crashes, at most
)

// TestLeaks is create, use and kill in a loop, with kills, departures and crashes of the server at random moments: in
// the end nothing is left. COVE_LEAK_CYCLES is how often, COVE_LEAK_SEED repeats a run.
func TestLeaks(t *testing.T) {
	cycles := number(t, "COVE_LEAK_CYCLES", 200)
	seed := uint64(number(t, "COVE_LEAK_SEED", int(time.Now().UnixNano()&0x7fffffff)))
	t.Logf("%d cycles, seed %d", cycles, seed)
	s := newServer(t)
	l := &leaker{s: s, t: t}

	warmUp := func() { // so that what is made once and kept is there in both counts
		for kind := range kinds {
			l.cycle(kind, rand.New(rand.NewPCG(seed, uint64(kind))))
		}
		l.burst(16) // fills the server's connections to its maker and its database
	}
	warmUp()
	l.drain()
	l.done.Store(0)
	before := l.settled(nil)
	t.Logf("before: %v", before)

	begun := time.Now()
	crashes := 0
	for round := uint64(0); ; round++ {
		r := rand.New(rand.NewPCG(seed, round))
		left := cycles - int(l.done.Load())
		last := left <= perCrash // the last server is not killed, so that its own leaks are seen
		wait := l.parallel(min(left, perCrash), r)
		if last {
			wait()
			break
		}
		time.Sleep(time.Duration(r.Int64N(int64(1500 * time.Millisecond)))) // the random moment
		s.crash(t)
		crashes++
		wait()
		s.start(t)
	}
	t.Logf("%d cycles with %d crashes took %v", l.done.Load(), crashes, time.Since(begun).Round(time.Millisecond))

	warmUp()
	l.drain()
	after := l.settled(before)
	t.Logf("after: %v", after)
	for _, more := range after.above(before) {
		t.Error("left behind: ", more)
	}
}

type leaker struct {
	s    *server
	t    *testing.T
	done atomic.Int64 // cycles that got as far as a server
}

// kinds are the moments at which a cycle ends.
const kinds = 7

// parallel runs n cycles and returns a function that waits for them.
func (l *leaker) parallel(n int, seeds *rand.Rand) (wait func()) {
	jobs := make(chan *rand.Rand, n)
	for range n {
		jobs <- rand.New(rand.NewPCG(seeds.Uint64(), seeds.Uint64()))
	}
	close(jobs)
	var wg sync.WaitGroup
	for range leakWorkers {
		wg.Go(func() {
			for r := range jobs {
				l.cycle(r.IntN(kinds), r)
			}
		})
	}
	return wg.Wait
}

// cycle makes a sandbox and ends it in the middle of something. The server may be gone at any line: no error is one.
func (l *leaker) cycle(kind int, r *rand.Rand) {
	c := l.s.Client
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	moment := func(most time.Duration) time.Duration { return time.Duration(r.Int64N(int64(most))) }
	if kind == 0 { // the caller leaves during the create
		brief, cancel := context.WithTimeout(ctx, moment(30*time.Millisecond))
		defer cancel()
		_, _ = c.Create(brief, client.CreateRequest{TimeoutSeconds: 60})
		l.done.Add(1)
		return
	}
	sb, err := c.Create(ctx, client.CreateRequest{TimeoutSeconds: 60})
	if err != nil {
		return
	}
	l.done.Add(1)
	using, leave := context.WithCancel(ctx)
	defer leave()
	var busy sync.WaitGroup
	switch kind {
	case 1: // killed during a cell
		busy.Go(func() {
			_, _ = sb.Run(using, client.RunRequest{Code: "import subprocess; subprocess.run(['sleep', '100'])"})
		})
	case 2: // killed during a command with children
		busy.Go(func() {
			_, _ = sb.Exec(using, client.ExecRequest{Command: "setsid sleep 100 & sleep 100 & yes"})
		})
	case 3: // killed during an upload
		busy.Go(func() {
			_, _ = sb.Files().Write(using, "big", &trickle{ctx: using}, client.WriteOptions{})
		})
	case 4: // the caller leaves a cell, then kills
		brief, cancel := context.WithTimeout(using, moment(50*time.Millisecond))
		defer cancel()
		for range sb.RunCode(brief, client.RunRequest{Code: "while True: print('x' * 1000)"}) {
		}
	case 5: // a terminal, a second kernel and a watcher are open when it is killed
		busy.Go(func() { l.busyBody(using, sb) })
	case 6: // everything in peace
		_, _ = sb.Run(ctx, client.RunRequest{Code: "import numpy\nopen('f', 'w').write('x' * 100000)"})
	}
	time.Sleep(moment(60 * time.Millisecond)) // the random moment of the kill
	_ = sb.Kill(ctx)
	leave()
	busy.Wait()
}

// burst makes and ends sandboxes all at once.
func (l *leaker) burst(n int) {
	l.t.Helper()
	var wg sync.WaitGroup
	defer wg.Wait()
	for range n {
		wg.Go(func() {
			sb, err := l.s.Create(context.Background(), client.CreateRequest{TimeoutSeconds: 60})
			if err != nil {
				l.t.Errorf("create: %v", err)
				return
			}
			if err := sb.Kill(context.Background()); err != nil {
				l.t.Errorf("kill: %v", err)
			}
		})
	}
}

func (l *leaker) busyBody(ctx context.Context, sb *client.Sandbox) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for range sb.Files().Watch(ctx, "/tmp", true) {
		}
	})
	wg.Go(func() { _, _ = sb.StartKernel(ctx, client.KernelRequest{Name: "second"}) })
	session, err := sb.Start(ctx, client.ExecRequest{Argv: []string{"bash"}, PTY: &client.PTYSize{Rows: 24, Cols: 80}})
	if err != nil {
		return
	}
	defer session.Close()
	_, _ = io.WriteString(session, "while true; do date; done\n")
	for range session.Events() {
	}
}

// trickle is an upload that never ends by itself.
type trickle struct{ ctx context.Context }

func (u *trickle) Read(p []byte) (int, error) {
	select {
	case <-u.ctx.Done():
		return 0, u.ctx.Err()
	case <-time.After(time.Millisecond): // the pace of a slow client
		return min(len(p), 4096), nil
	}
}

// drain kills what the crashes left running and waits until the maker is at rest.
func (l *leaker) drain() {
	l.t.Helper()
	eventually(l.t, "no sandbox lives", 5*time.Minute, func() bool {
		living := 0
		for sb, err := range l.s.List(l.t.Context(), client.ListRequest{States: []string{"starting", "running", "stopping"}}) {
			if err != nil {
				l.t.Fatal(err)
			}
			living++
			_ = l.s.Sandbox(sb.ID).Kill(l.t.Context())
		}
		return living == 0
	})
	l.s.awaitDrained(l.t)
}

// settled counts until two counts are the same and, when there is a goal, not above it; what never gets there is the
// last count.
func (l *leaker) settled(goal census) census {
	l.t.Helper()
	l.s.Client.Close()
	last := l.s.census(l.t)
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); {
		time.Sleep(200 * time.Millisecond) // what is counted goes away without telling anybody
		now := l.s.census(l.t)
		if goal == nil && len(now.above(last)) == 0 && len(last.above(now)) == 0 {
			return now
		}
		if goal != nil && len(now.above(goal)) == 0 {
			return now
		}
		last = now
	}
	return last
}
