package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// job is what somebody wants done first in an environment of their own, in the words of each way to have it done.
type job struct {
	scenario string
	cell     string   // for a kernel; empty: argv is run as a command
	code     string   // for python3 -c
	argv     []string // without an interpreter
	answer   string
}

// The three jobs; the answer of the last proves that pandas worked.
var (
	sayJob  = job{scenario: "tti-cmd", argv: []string{"/bin/echo", "cove"}, answer: "cove"}
	sumJob  = job{scenario: "tti-py", cell: "1+1", code: "print(1+1)", answer: "2"}
	dataJob = job{
		scenario: "tti-data",
		cell:     "import numpy as np, pandas as pd\n" + frame,
		code:     "import numpy as np, pandas as pd\nprint(" + frame + ")",
		answer:   "{'a': 499500.0, 'b': 999000.0}",
	}
)

const frame = "pd.DataFrame({'a': np.arange(1000), 'b': np.arange(1000) * 2.0}).sum().to_dict()"

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

// takeTurns measures subjects one after the other, each round in another order, so that whatever one leaves to the next
// is spread evenly, and none before the machine has nothing to do: some clean up long after their answer. The first round
// only warms up.
func (w *world) takeTurns(ctx context.Context, b budget, subjects []subject) ([]series, error) {
	taken := make([]series, len(subjects))
	begun := time.Now()
	for round := 0; !b.spent(round-1, begun); round++ {
		for _, i := range rand.Perm(len(subjects)) {
			if err := w.settle(ctx); err != nil {
				return taken, err
			}
			if len(subjects) > 1 {
				awaitIdle(ctx)
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
	return func() error { return leaveFloor(child) }, nil
}

// leaveFloor lets the child go. Half a close tells it to leave; its own close comes after its memory is gone.
func leaveFloor(child io.Closer) error {
	if c, ok := child.(interface {
		io.Reader
		CloseWrite() error
	}); ok && c.CloseWrite() == nil {
		_, _ = io.Copy(io.Discard, c)
	}
	return child.Close()
}

// forkAndRun does the job in a plain fork of the zygote, through the kernel's own socket.
func (w *world) forkAndRun(ctx context.Context, j job) (func() error, error) {
	child, err := w.driver.Floor(ctx, tenant, w.template.Digest)
	if err != nil {
		return nil, err
	}
	leave := func() error { return leaveFloor(child) }
	conn, ok := child.(io.ReadWriter)
	if !ok {
		return nil, errors.Join(errors.New("the floor gave no connection"), leave())
	}
	if err := runBare(conn, j); err != nil {
		return nil, errors.Join(err, leave())
	}
	return leave, nil
}

// runBare runs a cell in a kernel without an agent in between.
func runBare(conn io.ReadWriter, j job) error {
	if err := agentapi.WriteJSON(conn, agentapi.FrameRequest, agentapi.KernelRequest{Code: j.cell}); err != nil {
		return err
	}
	var said string
	for r := agentapi.NewReader(conn); ; {
		f, err := r.Read()
		if err != nil {
			return err
		}
		var e agentapi.Event
		if f.Kind != agentapi.FrameEvent || json.Unmarshal(f.Payload, &e) != nil {
			continue
		}
		switch {
		case e.Type == agentapi.EventResult && e.Result != nil:
			_ = json.Unmarshal(e.Result.Data["text/plain"], &said) // what is no text is no answer
		case e.Type == agentapi.EventEnd && said == j.answer:
			return nil
		case e.Type == agentapi.EventEnd:
			return fmt.Errorf("the cell said %q, not %q", said, j.answer)
		}
	}
}

func measureFirstCommand(ctx context.Context, w *world) ([]Row, error) { return w.first(ctx, sayJob) }

func measureFirstSum(ctx context.Context, w *world) ([]Row, error) { return w.first(ctx, sumJob) }

func measureFirstFrame(ctx context.Context, w *world) ([]Row, error) { return w.first(ctx, dataJob) }

// first times a job from asking for an environment until the answer is there, ours and everybody else's in turn.
func (w *world) first(ctx context.Context, j job) ([]Row, error) {
	subjects, b := []subject{{"cove", func(ctx context.Context) (func() error, error) { return w.createAndRun(ctx, j) }}}, w.budget(50, 5*time.Second)
	if w.peers != nil {
		b = w.budget(20, 0)
		if j.cell != "" {
			subjects = append(subjects, subject{"zygote-fork", func(ctx context.Context) (func() error, error) { return w.forkAndRun(ctx, j) }})
		}
		subjects = append(subjects, w.peers.subjects(j)...)
	}
	taken, err := w.takeTurns(ctx, b, subjects)
	rows := make([]Row, len(subjects))
	for i, s := range subjects {
		rows[i] = taken[i].row(j.scenario, s.name)
		if serr := taken[i].err(); serr != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", s.name, serr))
		}
	}
	for _, other := range rows[1:] {
		rows = append(rows, ratio(other, rows[0]))
	}
	return rows, err
}

func (w *world) createAndRun(ctx context.Context, j job) (func() error, error) {
	sb, err := w.client.Create(ctx, client.CreateRequest{})
	if err != nil {
		return nil, err
	}
	if err := j.in(ctx, sb); err != nil {
		return nil, errors.Join(err, sb.Kill(ctx))
	}
	return func() error { return sb.Kill(ctx) }, nil
}

// in does the job in a sandbox.
func (j job) in(ctx context.Context, sb *client.Sandbox) error {
	if j.cell != "" {
		return runCell(ctx, sb, j.cell, j.answer)
	}
	return runCommand(ctx, sb, j.answer, j.argv...)
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

func runCommand(ctx context.Context, sb *client.Sandbox, want string, argv ...string) error {
	out, err := sb.Exec(ctx, client.ExecRequest{Argv: argv})
	if err != nil {
		return err
	}
	if out.Outcome != client.OutcomeOK || out.ExitCode != 0 || strings.TrimSpace(out.Stdout) != want {
		return fmt.Errorf("%s ended with %s, status %d, and said %q: %s%s", argv[0], out.Outcome, out.ExitCode, out.Stdout, out.Message, out.Stderr)
	}
	return nil
}

// measureCell times 1+1 in a kernel that is warm, and, in new sandboxes, the first one beside the second.
func measureCell(ctx context.Context, w *world) ([]Row, error) {
	return w.repeat(ctx, "rtt-cell", w.budget(1000, 3*time.Second), func(sb *client.Sandbox) error { return runCell(ctx, sb, "1+1", "2") })
}

// measureCommand times the shortest command.
func measureCommand(ctx context.Context, w *world) ([]Row, error) {
	samples := 500
	if w.options.full {
		samples = 1000
	}
	return w.repeat(ctx, "rtt-cmd", w.budget(samples, 2*time.Second), func(sb *client.Sandbox) error { return runCommand(ctx, sb, "", "true") })
}

// repeat measures one thing in one sandbox, after a few that only warm up.
func (w *world) repeat(ctx context.Context, scenario string, b budget, do func(*client.Sandbox) error) (rows []Row, err error) {
	const warmup = 10
	sb, err := w.client.Create(ctx, client.CreateRequest{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, sb.Kill(ctx)) }()
	if err := w.settle(ctx); err != nil {
		return nil, err
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
	rows = []Row{taken.row(scenario, "cove")}
	if !w.options.full {
		return rows, taken.err()
	}
	more, err := w.firstAndSecond(ctx, scenario, do)
	return append(rows, more...), errors.Join(err, taken.err())
}

// firstAndSecond compares the first with the second in new sandboxes: a first that is slower hides a part of the start.
func (w *world) firstAndSecond(ctx context.Context, scenario string, do func(*client.Sandbox) error) ([]Row, error) {
	var taken [2]series
	for range w.budget(20, 0).samples {
		if err := w.settle(ctx); err != nil {
			return nil, err
		}
		sb, err := w.client.Create(ctx, client.CreateRequest{})
		if err != nil {
			return nil, err
		}
		for i := range taken {
			began := time.Now()
			err := do(sb)
			taken[i].add(time.Since(began), err)
		}
		if err := sb.Kill(ctx); err != nil {
			return nil, err
		}
	}
	first, second := taken[0].row(scenario, "cove-first"), taken[1].row(scenario, "cove-second")
	return []Row{first, second, ratio(first, second)}, errors.Join(taken[0].err(), taken[1].err())
}
