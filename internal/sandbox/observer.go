package sandbox

import (
	"time"

	"github.com/covehq/cove/internal/agentapi"
)

// RunKind is what a run executes.
type RunKind string

// The kinds of run.
const (
	RunCell    RunKind = "cell"
	RunCommand RunKind = "command"
	RunSnippet RunKind = "snippet" // code in a fresh process
)

// Observer hears what the Manager does as it happens. Its methods return at once and are safe for concurrent use.
type Observer interface {
	// Created tells one create that was not answered by an existing sandbox; err is nil when it runs. Each child of a
	// fork that came about is told too; it has ForkedFrom.
	Created(sb Sandbox, took time.Duration, err error)
	// Forked tells one fork into n children, those that came to nothing included; stall is for how long the parent's
	// kernel took no cell.
	Forked(parent Sandbox, n int, took, stall time.Duration, err error)
	// Paused and Resumed tell a change of state that somebody or the clock wanted; err is nil when it happened.
	Paused(sb Sandbox, took time.Duration, err error)
	Resumed(sb Sandbox, took time.Duration, err error)
	// Adopted tells a sandbox of an earlier server that this one took over.
	Adopted(sb Sandbox)
	// Ended tells a recorded end, exactly once per sandbox.
	Ended(sb Sandbox)
	RunStarted(sb Sandbox, kind RunKind)
	// RunEnded has an empty outcome when the caller left before the end was known.
	RunEnded(sb Sandbox, kind RunKind, outcome agentapi.Outcome, took time.Duration)
}

// NopObserver hears nothing.
type NopObserver struct{}

// Created does nothing.
func (NopObserver) Created(Sandbox, time.Duration, error) {}

// Forked does nothing.
func (NopObserver) Forked(Sandbox, int, time.Duration, time.Duration, error) {}

// Paused does nothing.
func (NopObserver) Paused(Sandbox, time.Duration, error) {}

// Resumed does nothing.
func (NopObserver) Resumed(Sandbox, time.Duration, error) {}

// Adopted does nothing.
func (NopObserver) Adopted(Sandbox) {}

// Ended does nothing.
func (NopObserver) Ended(Sandbox) {}

// RunStarted does nothing.
func (NopObserver) RunStarted(Sandbox, RunKind) {}

// RunEnded does nothing.
func (NopObserver) RunEnded(Sandbox, RunKind, agentapi.Outcome, time.Duration) {}
