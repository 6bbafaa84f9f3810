package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/covehq/cove/client"
)

// heap is memory that a kernel holds when it is forked: how it is made, and a cell that only a copy of it can answer.
type heap struct {
	name   string // empty: whatever a new kernel has
	make   string // with the number of megabytes
	ask    string
	answer string
}

// An array is one long mapping; objects are small, spread over the allocator's arenas, and written to when they are read.
var (
	arrayHeap = heap{
		name: "array", ask: "float(heap[-1])", answer: "1.0",
		make: "import numpy\nheap = numpy.ones(%d * 1000 * 1000 // 8 + 1)",
	}
	objectHeap = heap{
		name: "objects", ask: "heap[0][-1]", answer: "'9999'",
		make: `import resource
def resident(): return int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()
begun, heap = resident(), []
while resident() - begun < %d * 1000 * 1000:
    heap.append([str(i) for i in range(10000)])`,
	}
)

// makeFiles makes a number of files of a number of bytes.
const makeFiles = `import os
for i in range(%d):
    with open(f'file{i}', 'wb') as f: size = f.write(os.urandom(%d))`

// parent is a sandbox to be forked: with so much memory in its kernel, and so many files of so many bytes.
type parent struct {
	heap      heap
	megabytes int
	files     int
	fileBytes int
}

func (p parent) create(ctx context.Context, w *world) (*client.Sandbox, error) {
	request := longLived
	// Room for the heap while it is made, and for the copies that its children make of it.
	request.Limits = &client.Limits{MemoryBytes: int64(p.megabytes)*2e6 + 1<<30}
	sb, err := w.client.Create(ctx, request)
	if err != nil {
		return nil, err
	}
	var cells []string
	if p.heap.name != "" {
		cells = append(cells, fmt.Sprintf(p.heap.make, p.megabytes))
	}
	if p.files > 0 {
		cells = append(cells, fmt.Sprintf(makeFiles, p.files, p.fileBytes))
	}
	for _, code := range cells {
		if err := runCell(ctx, sb, code, ""); err != nil {
			return nil, errors.Join(err, sb.Kill(ctx))
		}
	}
	return sb, w.settle(ctx)
}

// ask is a first cell that shows that the child has what its parent had.
func (p parent) ask(ctx context.Context, child *client.Sandbox) error {
	if p.heap.name == "" {
		return sumJob.in(ctx, child)
	}
	return runCell(ctx, child, p.heap.ask, p.heap.answer)
}

// askAll asks every child at once, as whoever tries several ideas does.
func (p parent) askAll(ctx context.Context, children []*client.Sandbox) error {
	errs := make([]error, len(children))
	var asking sync.WaitGroup
	for i, child := range children {
		asking.Go(func() { errs[i] = p.ask(ctx, child) })
	}
	asking.Wait()
	return errors.Join(errs...)
}

// forkTimes are what a number of forks took.
type forkTimes struct {
	first series // until every child has answered a first cell, divided by their number
	stall series // how long the parent's kernel took no cell, as the server says
	gap   series // the longest that a caller of the parent waited for 1+1 meanwhile
}

// fork makes n children, again and again, and asks each of them.
func (p parent) fork(ctx context.Context, w *world, samples, n int) (t forkTimes, err error) {
	sb, err := p.create(ctx, w)
	if err != nil {
		return t, err
	}
	defer func() { err = errors.Join(err, sb.Kill(ctx), w.settle(ctx)) }()
	for i := range samples + 1 {
		if err := w.settle(ctx); err != nil {
			return t, err
		}
		awaitIdle(ctx)
		began := time.Now()
		forks, err := sb.Fork(ctx, client.ForkRequest{Count: n})
		if err == nil {
			err = p.askAll(ctx, forks.Sandboxes)
		}
		took := time.Since(began) / time.Duration(n)
		if forks != nil {
			err = errors.Join(err, disperse(ctx, forks.Sandboxes))
		}
		if i == 0 && err == nil {
			continue // only warms up
		}
		t.first.add(took, err)
		if err == nil {
			t.stall.add(time.Duration(forks.StallMS*float64(time.Millisecond)), nil)
		}
	}
	for range samples {
		gap, err := p.watch(ctx, w, sb, n)
		t.gap.add(gap, err)
	}
	return t, errors.Join(t.first.err(), t.gap.err())
}

// watch forks while somebody uses the parent, and tells how long that somebody waited at most. What a cell costs anyway is
// in it.
func (p parent) watch(ctx context.Context, w *world, sb *client.Sandbox, n int) (time.Duration, error) {
	if err := w.settle(ctx); err != nil {
		return 0, err
	}
	var longest time.Duration
	var cellErr error
	stop, begun, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; cellErr == nil; i++ {
			select {
			case <-stop:
				return
			default:
			}
			began := time.Now()
			cellErr = sumJob.in(ctx, sb)
			if i == 0 {
				close(begun) // the first only shows that it works
				continue
			}
			longest = max(longest, time.Since(began))
		}
	}()
	<-begun
	forks, err := sb.Fork(ctx, client.ForkRequest{Count: n})
	close(stop)
	<-done
	if forks != nil {
		err = errors.Join(err, disperse(ctx, forks.Sandboxes))
	}
	return longest, errors.Join(err, cellErr)
}

// rows of a parent, with its name behind ours.
func (t forkTimes) rows(scenario, name string) []Row {
	return []Row{t.first.row(scenario, name), t.stall.row(scenario, name+"-stall"), t.gap.row(scenario, name+"-gap")}
}

// measureFork times one child of a parent with so many megabytes, until it has answered a cell.
func measureFork(megabytes int) func(context.Context, *world) ([]Row, error) {
	return func(ctx context.Context, w *world) ([]Row, error) {
		return w.forkBoth(ctx, fmt.Sprintf("fork-%dmb", megabytes), megabytes, 1)
	}
}

// measureForkMany times ten children at once of a parent with 50 MB; the time is that of one.
func measureForkMany(ctx context.Context, w *world) ([]Row, error) {
	return w.forkBoth(ctx, "fork-n10", 50, 10)
}

func (w *world) forkBoth(ctx context.Context, scenario string, megabytes, n int) (rows []Row, errs error) {
	for _, h := range []heap{arrayHeap, objectHeap} {
		t, err := parent{heap: h, megabytes: megabytes}.fork(ctx, w, w.budget(20, 0).samples, n)
		rows, errs = append(rows, t.rows(scenario, "cove-"+h.name)...), errors.Join(errs, err)
	}
	return rows, errs
}

// measureForkByHeap times a child of parents with more and more memory.
func measureForkByHeap(ctx context.Context, w *world) (rows []Row, errs error) {
	sizes := []int{0, 64, 256, 1024}
	if w.options.smoke {
		sizes = sizes[:2]
	}
	for _, megabytes := range sizes {
		for _, h := range []heap{arrayHeap, objectHeap} {
			p, name := parent{heap: h, megabytes: megabytes}, fmt.Sprintf("cove-%s-%dmb", h.name, megabytes)
			if megabytes == 0 {
				p, name = parent{}, "cove-0mb"
			}
			t, err := p.fork(ctx, w, w.budget(10, 0).samples, 1)
			rows, errs = append(rows, t.rows("growth-heap", name)[:2]...), errors.Join(errs, err)
			if megabytes == 0 {
				break // the same in both
			}
		}
	}
	return rows, errs
}

// measureForkByUpper times a child of parents with more and more files of their own.
func measureForkByUpper(ctx context.Context, w *world) (rows []Row, errs error) {
	for _, size := range []struct {
		name             string
		files, fileBytes int
	}{{"cove-0mb", 0, 0}, {"cove-20mb", 100, 200e3}, {"cove-200mb", 100, 2e6}} {
		t, err := parent{files: size.files, fileBytes: size.fileBytes}.fork(ctx, w, w.budget(10, 0).samples, 1)
		rows, errs = append(rows, t.rows("growth-upper", size.name)[:2]...), errors.Join(errs, err)
	}
	return rows, errs
}

// measurePause times the pause of a sandbox that does nothing, its resume, and a resume with the first cell after it.
func measurePause(ctx context.Context, w *world) (rows []Row, err error) {
	sb, err := w.client.Create(ctx, client.CreateRequest{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, sb.Kill(ctx)) }()
	if err := dataJob.in(ctx, sb); err != nil {
		return nil, err
	}
	var paused, resumed, woken series
	for i := range w.budget(100, 0).samples + 1 {
		if err := w.settle(ctx); err != nil {
			return nil, err
		}
		began := time.Now()
		err := sb.Pause(ctx, client.PauseRequest{})
		tookPause := time.Since(began)
		began = time.Now()
		rerr := sb.Resume(ctx, client.ResumeRequest{})
		tookResume := time.Since(began)
		cerr := sumJob.in(ctx, sb)
		tookCell := time.Since(began)
		if i == 0 && errors.Join(err, rerr, cerr) == nil {
			continue // only warms up
		}
		paused.add(tookPause, err)
		resumed.add(tookResume, rerr)
		woken.add(tookCell, errors.Join(rerr, cerr))
	}
	rows = []Row{paused.row("pause", "cove"), resumed.row("resume", "cove"), woken.row("resume", "cove-first-cell")}
	return rows, errors.Join(paused.err(), resumed.err(), woken.err())
}
