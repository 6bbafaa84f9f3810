package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/covehq/cove/client"
)

// longLived outlives every scenario.
var longLived = client.CreateRequest{TimeoutSeconds: 3600}

// crowd makes n sandboxes, at most wide at a time, and does something in each. Those that were made are the caller's.
func (w *world) crowd(ctx context.Context, n, wide int, do func(*client.Sandbox) error) (made []*client.Sandbox, taken series) {
	var mu sync.Mutex
	var all sync.WaitGroup
	turns := make(chan struct{}, wide)
	for range n {
		turns <- struct{}{}
		all.Go(func() {
			defer func() { <-turns }()
			begun := time.Now()
			sb, err := w.client.Create(ctx, longLived)
			took := time.Since(begun)
			if err == nil {
				err = do(sb)
			}
			mu.Lock()
			defer mu.Unlock()
			if sb != nil {
				made = append(made, sb)
			}
			taken.add(took, err)
		})
	}
	all.Wait()
	return made, taken
}

// disperse ends them, several at a time.
func disperse(ctx context.Context, all []*client.Sandbox) error {
	var mu sync.Mutex
	var errs []error
	var done sync.WaitGroup
	for part := range slices.Chunk(all, max(1, (len(all)+7)/8)) {
		done.Go(func() {
			for _, sb := range part {
				if err := sb.Kill(ctx); err != nil {
					mu.Lock()
					errs = append(errs, err)
					mu.Unlock()
				}
			}
		})
	}
	done.Wait()
	return errors.Join(errs...)
}

// Of how many the bursts are. An engine that is asked for a hundred on two processors answers after minutes, and late
// enough to fail: it is asked for what it can bear.
const (
	burstSize       = 100
	dockerBurstSize = 10
)

// measureBurst asks for a hundred sandboxes in the same moment. The pool holds a few; the rest are made while their
// callers wait. The value is the time until the last one is there.
func measureBurst(ctx context.Context, w *world) ([]Row, error) {
	n := burstSize
	if w.options.smoke {
		n = w.options.live
	}
	if err := w.settle(ctx); err != nil {
		return nil, err
	}
	begun := time.Now()
	made, taken := w.crowd(ctx, n, n, func(*client.Sandbox) error { return nil })
	wall := time.Since(begun)
	row := taken.row("burst-100", "cove")
	row.Value, row.Unit = round(wall.Seconds()), "s"
	rows, err := []Row{row}, errors.Join(taken.err(), disperse(ctx, made))
	if w.peers == nil || w.peers.find("docker") == nil {
		return rows, err
	}
	other, oerr := w.burstDocker(ctx)
	rows = append(rows, other)
	if row.Value > 0 && row.N > 0 && other.N > 0 {
		each := round(other.Value / float64(other.N) / (row.Value / float64(row.N)))
		rows = append(rows, Row{Scenario: "burst-100", Subject: other.Subject + "/cove", N: other.N, OK: other.OK, Value: each, Unit: "x"})
	}
	return rows, errors.Join(err, oerr)
}

// burstDocker starts ten containers in the same moment, each with a Python that prints a sum.
func (w *world) burstDocker(ctx context.Context) (Row, error) {
	n := min(dockerBurstSize, w.options.live)
	if err := w.settle(ctx); err != nil {
		return Row{}, err
	}
	x := w.peers.find("docker")
	var mu sync.Mutex
	var all, ended sync.WaitGroup
	var taken series
	begun := time.Now()
	for range n {
		all.Go(func() {
			began := time.Now()
			undo, err := w.peers.do(ctx, x, sumJob)
			took := time.Since(began)
			if err == nil {
				ended.Go(func() { _ = undo() })
			}
			mu.Lock()
			defer mu.Unlock()
			taken.add(took, err)
		})
	}
	all.Wait()
	wall := time.Since(begun)
	ended.Wait()
	row := taken.row("burst-100", fmt.Sprintf("docker-%d", n))
	row.Value, row.Unit = round(wall.Seconds()), "s"
	return row, taken.err()
}

// clients of sustained: as many as keep two processors busy and some more.
const clients = 16

// measureSustained makes sandboxes, runs 1+1 in them and ends them, with sixteen clients for a minute, and looks at what
// has grown meanwhile. An engine gets as many clients as there are processors, and a quarter of the time.
func measureSustained(ctx context.Context, w *world) ([]Row, error) {
	limit := time.Duration(w.options.seconds) * time.Second
	cycle := func(ctx context.Context) error {
		undo, err := w.createAndRun(ctx, sumJob)
		if err == nil {
			err = undo()
		}
		return err
	}
	// So that every client has its connections: those are kept and are no growth.
	if _, err := churn(ctx, "cove", clients, time.Second, cycle); err != nil {
		return nil, err
	}
	if err := w.settle(ctx); err != nil {
		return nil, err
	}
	before := w.footprint(ctx)
	early := make(chan footprint, 1) // a third later: what a server that has just started takes at first is no growth
	third := time.AfterFunc(limit/3, func() { early <- w.footprint(ctx) })
	defer third.Stop()
	rows, err := churn(ctx, "cove", clients, limit, cycle)
	busy := w.footprint(ctx)
	warm := busy
	select {
	case warm = <-early:
	default: // it was interrupted before
	}
	err = errors.Join(err, w.settle(ctx))
	rows = append(rows, growthRows(before, warm, busy, w.footprint(ctx))...)
	if w.peers == nil || w.peers.find("docker") == nil {
		return rows, err
	}
	x, n := w.peers.find("docker"), runtime.NumCPU()
	others, oerr := churn(ctx, fmt.Sprintf("docker-%d", n), n, limit/4, func(ctx context.Context) error {
		undo, err := w.peers.do(ctx, x, sumJob)
		if err == nil {
			err = undo()
		}
		return err
	})
	return append(append(rows, others...), ratio(rows[0], others[0])), errors.Join(err, oerr)
}

// churn repeats something with so many clients for so long. The value is how often it succeeded per second; the
// percentiles are of one round.
func churn(ctx context.Context, name string, clients int, limit time.Duration, do func(context.Context) error) ([]Row, error) {
	var mu sync.Mutex
	var all sync.WaitGroup
	var taken series
	perSecond := make([]int, int(limit/time.Second)+1)
	begun := time.Now()
	for range clients {
		all.Go(func() {
			for time.Since(begun) < limit && ctx.Err() == nil {
				began := time.Now()
				err := do(ctx)
				mu.Lock()
				taken.add(time.Since(began), err)
				if at := int(time.Since(begun) / time.Second); err == nil && at < len(perSecond) {
					perSecond[at]++
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	row := taken.row("sustained", name)
	row.Value, row.Unit = round(float64(row.OK)/time.Since(begun).Seconds()), "/s"
	worst := Row{Scenario: "sustained", Subject: name + "-worst-second", N: row.N, OK: row.OK, Unit: "/s"}
	if whole := perSecond[:len(perSecond)-1]; len(whole) > 0 { // the last one is cut
		worst.Value = float64(slices.Min(whole))
	}
	return []Row{row, worst}, taken.err()
}

// footprint is what a server holds.
type footprint struct {
	server, maker int64 // resident bytes
	descriptors   int   // of both
	cgroups       int
}

func (w *world) footprint(ctx context.Context) footprint {
	server, maker := w.server.Process.Pid, w.driver.MakerPID()
	return footprint{
		server: memory(server, "status", "VmRSS"), maker: memory(maker, "status", "VmRSS"),
		descriptors: descriptors(server) + descriptors(maker), cgroups: len(w.groups(ctx)),
	}
}

// growthRows compares memory while busy, early and late, and the rest while idle, before and after.
func growthRows(before, warm, busy, after footprint) []Row {
	row := func(subject string, value float64, unit string) Row {
		return Row{Scenario: "sustained", Subject: subject, N: 1, OK: 1, Value: round(value), Unit: unit}
	}
	return []Row{
		row("cove-server-growth", megabytes(busy.server-warm.server), "MB"),
		row("cove-maker-growth", megabytes(busy.maker-warm.maker), "MB"),
		row("cove-descriptor-growth", float64(after.descriptors-before.descriptors), ""),
		row("cove-cgroup-growth", float64(after.cgroups-before.cgroups), ""),
	}
}

// levels are at how many living sandboxes the next one is timed.
var levels = []int{10, 100, 300, 1000}

// measureDensity fills the machine with sandboxes that each ran a pandas cell, and divides by their number what the
// system has less available: agents, kernels, page tables and everything else the kernel keeps for them. Zygotes that
// were started meanwhile are taken out and listed apart: they are shared; with them it is cove-all. On the way the full
// suite times further sandboxes among so many. Its sandboxes are left to the end of it all.
func measureDensity(ctx context.Context, w *world) ([]Row, error) {
	if err := w.settle(ctx); err != nil {
		return nil, err
	}
	debug.FreeOSMemory() // what we used before is not to be counted as theirs
	available, before := settled(ctx), w.zygotes(ctx)
	made, answered, growth, err := w.fill(ctx)
	used, now := available-settled(ctx), w.zygotes(ctx)
	each := func(subject string, bytes int64) Row {
		return Row{Scenario: "density", Subject: subject, N: w.options.live, OK: answered, Value: round(megabytes(bytes) / float64(max(1, len(made)))), Unit: "MB"}
	}
	charged, cerr := cgroupMemory(ctx, made)
	rows := slices.Concat(growth, []Row{each("cove", used-(anonymous(now)-anonymous(before))), each("cove-all", used), each("cove-cgroup", charged)})
	var answers series
	if w.options.full {
		rows = append(rows, each("cove-pss", w.proportional(ctx)+proportional(now)))
		answers = w.askAll(ctx, made)
		rows = append(rows, answers.row("density", "cove-answers"))
	}
	for i, z := range now {
		name := fmt.Sprintf("zygote-%d", i+1)
		rows = append(rows,
			Row{Scenario: "density", Subject: name, N: 1, OK: 1, Value: round(megabytes(z.anonymous)), Unit: "MB"},
			Row{Scenario: "density", Subject: name + "-pss", N: 1, OK: 1, Value: round(megabytes(z.pss)), Unit: "MB"})
	}
	return rows, errors.Join(err, cerr, answers.err())
}

// fill makes sandboxes that each answer a pandas cell, and in the full suite stops at every level to time one more.
func (w *world) fill(ctx context.Context) (made []*client.Sandbox, answered int, growth []Row, err error) {
	const wide = 8
	tried := 0
	for _, level := range w.stops() {
		more, taken := w.crowd(ctx, level-tried, wide, func(sb *client.Sandbox) error { return dataJob.in(ctx, sb) })
		tried, answered, made = level, answered+len(taken.took), append(made, more...)
		err = errors.Join(err, taken.err(), w.settle(ctx))
		if w.options.full {
			row, ferr := w.firstAmong(ctx, level)
			growth, err = append(growth, row), errors.Join(err, ferr)
		}
	}
	if len(growth) > 1 {
		growth = append(growth, ratio(growth[len(growth)-1], growth[0]))
	}
	return made, answered, growth, err
}

// stops are the levels up to the number that was asked for, and that number.
func (w *world) stops() []int {
	if !w.options.full {
		return []int{w.options.live}
	}
	at, _ := slices.BinarySearch(levels, w.options.live)
	return append(slices.Clone(levels[:at]), w.options.live)
}

// firstAmong times further sandboxes, one after the other, among so many living ones.
func (w *world) firstAmong(ctx context.Context, living int) (Row, error) {
	next := subject{fmt.Sprintf("cove-%d", living), func(ctx context.Context) (func() error, error) { return w.createAndRun(ctx, dataJob) }}
	taken, err := w.takeTurns(ctx, w.budget(20, 0), []subject{next})
	return taken[0].row("growth-live", next.name), errors.Join(err, taken[0].err())
}

// askAll runs a cell in every one of them.
func (w *world) askAll(ctx context.Context, all []*client.Sandbox) (taken series) {
	for _, sb := range all {
		began := time.Now()
		err := sumJob.in(ctx, sb)
		taken.add(time.Since(began), err)
	}
	return taken
}

func megabytes(bytes int64) float64 { return float64(bytes) / 1e6 }

// settled is the memory that is available once that has stopped changing, or after two seconds.
func settled(ctx context.Context) int64 {
	last := meminfo("MemAvailable")
	_ = poll(ctx, 2*time.Second, 200*time.Millisecond, func() (bool, error) {
		now := meminfo("MemAvailable")
		still := max(now-last, last-now) < 1e6
		last = now
		return still, nil
	})
	return last
}

// zygote is the memory of one. Its children share most of it, so its PSS shrinks with their number; what it holds that
// is not in any file is what the system would have more without it.
type zygote struct{ pss, anonymous int64 }

func (w *world) zygotes(ctx context.Context) []zygote {
	s, err := w.driver.Stats(ctx)
	if err != nil {
		return nil
	}
	var all []zygote
	for _, z := range s.Zygotes {
		all = append(all, zygote{pss: memory(z.PID, "smaps_rollup", "Pss"), anonymous: memory(z.PID, "smaps_rollup", "Anonymous")})
	}
	return all
}

func anonymous(all []zygote) (total int64) {
	for _, z := range all {
		total += z.anonymous
	}
	return total
}

func proportional(all []zygote) (total int64) {
	for _, z := range all {
		total += z.pss
	}
	return total
}

// proportional is the memory of all processes in sandboxes, with what several of them share counted once.
func (w *world) proportional(ctx context.Context) int64 {
	var total atomic.Int64
	var all sync.WaitGroup
	for part := range slices.Chunk(w.processes(ctx), 256) {
		all.Go(func() {
			for _, pid := range part {
				total.Add(memory(pid, "smaps_rollup", "Pss"))
			}
		})
	}
	all.Wait()
	return total.Load()
}

// cgroupMemory is what the host charges to sandboxes: copied pages and their files, but not the page tables that were
// made in the zygote's name.
func cgroupMemory(ctx context.Context, all []*client.Sandbox) (total int64, err error) {
	for _, sb := range all {
		u, err := sb.Usage(ctx)
		if err != nil {
			return 0, err
		}
		total += u.MemoryBytes
	}
	return total, nil
}
