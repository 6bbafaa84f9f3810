package drivertest

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func (s *box) pause(t *testing.T) {
	t.Helper()
	if err := s.b.Driver.Pause(t.Context(), s.id); err != nil {
		t.Fatalf("pause: %v", err)
	}
}

func (s *box) resume(t *testing.T) {
	t.Helper()
	if err := s.b.Driver.Resume(t.Context(), s.id); err != nil {
		t.Fatalf("resume: %v", err)
	}
}

// instance is a sandbox as it is listed.
func (s *box) instance(t *testing.T) sandbox.Instance {
	t.Helper()
	list, err := s.b.Driver.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(list, func(i sandbox.Instance) bool { return i.ID == s.id })
	if at < 0 {
		t.Fatalf("%s is not listed", s.id)
	}
	return list[at]
}

func (s *box) cpu(t *testing.T) int64 {
	t.Helper()
	u, err := s.b.Driver.Usage(t.Context(), s.id)
	if err != nil {
		t.Fatalf("usage: %v", err)
	}
	return u.CPUMS
}

// rest waits until a paused sandbox uses no more processor time and returns what it has used: a
// process that was exiting when the pause began still ends.
func (s *box) rest(t *testing.T) int64 {
	t.Helper()
	used := s.cpu(t)
	for deadline, same := time.Now().Add(2*time.Minute), 0; same < 2; {
		time.Sleep(300 * time.Millisecond) // in which a process that is not paused would run
		now := s.cpu(t)
		if same++; now != used {
			same = 0
		}
		used = now
		if time.Now().After(deadline) {
			t.Fatalf("it goes on and has used %d ms", used)
		}
	}
	return used
}

var pauses = []claim{
	{"a driver that cannot pause says so", needsNothing, func(t *testing.T, b *bench) {
		if b.Driver.Caps().Pause {
			t.Skip("it can")
		}
		s := b.shared(t)
		expectKind(t, b.Driver.Pause(t.Context(), s.id), fault.Unsupported)
		expectKind(t, b.Driver.Resume(t.Context(), s.id), fault.Unsupported)
	}},
	{"a halt ends processes and streams and leaves files", needsNothing, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.put(t, "kept", "here")
		_, next, _ := s.begin(t, t.Context(), sh("sleep 1000"))
		for range 2 { // the same again is no error
			if err := s.Halt(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		for {
			if e, err, ok := next(); !ok || err != nil || e.Type == agentapi.EventEnd {
				break
			}
		}
		if list, err := s.Processes(t.Context()); err != nil || len(list) != 0 {
			t.Errorf("processes %v, %v", list, err)
		}
		if got := s.get(t, agentapi.ReadParams{Path: "kept"}); got != "here" {
			t.Errorf("the file has %q", got)
		}
	}},
	{"a halt ends kernels, and another can be made", needsPython, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.cell(t, "x = 1")
		if err := s.Halt(t.Context()); err != nil {
			t.Fatal(err)
		}
		if list, err := s.Kernels(t.Context()); err != nil || len(list) != 0 {
			t.Errorf("kernels %v, %v", list, err)
		}
		s.replace(t, agentapi.DefaultKernel)
		if got := s.cell(t, "print('x' in globals())").stdout; got != "False\n" {
			t.Errorf("a fresh kernel says %q", got)
		}
	}},
	{"a paused sandbox costs no processor time and goes on after it", needsPause, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.begin(t, t.Context(), sh("while :; do :; done"))
		begun := s.cpu(t)
		eventually(t, "the loop runs", func() bool { return s.cpu(t) > begun })
		s.pause(t)
		paused := s.rest(t)
		s.resume(t)
		eventually(t, "the loop goes on", func() bool { return s.cpu(t) > paused })
	}},
	{"a pause is listed and survives in memory", needsPause, func(t *testing.T, b *bench) {
		s := b.start(t)
		if s.instance(t).Paused {
			t.Error("a started sandbox is listed as paused")
		}
		for range 2 { // the same again is no error
			s.pause(t)
			if !s.instance(t).Paused {
				t.Error("a paused sandbox is not listed so")
			}
		}
		for range 2 {
			s.resume(t)
			if s.instance(t).Paused {
				t.Error("a resumed sandbox is listed as paused")
			}
		}
		if _, err := s.Hello(t.Context()); err != nil {
			t.Error(err)
		}
	}},
	{"a run stands still and goes on where it was", needsPause, func(t *testing.T, b *bench) {
		s := b.start(t)
		stream, next, _ := s.begin(t, t.Context(), agentapi.ExecParams{Argv: []string{"sh", "-c", "read x; echo heard $x"}, Stdin: true})
		s.pause(t)
		if err := stream.Stdin([]byte("you\n")); err != nil {
			t.Fatal(err)
		}
		heard := make(chan string, 1)
		go func() {
			var all []byte
			for {
				e, err, ok := next()
				if !ok || err != nil || e.Type == agentapi.EventEnd {
					heard <- string(all)
					return
				}
				all = append(all, e.Data...)
			}
		}()
		select {
		case text := <-heard:
			t.Fatalf("a paused sandbox said %q", text)
		case <-time.After(200 * time.Millisecond):
		}
		s.resume(t)
		select {
		case text := <-heard:
			if text != "heard you\n" {
				t.Errorf("it said %q", text)
			}
		case <-time.After(2 * time.Minute):
			t.Error("it does not go on")
		}
	}},
	{"an operation that began in a paused sandbox ends after the resume", needsPause, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.pause(t)
		answered := make(chan error, 1)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		go func() {
			_, err := s.Hello(ctx)
			answered <- err
		}()
		select {
		case err := <-answered:
			t.Fatalf("a paused sandbox answered: %v", err)
		case <-time.After(200 * time.Millisecond):
		}
		s.resume(t)
		if err := <-answered; err != nil {
			t.Error(err)
		}
	}},
	{"a paused sandbox ends by a stop", needsPause, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.begin(t, t.Context(), sh("while :; do :; done"))
		s.pause(t)
		if err := b.Driver.Stop(t.Context(), s.id, sandbox.CauseKilled); err != nil {
			t.Fatal(err)
		}
		if e := b.awaitEnd(t, s.id); e.Cause != sandbox.CauseKilled {
			t.Errorf("%+v", e)
		}
		if b.lives(t, s.id) {
			t.Error("still listed")
		}
		expectKind(t, b.Driver.Pause(t.Context(), s.id), fault.NotFound, fault.Gone)
		expectKind(t, b.Driver.Resume(t.Context(), s.id), fault.NotFound, fault.Gone)
	}},
	{"a paused sandbox ends at its deadline, which can be moved", needsPause, func(t *testing.T, b *bench) {
		s := b.start(t, func(r *sandbox.StartRequest) { r.Deadline = time.Now().Add(time.Hour) })
		s.pause(t)
		soon := time.Now().Add(300 * time.Millisecond)
		if err := b.Driver.Change(t.Context(), s.id, sandbox.Change{Deadline: &soon}); err != nil {
			t.Fatal(err)
		}
		if e := b.awaitEnd(t, s.id); e.Cause != sandbox.CauseExpired {
			t.Errorf("%+v", e)
		}
	}},
	{"a sandbox that never was can be neither paused nor resumed", needsPause, func(t *testing.T, b *bench) {
		expectKind(t, b.Driver.Pause(t.Context(), "sb-never"), fault.NotFound)
		expectKind(t, b.Driver.Resume(t.Context(), "sb-never"), fault.NotFound)
	}},
	{"pauses and resumes at once leave what the last one said", needsPause, func(t *testing.T, b *bench) {
		s := b.start(t)
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for range 5 {
					do := b.Driver.Pause
					if i%2 == 0 {
						do = b.Driver.Resume
					}
					if err := do(t.Context(), s.id); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		s.resume(t)
		if _, err := s.Hello(t.Context()); err != nil {
			t.Error(err)
		}
	}},
	{"a pause and a stop at once end the sandbox", needsPause, func(t *testing.T, b *bench) {
		for range 5 {
			s := b.start(t)
			var wg sync.WaitGroup
			wg.Go(func() {
				if err := b.Driver.Pause(t.Context(), s.id); err != nil {
					expectKind(t, err, fault.NotFound, fault.Gone)
				}
			})
			if err := b.Driver.Stop(t.Context(), s.id, sandbox.CauseKilled); err != nil {
				t.Error(err)
			}
			wg.Wait()
			b.awaitEnd(t, s.id)
			if b.lives(t, s.id) {
				t.Error("still listed")
			}
		}
	}},
}
