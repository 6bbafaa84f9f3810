package e2b

import (
	"context"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/fault"
)

// readyFor bounds how long a template's start command may take: an SDK waits for a minute.
const readyFor = 50 * time.Second

// The pauses between two questions whether a sandbox is ready.
const (
	firstPause = 20 * time.Millisecond
	longPause  = time.Second
)

// begin starts what a template starts in its sandboxes and returns when it is ready; a sandbox that does not get there is
// ended.
func (a *API) begin(c *call, id string, start build.Start) error {
	ctx, cancel := context.WithTimeout(c.ctx(), readyFor)
	defer cancel()
	err := a.launch(ctx, c, id, start)
	if err == nil && start.Ready != "" {
		err = a.awaitReady(ctx, c, id, start)
	}
	if err == nil {
		return nil
	}
	// The caller will never know of it, whether he waits or has left.
	if _, killErr := a.sandboxes.Kill(context.WithoutCancel(c.ctx()), c.who, id); killErr != nil {
		a.log.Warn("sandbox whose start command failed is not ended yet", "sandbox", id, "tenant", c.who.Tenant, "error", killErr)
	}
	if ctx.Err() != nil && c.ctx().Err() == nil {
		return fault.Wrap(fault.Timeout, err, "the start command of the template was not ready within %v", readyFor)
	}
	return err
}

// launch starts the command, which goes on without us.
func (a *API) launch(ctx context.Context, c *call, id string, start build.Start) error {
	if start.Command == "" {
		return nil
	}
	stream, err := a.sandboxes.Exec(ctx, c.who, id, command(start, start.Command, agentapi.DisconnectSurvive))
	if err != nil {
		return err
	}
	defer stream.Close()
	for event, err := range stream.Events() {
		if err != nil {
			return err
		}
		if event.Type == agentapi.EventStarted {
			return nil
		}
	}
	return nil
}

func (a *API) awaitReady(ctx context.Context, c *call, id string, start build.Start) error {
	for pause := firstPause; ; pause = min(2*pause, longPause) {
		ready, err := a.ready(ctx, c, id, start)
		if ready || err != nil {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// ready asks once.
func (a *API) ready(ctx context.Context, c *call, id string, start build.Start) (bool, error) {
	stream, err := a.sandboxes.Exec(ctx, c.who, id, command(start, start.Ready, agentapi.DisconnectKill))
	if err != nil {
		return false, err
	}
	defer stream.Close()
	for event, err := range stream.Events() {
		if err != nil {
			return false, err
		}
		if event.Type == agentapi.EventEnd {
			return event.End.Outcome == agentapi.OutcomeOK && event.End.ExitCode == 0, nil
		}
	}
	return false, nil
}

func command(start build.Start, line string, leave agentapi.Disconnect) agentapi.ExecParams {
	return agentapi.ExecParams{
		Argv: []string{"/bin/bash", "-l", "-c", line}, Instead: "/bin/sh", Env: start.Env, User: start.User, Cwd: start.Workdir, Disconnect: leave,
	}
}
