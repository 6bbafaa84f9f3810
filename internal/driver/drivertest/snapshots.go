package drivertest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

func (s *box) snapshotRequest() sandbox.SnapshotRequest {
	return sandbox.SnapshotRequest{ID: s.id, Tenant: s.b.Tenant, Name: fmt.Sprintf("snap-%08x", rand.Uint32()), Description: "of a claim"}
}

// snapshot makes a template for one claim.
func (s *box) snapshot(t *testing.T) *template.Template {
	t.Helper()
	req := s.snapshotRequest()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	made, err := s.b.Driver.Snapshot(ctx, req)
	if err != nil {
		t.Fatalf("snapshot: %v", err)
	}
	t.Cleanup(func() { s.b.Driver.RemoveTemplate(context.Background(), req.Tenant, req.Name) }) // the test's own ctx is over
	if made.Name != req.Name || made.Tenant != req.Tenant || made.Description != req.Description || made.Digest == "" || made.Digest == s.b.Template.Digest {
		t.Errorf("%+v", made)
	}
	return made
}

// from starts a sandbox of a snapshot.
func (b *bench) from(t *testing.T, made *template.Template) *box {
	t.Helper()
	return b.start(t, func(r *sandbox.StartRequest) { r.Template = made })
}

var snapshots = []claim{
	{"a driver that takes no snapshots says so", needsNothing, func(t *testing.T, b *bench) {
		if b.Driver.Caps().Snapshot {
			t.Skip("it does")
		}
		_, err := b.Driver.Snapshot(t.Context(), b.shared(t).snapshotRequest())
		expectKind(t, err, fault.Unsupported)
		expectKind(t, b.Driver.RemoveTemplate(t.Context(), b.Tenant, "x"), fault.Unsupported)
	}},
	{"a sandbox starts from a snapshot with the files as they were", needsSnapshot, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.exec(t, sh("mkdir -p d; echo one > d/kept; echo two > d/later; chmod 600 d/kept; ln -s kept d/link; rm -f ~/.profile"))
		made := s.snapshot(t)
		if got := s.exec(t, sh("echo more >> d/kept; rm d/later; echo new > d/new; cat d/kept")); got.stdout != "one\nmore\n" {
			t.Errorf("the sandbox does not go on: %+v", got)
		}
		c := b.from(t, made)
		if got := c.exec(t, sh("cat d/kept d/link d/later; stat -c %a d/kept; test -e d/new || test -e ~/.profile || echo gone")); got.stdout != "one\none\ntwo\n600\ngone\n" {
			t.Errorf("%q %q", got.stdout, got.stderr)
		}
		if got := c.instance(t); got.Template != made.Name {
			t.Errorf("%+v", got)
		}
	}},
	{"sandboxes of one snapshot do not share files", needsSnapshot, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.exec(t, sh("echo one > kept"))
		made := s.snapshot(t)
		one, two := b.from(t, made), b.from(t, made)
		one.exec(t, sh("echo more >> kept"))
		if got := two.exec(t, sh("cat kept")); got.stdout != "one\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"a snapshot can be taken of a sandbox that started from one", needsSnapshot, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.exec(t, sh("echo one > a; echo two > b"))
		c := b.from(t, s.snapshot(t))
		c.exec(t, sh("rm a; echo three > c"))
		if got := b.from(t, c.snapshot(t)).exec(t, sh("ls a 2>&-; cat b c")); got.stdout != "two\nthree\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"a paused sandbox can be taken and stays paused", needsSnapshot, func(t *testing.T, b *bench) {
		if !b.Driver.Caps().Pause {
			t.Skip("the driver says that it cannot pause")
		}
		s := b.start(t)
		s.exec(t, sh("echo one > kept"))
		s.pause(t)
		made := s.snapshot(t)
		if !s.instance(t).Paused {
			t.Error("it runs")
		}
		if got := b.from(t, made).exec(t, sh("cat kept")); got.stdout != "one\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"a snapshot outlives its sandbox", needsSnapshot, func(t *testing.T, b *bench) {
		s := b.start(t)
		if _, err := s.Write(t.Context(), agentapi.WriteParams{Path: "kept"}, strings.NewReader("x")); err != nil {
			t.Fatal(err)
		}
		made := s.snapshot(t)
		if err := b.Driver.Stop(t.Context(), s.id, sandbox.CauseKilled); err != nil {
			t.Fatal(err)
		}
		b.awaitEnd(t, s.id)
		if _, err := b.from(t, made).Stat(t.Context(), agentapi.PathParams{Path: "kept"}); err != nil {
			t.Error(err)
		}
	}},
	{"a name that is taken is a conflict", needsSnapshot, func(t *testing.T, b *bench) {
		s := b.start(t)
		made := s.snapshot(t)
		req := s.snapshotRequest()
		req.Name = made.Name
		_, err := b.Driver.Snapshot(t.Context(), req)
		expectKind(t, err, fault.Conflict)
	}},
	{"what is not there cannot be taken", needsSnapshot, func(t *testing.T, b *bench) {
		req := b.shared(t).snapshotRequest()
		req.ID = "sb-never"
		_, err := b.Driver.Snapshot(t.Context(), req)
		expectKind(t, err, fault.NotFound)
	}},
	{"a snapshot is removed by its owner, once, and what runs from it goes on", needsSnapshot, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.exec(t, sh("echo one > kept"))
		made := s.snapshot(t)
		c := b.from(t, made)
		expectKind(t, b.Driver.RemoveTemplate(t.Context(), "somebody-else", made.Name), fault.NotFound)
		if err := b.Driver.RemoveTemplate(t.Context(), b.Tenant, made.Name); err != nil {
			t.Fatal(err)
		}
		expectKind(t, b.Driver.RemoveTemplate(t.Context(), b.Tenant, made.Name), fault.NotFound)
		if got := c.exec(t, sh("cat kept")); got.stdout != "one\n" {
			t.Errorf("%+v", got)
		}
		req := b.request()
		req.Template = made
		err := b.Driver.Start(t.Context(), req)
		if err == nil {
			b.Driver.Stop(t.Context(), req.ID, sandbox.CauseKilled)
		}
		expectKind(t, err, fault.Unavailable) // it is the tenant's own: not fault.Denied
		again := s.snapshotRequest()
		again.Name = made.Name
		if _, err := b.Driver.Snapshot(t.Context(), again); err != nil {
			t.Errorf("the name is not free again: %v", err)
		}
		b.Driver.RemoveTemplate(t.Context(), b.Tenant, made.Name)
	}},
}
