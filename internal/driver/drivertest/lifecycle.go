package drivertest

import (
	"context"
	"errors"
	"iter"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func pull(t *testing.T, s *agentapi.Stream) (func() (agentapi.Event, error, bool), agentapi.Event) {
	t.Helper()
	next, stop := iter.Pull2(s.Events())
	t.Cleanup(stop)
	e, err, ok := next()
	if err != nil || !ok || e.Type != agentapi.EventStarted {
		t.Fatalf("first event %+v, %v", e, err)
	}
	return next, e
}

// awaitEnd listens until a sandbox's end is told.
func (b *bench) awaitEnd(t *testing.T, id string) sandbox.Ended {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for e, err := range b.Driver.Ended(ctx) {
		if err != nil {
			t.Fatal(err)
		}
		if e.ID == id {
			return e
		}
	}
	t.Fatalf("the end of %s was never told", id)
	return sandbox.Ended{}
}

func (b *bench) lives(t *testing.T, id string) bool {
	t.Helper()
	list, err := b.Driver.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(list, func(i sandbox.Instance) bool { return i.ID == id })
}

var lifecycle = []claim{
	{"a started sandbox answers", needsNothing, func(t *testing.T, b *bench) {
		h, err := b.start(t).Hello(t.Context())
		if err != nil || h.Version != agentapi.Version {
			t.Errorf("%+v, %v", h, err)
		}
	}},
	{"a started sandbox is listed with what it was started with", needsNothing, func(t *testing.T, b *bench) {
		deadline := time.Now().Add(time.Hour).Truncate(time.Second)
		s := b.start(t, func(r *sandbox.StartRequest) { r.Deadline = deadline })
		list, err := b.Driver.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		at := slices.IndexFunc(list, func(i sandbox.Instance) bool { return i.ID == s.id })
		if at < 0 {
			t.Fatalf("not in %+v", list)
		}
		got := list[at]
		if got.Tenant != b.Tenant || got.Template != b.Template.Name || !got.Deadline.Equal(deadline) || time.Since(got.Started) > time.Minute {
			t.Errorf("%+v", got)
		}
	}},
	{"one name is one sandbox", needsNothing, func(t *testing.T, b *bench) {
		s := b.start(t)
		req := b.request()
		req.ID = s.id
		expectKind(t, b.Driver.Start(t.Context(), req), fault.Conflict)
		if _, err := s.Hello(t.Context()); err != nil {
			t.Errorf("the first one suffered: %v", err)
		}
	}},
	{"the environment of a sandbox is that of its commands", needsNothing, func(t *testing.T, b *bench) {
		s := b.start(t, func(r *sandbox.StartRequest) { r.Env = map[string]string{"COVE_CLAIM": "yes, it is"} })
		if got := s.exec(t, sh("echo $COVE_CLAIM")); got.stdout != "yes, it is\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"sandboxes do not share files", needsNothing, func(t *testing.T, b *bench) {
		one, two := b.start(t), b.start(t)
		if _, err := one.Write(t.Context(), agentapi.WriteParams{Path: "mine.txt"}, strings.NewReader("x")); err != nil {
			t.Fatal(err)
		}
		_, err := two.Stat(t.Context(), agentapi.PathParams{Path: "mine.txt"})
		expectKind(t, err, fault.NotFound)
	}},
	{"sandboxes do not see each other's processes", needsIsolation, func(t *testing.T, b *bench) {
		one, two := b.start(t), b.start(t)
		one.begin(t, t.Context(), sh("exec sleep 98765"))
		if got := two.exec(t, sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '; true")); strings.Contains(got.stdout, "98765") && strings.Contains(got.stdout, "sleep 98765") {
			t.Error(got.stdout)
		}
	}},
	{"commands do not run as the host's root", needsIsolation, func(t *testing.T, b *bench) {
		if got := b.start(t).exec(t, sh("id -u")); got.stdout == "0\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"a stopped sandbox cannot be dialed and is not listed", needsNothing, func(t *testing.T, b *bench) {
		s := b.start(t)
		if err := b.Driver.Stop(t.Context(), s.id, sandbox.CauseKilled); err != nil {
			t.Fatal(err)
		}
		_, err := s.Hello(t.Context())
		expectKind(t, err, fault.NotFound, fault.Gone)
		if b.lives(t, s.id) {
			t.Error("still listed")
		}
	}},
	{"a sandbox that never was cannot be dialed", needsNothing, func(t *testing.T, b *bench) {
		_, err := b.Driver.Dial(t.Context(), "sb-never")
		expectKind(t, err, fault.NotFound)
	}},
	{"stop is idempotent", needsNothing, func(t *testing.T, b *bench) {
		s := b.start(t)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if err := b.Driver.Stop(t.Context(), s.id, sandbox.CauseKilled); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if err := b.Driver.Stop(t.Context(), s.id, sandbox.CauseIdle); err != nil {
			t.Error(err)
		}
		if e := b.awaitEnd(t, s.id); e.Cause != sandbox.CauseKilled {
			t.Errorf("the second cause won: %+v", e)
		}
	}},
	{"stopping ends what runs, and its client hears of it", needsNothing, func(t *testing.T, b *bench) {
		s := b.start(t)
		_, next, _ := s.begin(t, t.Context(), sh("sleep 1000"))
		if err := b.Driver.Stop(t.Context(), s.id, sandbox.CauseKilled); err != nil {
			t.Fatal(err)
		}
		heard := make(chan struct{})
		go func() {
			defer close(heard)
			for {
				if e, err, ok := next(); !ok || err != nil || e.Type == agentapi.EventEnd {
					return
				}
			}
		}()
		select {
		case <-heard:
		case <-time.After(2 * time.Minute):
			t.Error("the client still waits")
		}
	}},
	{"an end that nobody heard is told later, until it is forgotten", needsNothing, func(t *testing.T, b *bench) {
		s := b.start(t)
		if err := b.Driver.Stop(t.Context(), s.id, sandbox.CauseIdle); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if e := b.awaitEnd(t, s.id); e.Cause != sandbox.CauseIdle || time.Since(e.At) > time.Minute {
				t.Errorf("%+v", e)
			}
		}
		if err := b.Driver.Forget(t.Context(), s.id); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		for e := range b.Driver.Ended(ctx) {
			if e.ID == s.id {
				t.Error("told again after it was forgotten")
			}
		}
	}},
	{"an end is told to who listens already", needsNothing, func(t *testing.T, b *bench) {
		s := b.start(t)
		heard := make(chan sandbox.Ended, 1)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		go func() {
			for e := range b.Driver.Ended(ctx) {
				if e.ID == s.id {
					heard <- e
					return
				}
			}
		}()
		b.Driver.Stop(t.Context(), s.id, sandbox.CauseKilled)
		select {
		case e := <-heard:
			if e.Cause != sandbox.CauseKilled {
				t.Errorf("%+v", e)
			}
		case <-ctx.Done():
			t.Error("never heard")
		}
	}},
	{"a deadline ends a sandbox without the server's help", needsNothing, func(t *testing.T, b *bench) {
		req := b.request()
		inTime(t, func(deadline time.Time) error {
			req = b.request()
			req.Deadline = deadline
			return b.tryStart(t, req)
		})
		if e := b.awaitEnd(t, req.ID); e.Cause != sandbox.CauseExpired {
			t.Errorf("%+v", e)
		}
		if b.lives(t, req.ID) {
			t.Error("still listed")
		}
	}},
	{"a deadline can be moved and taken away", needsNothing, func(t *testing.T, b *bench) {
		inAnHour := func(r *sandbox.StartRequest) { r.Deadline = time.Now().Add(time.Hour) }
		moved := b.start(t, inAnHour)
		soon, past := time.Now().Add(300*time.Millisecond), time.Time{}
		if err := b.Driver.Change(t.Context(), moved.id, sandbox.Change{Deadline: &soon}); err != nil {
			t.Fatal(err)
		}
		var freed *box
		inTime(t, func(deadline time.Time) error {
			freed, past = b.start(t, inAnHour), deadline
			var errs []error
			for _, d := range []*time.Time{&deadline, {}} {
				errs = append(errs, b.Driver.Change(t.Context(), freed.id, sandbox.Change{Deadline: d}))
			}
			_, err := freed.Hello(t.Context()) // a deadline that has passed may end it a moment later
			return errors.Join(append(errs, err)...)
		})
		if e := b.awaitEnd(t, moved.id); e.Cause != sandbox.CauseExpired {
			t.Errorf("%+v", e)
		}
		time.Sleep(time.Until(past) + 500*time.Millisecond) // past the deadline that was taken away
		if _, err := freed.Hello(t.Context()); err != nil {
			t.Errorf("ended by a deadline it no longer has: %v", err)
		}
	}},
	{"usage of a living sandbox is told, of an ended one not", needsNothing, func(t *testing.T, b *bench) {
		s := b.start(t)
		if _, err := b.Driver.Usage(t.Context(), s.id); err != nil {
			t.Error(err)
		}
		b.Driver.Stop(t.Context(), s.id, sandbox.CauseKilled)
		_, err := b.Driver.Usage(t.Context(), s.id)
		expectKind(t, err, fault.NotFound, fault.Gone)
	}},
	{"many sandboxes start and stop at once", needsNothing, func(t *testing.T, b *bench) {
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				req := b.request()
				if err := b.Driver.Start(t.Context(), req); err != nil {
					t.Error(err)
					return
				}
				if _, err := b.open(req.ID).Hello(t.Context()); err != nil {
					t.Error(err)
				}
				if err := b.Driver.Stop(t.Context(), req.ID, sandbox.CauseKilled); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}},
}
