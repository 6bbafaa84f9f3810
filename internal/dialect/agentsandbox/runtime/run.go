package runtime

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/agentsandbox/place"
	"github.com/covehq/cove/internal/dialect/transfer"
	"github.com/covehq/cove/internal/fault"
)

// The exit codes that shells have for what is no exit.
const (
	exitTimeout  = 124
	exitDenied   = 126
	exitNotFound = 127
	exitSignal   = 128 // and the signal's number
	exitLost     = 255 // what ssh has for a connection that broke
)

// run is one execution of a command. Who waits for it is known to runs.
type run struct {
	tenant  string
	id      string // of the sandbox
	key     key
	began   time.Time
	cancel  context.CancelFunc // ends the command
	patient bool               // its client said how long it waits, and may ask again in that time

	done   chan struct{} // closed when it is over; then the two below are there
	result executed
	failed error // there is no result: nothing was begun, or the sandbox is gone

	// Of runs, guarded by its mu.
	left  chan struct{} // closed while nobody waits for it
	alone bool
	timer *time.Timer

	mu       sync.Mutex
	out, err capture
	over     bool
}

// start runs a command in the runtime's own time: whether its client stays is for runs to hear.
func (rt *Runtime) start(c *call, r *run, req executeRequest) {
	shelf := rt.shelves.of(c.who.Tenant)
	r.out.on, r.err.on = shelf, shelf
	kill, answer := req.limits()
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.ctx()))
	rt.runs.begin(r, cancel, req.patience > 0)
	who := c.who
	done := transfer.Keep(c.ctx()) // the work has the command, also when its client has left
	rt.work.Go(func() {
		defer done()
		defer cancel()
		defer context.AfterFunc(rt.life, cancel)()
		if answer > 0 {
			guard := time.AfterFunc(answer, func() { r.expire(kill); cancel() })
			defer guard.Stop()
		}
		rt.perform(ctx, who, r, req.Command, kill)
	})
}

// maxInline is how long a command may be as an argument of the shell; Linux takes 128 KiB, and has to find room for more.
const maxInline = 100_000

// perform runs a command to its end.
func (rt *Runtime) perform(ctx context.Context, who auth.Principal, r *run, command string, kill time.Duration) {
	params := agentapi.ExecParams{Argv: []string{"/bin/sh", "-c", command}, Cwd: rt.home, TimeoutMS: max(1, kill.Milliseconds())}
	if len(command) > maxInline {
		file, remove, err := rt.script(ctx, who, r.id, command)
		if err != nil {
			rt.notStarted(ctx, r, err)
			return
		}
		defer remove()
		params.Argv = []string{"/bin/sh", file}
	}
	stream, err := rt.exec(ctx, who, r.id, params)
	if err != nil {
		rt.notStarted(ctx, r, err)
		return
	}
	for e, err := range stream.Events() {
		switch {
		case err != nil && ctx.Err() != nil:
			rt.abandoned(r)
		case err != nil:
			r.broken(rt.sandboxes.Explain(ctx, who, r.id, err))
		case e.Type == agentapi.EventStdout:
			r.write(&r.out, e.Data)
		case e.Type == agentapi.EventStderr:
			r.write(&r.err, e.Data)
		case e.Type == agentapi.EventEnd:
			r.ended(e.End, kill)
		}
	}
}

// exec starts the command, in a home that somebody may have removed.
func (rt *Runtime) exec(ctx context.Context, who auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error) {
	stream, err := rt.sandboxes.Exec(ctx, who, id, params)
	if fault.Is(err, fault.NotFound) && strings.HasPrefix(fault.Message(err), "working directory ") {
		if err := rt.Prepare(ctx, who, id); err != nil {
			return nil, err
		}
		return rt.sandboxes.Exec(ctx, who, id, params)
	}
	return stream, err
}

// script puts a command into a file of the sandbox's: its standard input stays free.
func (rt *Runtime) script(ctx context.Context, who auth.Principal, id, command string) (file string, remove func(), err error) {
	agent, err := rt.sandboxes.Agent(ctx, who, id)
	if err != nil {
		return "", nil, err
	}
	account, err := agent.Account(ctx, agentapi.AccountParams{})
	if err != nil {
		return "", nil, err
	}
	dir := "/tmp"
	if temp := account.Env["TMPDIR"]; path.IsAbs(temp) {
		dir = temp
	}
	file = path.Join(dir, ".command-"+rand.Text())
	if _, err := agent.Write(ctx, agentapi.WriteParams{Path: file, Mode: 0o600}, strings.NewReader(command)); err != nil {
		return "", nil, err
	}
	return file, func() {
		// Whoever waited may have gone; the file goes anyway, with the sandbox at the latest.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_ = agent.Remove(ctx, agentapi.RemoveParams{Path: file})
	}, nil
}

func (r *run) write(to *capture, data []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.over {
		to.write(data)
	}
}

// finish records how it ended; the first to say so is right. A result gets the output so far, and what is said in addition goes
// behind the command's own errors.
func (r *run) finish(result executed, failed error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over {
		return
	}
	r.over = true
	notes := []string{r.out.note("output"), r.err.note("errors"), result.Stderr}
	result.Stdout, result.Stderr = r.out.text(), r.err.text()
	for _, note := range notes {
		if note == "" {
			continue
		}
		if result.Stderr != "" && !strings.HasSuffix(result.Stderr, "\n") {
			result.Stderr += "\n"
		}
		result.Stderr += note + "\n"
	}
	r.result, r.failed = result, failed
	close(r.done)
}

// ended is the end that the agent told.
func (r *run) ended(end *agentapi.End, kill time.Duration) {
	switch end.Outcome {
	case agentapi.OutcomeTimeout:
		r.expire(kill)
		return
	case agentapi.OutcomeOK, agentapi.OutcomeError:
		if end.Signal == "" {
			r.finish(executed{ExitCode: end.ExitCode}, nil)
			return
		}
	default: // a signal, and why
	}
	status := end.Status()
	if status < 0 {
		status = exitSignal - status
	}
	r.finish(executed{ExitCode: status, Stderr: end.Message}, nil)
}

func (r *run) expire(kill time.Duration) {
	r.finish(executed{ExitCode: exitTimeout, TimedOut: true,
		Stderr: fmt.Sprintf("the command was killed: it ran into its time limit of %s", kill.Round(time.Millisecond))}, nil)
}

// abandoned is a command that was ended because nobody waited for it, or because the server ends. It is no failure: a client would
// ask for it again.
func (rt *Runtime) abandoned(r *run) {
	why := "its client left"
	if rt.life.Err() != nil {
		why = "the server is shutting down"
	}
	r.finish(executed{ExitCode: exitTimeout, TimedOut: true, Stderr: "the command was killed because " + why + ", and is not run again"}, nil)
}

// broken is a command that may have begun, and of which nothing more will be heard. Where its sandbox is gone, that is said. Else it is no
// failure either: a client would ask for it again.
func (r *run) broken(err error) {
	if place.Status(fault.KindOf(err)) < http.StatusInternalServerError {
		r.finish(executed{}, err)
		return
	}
	r.finish(lost(fault.Message(err)), nil)
}

// lost is the answer for a command of which nobody knows how far it came.
func lost(why string) executed {
	return executed{ExitCode: exitLost, Stderr: why + "; it may have run, and is not run again"}
}

// notStarted tells of a command that could not be started what a shell would have told; where the sandbox is to blame, there is
// no result.
func (rt *Runtime) notStarted(ctx context.Context, r *run, err error) {
	if ctx.Err() != nil {
		rt.abandoned(r)
		return
	}
	if errors.Is(err, agentapi.ErrCut) {
		r.broken(err)
		return
	}
	switch fault.KindOf(err) {
	case fault.Invalid, fault.Exhausted, fault.DiskFull:
		r.finish(executed{ExitCode: 1, Stderr: fault.Message(err)}, nil)
	case fault.Denied:
		r.finish(executed{ExitCode: exitDenied, Stderr: fault.Message(err)}, nil)
	case fault.NotFound:
		if strings.HasPrefix(fault.Message(err), "/bin/sh") {
			r.finish(executed{ExitCode: exitNotFound, Stderr: fault.Message(err)}, nil)
			return
		}
		r.finish(executed{}, err)
	case fault.Internal, fault.Unauthed, fault.Conflict, fault.Timeout, fault.Unavailable, fault.Gone, fault.Unsupported:
		r.finish(executed{}, err)
	}
}
