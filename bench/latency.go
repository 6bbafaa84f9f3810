package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// pandasCell is the first thing that an agent with data does; its answer proves that pandas worked.
const (
	pandasCell   = "import numpy as np, pandas as pd\npd.DataFrame({'a': np.arange(1000), 'b': np.arange(1000) * 2.0}).sum().to_dict()"
	pandasAnswer = "{'a': 499500.0, 'b': 999000.0}"
)

// subject is one way to do a thing. It returns what undoes it, which is not part of the sample.
type subject struct {
	name string
	do   func(ctx context.Context) (undo func() error, err error)
}

// measureCreate times a sandbox from asking for it until its kernel takes code: through the API, by the driver alone,
// and beside them a plain fork of the same zygote without any isolation, which is the floor. The three take turns and
// none starts before the pool is full again; burst-100 shows what happens without a pool.
func measureCreate(ctx context.Context, w *world) ([]Row, error) {
	example, err := w.client.Create(ctx, client.CreateRequest{})
	if err != nil {
		return nil, err
	}
	if err := example.Kill(ctx); err != nil {
		return nil, err
	}
	subjects := []subject{
		{"cove", w.create},
		{"cove-driver", func(ctx context.Context) (func() error, error) { return w.start(ctx, example.SandboxInfo) }},
		{"zygote-fork", w.fork},
	}
	taken, err := w.takeTurns(ctx, w.budget(60, 9*time.Second), subjects)
	rows := make([]Row, len(subjects), len(subjects)+2)
	for i, s := range subjects {
		rows[i] = taken[i].row("create", s.name)
		err = errors.Join(err, taken[i].err())
	}
	return append(rows, ratio(rows[0], rows[2]), ratio(rows[1], rows[2])), err
}

// takeTurns measures subjects one after the other, each round beginning with another one, so that whatever one leaves
// to the next is spread evenly. The first round only warms up.
func (w *world) takeTurns(ctx context.Context, b budget, subjects []subject) ([]series, error) {
	taken := make([]series, len(subjects))
	begun := time.Now()
	for round := 0; !b.spent(round-1, begun); round++ {
		for turn := range subjects {
			i := (round + turn) % len(subjects)
			if err := w.settle(ctx); err != nil {
				return taken, err
			}
			began := time.Now()
			undo, err := subjects[i].do(ctx)
			took := time.Since(began)
			if err == nil {
				err = undo()
			}
			if round > 0 {
				taken[i].add(took, err)
			}
		}
	}
	return taken, nil
}

func (w *world) create(ctx context.Context) (func() error, error) {
	sb, err := w.client.Create(ctx, client.CreateRequest{})
	if err != nil {
		return nil, err
	}
	return func() error { return sb.Kill(ctx) }, nil
}

// start is what the server asks its driver for when it makes a sandbox like the example.
func (w *world) start(ctx context.Context, example client.SandboxInfo) (func() error, error) {
	id := fmt.Sprintf("bench%d", w.next.Add(1))
	err := w.driver.Start(ctx, sandbox.StartRequest{
		ID: id, Tenant: tenant, Template: w.template, Limits: template.Limits(example.Limits),
		Network: policy.Network{Mode: policy.Mode(example.Network.Mode)}, Storage: sandbox.Storage(example.Storage),
		Deadline: time.Now().Add(5 * time.Minute),
	})
	if err != nil {
		return nil, err
	}
	return func() error { return w.driver.Stop(ctx, id, sandbox.CauseKilled) }, nil
}

func (w *world) fork(ctx context.Context) (func() error, error) {
	child, err := w.driver.Floor(ctx, tenant, w.template.Digest)
	if err != nil {
		return nil, err
	}
	return func() error {
		// Half a close tells the child to leave; its own close comes after its memory is gone.
		if c, ok := child.(interface {
			io.Reader
			CloseWrite() error
		}); ok && c.CloseWrite() == nil {
			_, _ = io.Copy(io.Discard, c)
		}
		return child.Close()
	}, nil
}

// measureFirstCell times a sandbox from asking for it until its first pandas cell has answered.
func measureFirstCell(ctx context.Context, w *world) ([]Row, error) {
	taken, err := w.takeTurns(ctx, w.budget(50, 5*time.Second), []subject{{"cove", func(ctx context.Context) (func() error, error) {
		sb, err := w.client.Create(ctx, client.CreateRequest{})
		if err != nil {
			return nil, err
		}
		if err := runCell(ctx, sb, pandasCell, pandasAnswer); err != nil {
			return nil, errors.Join(err, sb.Kill(ctx))
		}
		return func() error { return sb.Kill(ctx) }, nil
	}}})
	return []Row{taken[0].row("tti-data", "cove")}, errors.Join(err, taken[0].err())
}

func runCell(ctx context.Context, sb *client.Sandbox, code, want string) error {
	out, err := sb.Run(ctx, client.RunRequest{Code: code})
	if err != nil {
		return err
	}
	if out.Outcome != client.OutcomeOK || strings.TrimSpace(out.Text()) != want {
		return fmt.Errorf("the cell ended with %s and said %q, not %q: %s%s", out.Outcome, out.Text(), want, out.Message, out.Stderr)
	}
	return nil
}

// measureCell times 1+1 in a kernel that is warm.
func measureCell(ctx context.Context, w *world) ([]Row, error) {
	return w.repeat(ctx, "rtt-cell", w.budget(1000, 3*time.Second), func(sb *client.Sandbox) error { return runCell(ctx, sb, "1+1", "2") })
}

// measureCommand times the shortest command.
func measureCommand(ctx context.Context, w *world) ([]Row, error) {
	return w.repeat(ctx, "rtt-cmd", w.budget(500, 2*time.Second), func(sb *client.Sandbox) error {
		out, err := sb.Exec(ctx, client.ExecRequest{Argv: []string{"true"}})
		if err == nil && (out.Outcome != client.OutcomeOK || out.ExitCode != 0) {
			err = fmt.Errorf("true ended with %s, status %d: %s", out.Outcome, out.ExitCode, out.Message)
		}
		return err
	})
}

// repeat measures one thing in one sandbox, after a few that only warm up.
func (w *world) repeat(ctx context.Context, scenario string, b budget, do func(*client.Sandbox) error) ([]Row, error) {
	const warmup = 10
	sb, err := w.client.Create(ctx, client.CreateRequest{})
	if err != nil {
		return nil, err
	}
	if err := w.settle(ctx); err != nil {
		return nil, errors.Join(err, sb.Kill(ctx))
	}
	var taken series
	begun := time.Now()
	for i := 0; !b.spent(i-warmup, begun) && ctx.Err() == nil; i++ {
		began := time.Now()
		err := do(sb)
		if i >= warmup {
			taken.add(time.Since(began), err)
		}
	}
	return []Row{taken.row(scenario, "cove")}, errors.Join(taken.err(), sb.Kill(ctx))
}
