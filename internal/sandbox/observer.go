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
)

// Observer hears what the Manager does as it happens. Its methods return at once and are safe for concurrent use.
type Observer interface {
	// Created tells one create that was not answered by an existing sandbox; err is nil when it runs.
	Created(sb Sandbox, took time.Duration, err error)
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

// Adopted does nothing.
func (NopObserver) Adopted(Sandbox) {}

// Ended does nothing.
func (NopObserver) Ended(Sandbox) {}

// RunStarted does nothing.
func (NopObserver) RunStarted(Sandbox, RunKind) {}

// RunEnded does nothing.
func (NopObserver) RunEnded(Sandbox, RunKind, agentapi.Outcome, time.Duration) {}
