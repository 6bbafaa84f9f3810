package main

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/covehq/cove/client"
)

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
			sb, err := w.client.Create(ctx, client.CreateRequest{})
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

// measureBurst asks for a hundred sandboxes in the same moment. The pool holds a few; the rest are made while their
// callers wait. The value is the time until the last one is there.
func measureBurst(ctx context.Context, w *world) ([]Row, error) {
	const n = 100
	if err := w.settle(ctx); err != nil {
		return nil, err
	}
	begun := time.Now()
	made, taken := w.crowd(ctx, n, n, func(*client.Sandbox) error { return nil })
	wall := time.Since(begun)
	row := taken.row("burst-100", "cove")
	row.Value, row.Unit = round(wall.Seconds()), "s"
	return []Row{row}, errors.Join(taken.err(), disperse(ctx, made))
}

// measureDensity fills the machine with sandboxes that each ran a pandas cell, and divides by their number what the
// system has less available: agents, kernels, page tables and everything else the kernel keeps for them. Zygotes that
// were started meanwhile are taken out and listed apart: they are shared. Its sandboxes are left to the end of it all.
func measureDensity(ctx context.Context, w *world) ([]Row, error) {
	const n, wide = 300, 8
	if err := w.settle(ctx); err != nil {
		return nil, err
	}
	debug.FreeOSMemory() // what we used before is not to be counted as theirs
	available, zygotes := settled(ctx), w.zygotes(ctx)
	made, taken := w.crowd(ctx, n, wide, func(sb *client.Sandbox) error { return runCell(ctx, sb, pandasCell, pandasAnswer) })
	err := errors.Join(taken.err(), w.settle(ctx))
	used, now := available-settled(ctx), w.zygotes(ctx)
	rows := []Row{{Scenario: "density", Subject: "cove", N: n, OK: len(taken.took), Unit: "MB"}}
	if len(made) == 0 {
		return rows, err
	}
	own := used - (anonymous(now) - anonymous(zygotes))
	rows[0].Value = megabytes(own) / float64(len(made))
	charged, cerr := cgroupMemory(ctx, made)
	rows = append(rows, Row{Scenario: "density", Subject: "cove-cgroup", N: len(made), OK: len(made), Value: megabytes(charged) / float64(len(made)), Unit: "MB"})
	for i, z := range now {
		name := fmt.Sprintf("zygote-%d", i+1)
		rows = append(rows,
			Row{Scenario: "density", Subject: name, N: 1, OK: 1, Value: megabytes(z.anonymous), Unit: "MB"},
			Row{Scenario: "density", Subject: name + "-pss", N: 1, OK: 1, Value: megabytes(z.pss), Unit: "MB"})
	}
	for i := range rows {
		rows[i].Value = round(rows[i].Value)
	}
	return rows, errors.Join(err, cerr)
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
