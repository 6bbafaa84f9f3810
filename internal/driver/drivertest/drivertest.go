// Package drivertest is the Driver contract as claims that every driver must pass; it knows a driver only by its
// interface and what it says of itself in Caps.
package drivertest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// Subject is a driver to test and what its sandboxes start from.
type Subject struct {
	Driver   sandbox.Driver
	Tenant   string
	Template *template.Template // with sh and coreutils; claims about kernels need Python
	Limits   template.Limits
	Image    template.Image // that hosts can pull, with sh; its zero value: there is none. Its digest is sha256:…
}

// Factory makes a subject for one group of claims; t.Cleanup closes it.
type Factory func(t *testing.T) Subject

// Run tests a driver.
func Run(t *testing.T, factory Factory) {
	for _, group := range []struct {
		name   string
		claims []claim
	}{
		{"lifecycle", lifecycle}, {"processes", processes}, {"files", files}, {"watches", watches}, {"ports", ports}, {"kernels", kernels},
		{"pauses", pauses}, {"forks", forks}, {"snapshots", snapshots}, {"mounts", mounts}, {"images", images},
	} {
		t.Run(group.name, func(t *testing.T) {
			b := &bench{Subject: factory(t)}
			if err := b.Driver.Prepare(t.Context(), b.Tenant, b.Template); err != nil {
				t.Fatal(err)
			}
			for _, c := range group.claims {
				t.Run(c.name, func(t *testing.T) {
					if why := c.lacks(b); why != "" {
						t.Skip(why)
					}
					c.test(t, b)
				})
			}
		})
	}
}

// claim is one sentence that must be true; needs says what it is about, when not every driver has it.
type claim struct {
	name  string
	needs need
	test  func(t *testing.T, b *bench)
}

type need int

const (
	needsNothing need = iota
	needsPython
	needsIsolation
	needsPause
	needsFork // and Python
	needsSnapshot
	needsMounts
	needsImages
	needsPulls
	needsPulledImage
)

func (c claim) lacks(b *bench) string {
	switch c.needs {
	case needsPython:
		if b.Template == nil || b.Template.Python.Executable == "" {
			return "the template has no Python"
		}
	case needsIsolation:
		if b.Driver.Caps().Isolation == "none" {
			return "the driver says that it does not isolate"
		}
	case needsPause:
		if !b.Driver.Caps().Pause {
			return "the driver says that it cannot pause"
		}
	case needsFork:
		if !b.Driver.Caps().Fork {
			return "the driver says that it cannot fork"
		}
		return claim{needs: needsPython}.lacks(b)
	case needsSnapshot:
		if !b.Driver.Caps().Snapshot {
			return "the driver says that it cannot take snapshots"
		}
	case needsMounts:
		if !b.Driver.Caps().Mounts {
			return "the driver says that it has no mounts"
		}
	case needsImages:
		if !b.Driver.Caps().Images {
			return "the driver says that it has no images"
		}
	case needsPulls:
		if !b.Driver.Caps().Pulls {
			return "the driver says that its hosts pull no images"
		}
	case needsPulledImage:
		if b.Image.Digest == "" {
			return "there is no image that a host could pull"
		}
		return claim{needs: needsPulls}.lacks(b)
	}
	return ""
}

// bench makes sandboxes of one subject. Claims that leave no trace share one.
type bench struct {
	Subject
	common *box
}

// box is one sandbox and a client to its agent.
type box struct {
	*agentapi.Client
	b  *bench
	id string
}

func (b *bench) request() sandbox.StartRequest {
	return sandbox.StartRequest{
		ID: fmt.Sprintf("sb-%016x", rand.Uint64()), Tenant: b.Tenant, Template: b.Template, Limits: b.Limits,
		Network: policy.Network{Mode: policy.None}, Storage: sandbox.StorageVolatile,
	}
}

// start makes a sandbox for one claim.
func (b *bench) start(t *testing.T, change ...func(*sandbox.StartRequest)) *box {
	t.Helper()
	req := b.request()
	for _, f := range change {
		f(&req)
	}
	if err := b.tryStart(t, req); err != nil {
		t.Fatalf("start: %v", err)
	}
	return b.open(req.ID)
}

// tryStart starts a sandbox that is stopped at the end of the test.
func (b *bench) tryStart(t *testing.T, req sandbox.StartRequest) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	t.Cleanup(func() { b.Driver.Stop(context.Background(), req.ID, sandbox.CauseKilled) }) // the test's own ctx is over
	return b.Driver.Start(ctx, req)
}

// withTimeout runs something with a time limit, in milliseconds, in which a quiet machine has begun
// it. It runs it once more with a long limit if the machine was too busy for that.
func withTimeout(run func(limit int64) (begun bool)) {
	if !run(3000) {
		run(60_000)
	}
}

// inTime does something that fails once a deadline has passed. A deadline that was too near for a
// busy machine is followed by one that is not.
func inTime(t *testing.T, try func(deadline time.Time) error) {
	t.Helper()
	err := try(time.Now().Add(2 * time.Second))
	if err != nil {
		t.Logf("with a deadline in two seconds: %v", err)
		err = try(time.Now().Add(time.Minute))
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (b *bench) open(id string) *box {
	return &box{b: b, id: id, Client: agentapi.NewClient(func(ctx context.Context) (net.Conn, error) { return b.Driver.Dial(ctx, id) })}
}

// shared is a sandbox that claims of one group have in common.
func (b *bench) shared(t *testing.T) *box {
	t.Helper()
	if b.common == nil {
		req := b.request()
		if err := b.Driver.Start(t.Context(), req); err != nil {
			t.Fatalf("start: %v", err)
		}
		b.common = b.open(req.ID)
	}
	return b.common
}

// told is everything that a run told.
type told struct {
	stdout, stderr string
	started        agentapi.Event
	results        []*agentapi.Result
	errors         []*agentapi.CodeError
	end            agentapi.End
}

func listen(t *testing.T, s *agentapi.Stream) (all told) {
	t.Helper()
	var stdout, stderr strings.Builder
	for e, err := range s.Events() {
		if err != nil {
			t.Fatalf("stream: %v", err)
		}
		switch e.Type {
		case agentapi.EventStarted:
			all.started = e
		case agentapi.EventStdout:
			stdout.Write(e.Data)
		case agentapi.EventStderr:
			stderr.Write(e.Data)
		case agentapi.EventResult:
			all.results = append(all.results, e.Result)
		case agentapi.EventError:
			all.errors = append(all.errors, e.Error)
		case agentapi.EventEnd:
			all.end = *e.End
		}
	}
	if all.end.Outcome == "" {
		t.Fatal("a stream ended without its end")
	}
	all.stdout, all.stderr = stdout.String(), stderr.String()
	return all
}

func sh(script string) agentapi.ExecParams {
	return agentapi.ExecParams{Argv: []string{"sh", "-c", script}}
}

func (s *box) exec(t *testing.T, p agentapi.ExecParams) told {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	stream, err := s.Exec(ctx, p)
	if err != nil {
		t.Fatalf("exec %q: %v", p.Argv, err)
	}
	return listen(t, stream)
}

// begin starts a command and returns its stream after the started event.
func (s *box) begin(t *testing.T, ctx context.Context, p agentapi.ExecParams) (*agentapi.Stream, func() (agentapi.Event, error, bool), agentapi.Event) {
	t.Helper()
	stream, err := s.Exec(ctx, p)
	if err != nil {
		t.Fatalf("exec %q: %v", p.Argv, err)
	}
	next, started := pull(t, stream)
	return stream, next, started
}

// mark is the path of a file that is not there: a cell can wait until the test sets it, and the
// other way round.
func (s *box) mark(t *testing.T) string {
	t.Helper()
	return strings.TrimSpace(s.exec(t, sh("pwd")).stdout) + fmt.Sprintf("/mark-%016x", rand.Uint64())
}

// set makes the file of a mark.
func (s *box) set(t *testing.T, mark string) {
	t.Helper()
	if got := s.exec(t, sh("touch "+mark)); got.end.ExitCode != 0 {
		t.Fatalf("touch %s: %+v", mark, got)
	}
}

// until is Python code that waits for a mark.
func until(mark string) string {
	return "import os, time\nwhile not os.path.exists('" + mark + "'): time.sleep(0.01)\n"
}

func expectKind(t *testing.T, err error, kinds ...fault.Kind) {
	t.Helper()
	for _, k := range kinds {
		if fault.Is(err, k) {
			return
		}
	}
	t.Errorf("got %v (%s), want a fault of %v", err, fault.KindOf(err), kinds)
}

// eventually waits for something that others do; it asks often because nothing tells.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !f(); {
		if time.Now().After(deadline) {
			t.Fatalf("not seen: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
