// Package snippet runs Python code in a fresh process with limits of its own, by default in a fresh sandbox that ends with
// it. It keeps nothing of what it ran.
package snippet

import (
	"context"
	_ "embed" // the bootstrap
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
)

// What a snippet gets that asks for nothing.
const (
	DefaultTimeout    = 10 * time.Second
	DefaultCPUSeconds = 8
	DefaultMemory     = 128 << 20
	DefaultOpenFiles  = 32
)

// What a snippet may ask for and tell.
const (
	MaxCode    = sandbox.MaxCode
	MaxTimeout = 24 * time.Hour
	MaxOutput  = 1 << 20 // of each stream; the rest is read and dropped
)

// enoughMemory is where an interpreter has room for itself: below, an end without success may be for lack of it.
const enoughMemory = 32 << 20

const (
	margin  = time.Minute      // how much longer than its snippet a sandbox may live, should nobody be left to end it
	settles = 30 * time.Second // how long the end of a sandbox may take
)

// bootstrap is all that a command line shows: the code itself comes by stdin.
//
//go:embed bootstrap.py
var bootstrap string

// Sandboxes is what is asked of the domain.
type Sandboxes interface {
	Create(ctx context.Context, p auth.Principal, spec sandbox.Spec) (sandbox.Sandbox, bool, error)
	Exec(ctx context.Context, p auth.Principal, id string, params agentapi.ExecParams) (*agentapi.Stream, error)
	Kill(ctx context.Context, p auth.Principal, id string) (sandbox.Sandbox, error)
	Explain(ctx context.Context, p auth.Principal, id string, err error) error
}

// Spec is one snippet; what is zero is the default.
type Spec struct {
	Code    string
	Timeout time.Duration // of wall time
	Limits  agentapi.RunLimits
	Env     map[string]string // all there is
	// Template and Network are of the sandbox that is made: without Network nothing leaves it, with it what the server allows.
	Template string
	Network  bool
	// Sandbox is a living one of the caller's to run in; it goes on afterwards. Empty: a fresh one.
	Sandbox string
}

// Result is how a snippet ended.
type Result struct {
	Sandbox        string
	Stdout, Stderr []byte // at most MaxOutput each
	Truncated      bool
	End            agentapi.End
}

// Runner runs snippets. Close it.
type Runner struct {
	sandboxes Sandboxes
	log       *slog.Logger
	ending    sync.WaitGroup // of sandboxes whose answer has been given
}

// New makes a Runner.
func New(s Sandboxes, log *slog.Logger) *Runner { return &Runner{sandboxes: s, log: log} }

// Close waits until the sandboxes of all snippets have ended; no new one is run by then.
func (r *Runner) Close() error {
	r.ending.Wait()
	return nil
}

// Run returns when the snippet has ended, and with it everything that it started. Its caller's leaving ends it.
func (r *Runner) Run(ctx context.Context, p auth.Principal, spec Spec) (Result, error) {
	spec, err := spec.whole()
	if err != nil {
		return Result{}, err
	}
	id := spec.Sandbox
	if id == "" {
		sb, _, err := r.sandboxes.Create(ctx, p, spec.sandbox())
		if err != nil {
			return Result{}, err
		}
		id = sb.ID
		defer r.endLater(ctx, p, id)
	}
	return r.runIn(ctx, p, id, spec)
}

// endLater ends a sandbox off its caller's path: the answer is known and nothing runs any more that somebody wants. The
// sandbox's lifetime ends it where this server does not come to it.
func (r *Runner) endLater(ctx context.Context, p auth.Principal, id string) {
	ctx = context.WithoutCancel(ctx) // owned by ending: a caller who leaves must not keep the sandbox
	r.ending.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, settles)
		defer cancel()
		if _, err := r.sandboxes.Kill(ctx, p, id); err != nil && !fault.Is(err, fault.Gone) && !fault.Is(err, fault.NotFound) {
			r.log.Warn("the sandbox of a snippet is left to its deadline", "sandbox", id, "tenant", p.Tenant, "error", err)
		}
	})
}

func (r *Runner) runIn(ctx context.Context, p auth.Principal, id string, spec Spec) (Result, error) {
	stream, err := r.sandboxes.Exec(ctx, p, id, spec.command())
	if fault.Is(err, fault.NotFound) && spec.Sandbox == "" {
		return Result{}, fault.Wrap(fault.Invalid, err, "this template has no python3, which a snippet needs")
	}
	if err != nil {
		return Result{}, err
	}
	var feeding sync.WaitGroup
	defer feeding.Wait()
	defer stream.Close() // before Wait: a process that reads nothing must not hold the feeder
	feeding.Go(func() {
		if stream.Stdin([]byte(spec.Code)) == nil { // one that ended early has no use for the rest
			_ = stream.CloseStdin()
		}
	})
	result, err := collect(stream)
	if err != nil {
		return Result{}, r.sandboxes.Explain(ctx, p, id, err)
	}
	result.Sandbox = id
	hint(&result.End, spec.Limits)
	return result, nil
}

// collect reads a run to its end in bounded memory.
func collect(stream *agentapi.Stream) (result Result, err error) {
	keep := func(to *[]byte, data []byte) {
		room := min(len(data), MaxOutput-len(*to))
		result.Truncated = result.Truncated || room < len(data)
		*to = append(*to, data[:room]...)
	}
	for e, err := range stream.Events() {
		if err != nil {
			return Result{}, err
		}
		switch e.Type {
		case agentapi.EventStdout:
			keep(&result.Stdout, e.Data)
		case agentapi.EventStderr:
			keep(&result.Stderr, e.Data)
		case agentapi.EventEnd:
			result.End = *e.End
		}
	}
	return result, nil
}

// hint adds what a person would try next: an interpreter without room for itself says little.
func hint(end *agentapi.End, l agentapi.RunLimits) {
	if end.Outcome != agentapi.OutcomeError && end.Outcome != agentapi.OutcomeKilled || l.MemoryBytes >= enoughMemory {
		return
	}
	end.Message += fmt.Sprintf("; %d MB of memory may be too little for Python itself: give it %d or more", l.MemoryBytes>>20, enoughMemory>>20)
}

// whole checks a spec and fills in its defaults.
func (s Spec) whole() (Spec, error) {
	orDefault(&s.Timeout, DefaultTimeout)
	orDefault(&s.Limits.CPUSeconds, DefaultCPUSeconds)
	orDefault(&s.Limits.MemoryBytes, DefaultMemory)
	orDefault(&s.Limits.OpenFiles, DefaultOpenFiles)
	switch {
	case len(s.Code) > MaxCode:
		return s, fault.New(fault.Invalid, "the code has %d bytes; at most %d are allowed", len(s.Code), MaxCode)
	case !utf8.ValidString(s.Code):
		return s, fault.New(fault.Invalid, "the code is not UTF-8")
	case s.Timeout < 0 || s.Timeout > MaxTimeout:
		return s, fault.New(fault.Invalid, "a timeout of %v is out of range: use up to %v", s.Timeout, MaxTimeout)
	case s.Limits.CPUSeconds < 0 || s.Limits.MemoryBytes < 0 || s.Limits.OpenFiles < 0:
		return s, fault.New(fault.Invalid, "a limit cannot be negative")
	case s.Sandbox != "" && (s.Template != "" || s.Network):
		return s, fault.New(fault.Invalid, "template and network are of a fresh sandbox; one that lives has its own: leave them out, or leave out sandbox")
	}
	return s, nil
}

func orDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// sandbox is the fresh one: nobody keeps it, so nothing of it is durable.
func (s Spec) sandbox() sandbox.Spec {
	spec := sandbox.Spec{Template: s.Template, Lifetime: s.Timeout + margin, IdleTimeout: -1, Metadata: map[string]string{"cove": "snippet"}}
	if !s.Network {
		spec.Network = &policy.Network{Mode: policy.None}
	}
	return spec
}

// command is the process. Unbuffered, so that what was printed before a kill is not lost with it.
func (s Spec) command() agentapi.ExecParams {
	return agentapi.ExecParams{
		Argv: []string{"python3", "-u", "-c", bootstrap}, Env: maps.Clone(s.Env), CleanEnv: true, OwnPath: true, Stdin: true,
		TimeoutMS: max(1, s.Timeout.Milliseconds()), Limits: s.Limits, Disconnect: agentapi.DisconnectKill,
		Snippet: &agentapi.Snippet{CodeLength: utf8.RuneCountInString(s.Code)},
	}
}
