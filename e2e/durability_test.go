package e2e_test

import (
	"context"
	"io"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

func TestSandboxesOutliveTheirServer(t *testing.T) {
	s := sharedServer(t)
	sb := s.create(t, client.CreateRequest{Metadata: map[string]string{"who": "me"}, TimeoutSeconds: 120})
	sb.value("x = 42")
	if _, err := sb.Files().WriteBytes(t.Context(), "note.txt", []byte("kept")); err != nil {
		t.Fatal(err)
	}
	sb.exec(client.ExecRequest{Command: "nohup sleep 3333 >/dev/null 2>&1 &"})
	deadline := s.after(t, sb.ID).Deadline
	for claim, end := range map[string]syscall.Signal{"a kill -9": syscall.SIGKILL, "a restart": syscall.SIGTERM} {
		t.Run("after "+claim+" variables, files, processes and deadline are there", func(t *testing.T) {
			s.signal(t, end)
			s.start(t)
			again := &sandbox{t, s.Sandbox(sb.ID)}
			if got := again.value("x"); got != "42" {
				t.Errorf("x is %q", got)
			}
			if got := again.sh("cat note.txt; echo; pgrep -c sleep"); got != "kept\n1" {
				t.Errorf("the sandbox says %q", got)
			}
			info := s.after(t, sb.ID)
			if info.State != "running" || !info.Deadline.Equal(deadline) || info.Metadata["who"] != "me" {
				t.Errorf("it is %+v, its deadline was %v", info, deadline)
			}
		})
	}
	var types []string
	for e, err := range s.Events(t.Context(), client.EventsRequest{Sandbox: sb.ID}) {
		if err != nil {
			t.Fatal(err)
		}
		types = append(types, e.Type)
	}
	if got := strings.Join(types, " "); got != "created started adopted adopted" {
		t.Errorf("its events are %s", got)
	}
	if err := s.Sandbox(sb.ID).Kill(t.Context()); err != nil {
		t.Errorf("an adopted sandbox is not killed: %v", err)
	}
}

func TestARunThatIsCutByACrashLeavesASandboxThatWorks(t *testing.T) {
	s := sharedServer(t)
	sb := s.create(t, client.CreateRequest{})
	sb.value("x = 1")
	cut := make(chan error, 1)
	begun := make(chan struct{})
	go func() {
		var last error
		for e, err := range sb.RunCode(context.Background(), client.RunRequest{Code: "import time\nprint('here')\ntime.sleep(30)\nx = 2"}) {
			last = err
			if e.Type == client.EventStdout {
				close(begun)
			}
		}
		cut <- last
	}()
	<-begun
	s.crash(t)
	if err := <-cut; err == nil {
		t.Error("a run that was cut ended without an error")
	}
	s.start(t)
	again := &sandbox{t, s.Sandbox(sb.ID)}
	if got := again.value("x"); got != "1" {
		t.Errorf("x is %s: the cell of a caller who is gone went on", got)
	}
}

func TestASandboxEndsAtItsDeadlineWithoutAServer(t *testing.T) {
	s := sharedServer(t)
	sb := s.create(t, client.CreateRequest{TimeoutSeconds: 3600})
	init := s.initOf(t, sb)
	sb.endsIn(5 * time.Second) // the server ends before
	s.crash(t)
	eventually(t, "its PID 1 is gone", 2*time.Minute, func() bool { return status(init, "State") == "" })
	if late := time.Since(sb.Deadline); late < -time.Second || late > 50*time.Second {
		t.Errorf("it ended %v after its deadline", late)
	}
	s.start(t)
	info := s.ended(t, sb.ID)
	if info.Cause != "expired" {
		t.Errorf("the next server says %q: %s", info.Cause, info.Message)
	}
	if d := info.EndedAt.Sub(sb.Deadline).Abs(); d > 30*time.Second {
		t.Errorf("it is said to have ended at %v, its deadline was %v", info.EndedAt, sb.Deadline)
	}
	_, err := s.Sandbox(sb.ID).Run(t.Context(), client.RunRequest{Code: "1"})
	expect(t, err, client.Gone, "expired")
}

func TestS0_14_EveryEndHasACauseThatIsReadableAfterDeath(t *testing.T) {
	s := sharedServer(t)
	ends := map[string]struct {
		create client.CreateRequest
		end    func(t *testing.T, sb *sandbox)
		words  string // in the message
	}{
		"killed":  {end: func(_ *testing.T, sb *sandbox) { sb.kill() }},
		"expired": {end: func(_ *testing.T, sb *sandbox) { sb.endsIn(time.Second) }},
		"idle":    {create: client.CreateRequest{IdleTimeoutSeconds: 5}},
		"agent_died": {words: "SIGKILL", end: func(t *testing.T, sb *sandbox) {
			if err := syscall.Kill(s.initOf(t, sb), syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}},
		// With no other process left to kill, what the agent writes for a caller into memory is its own death.
		"oom": {words: "cove-agent", create: client.CreateRequest{Limits: &client.Limits{MemoryBytes: 48 << 20}}, end: func(t *testing.T, sb *sandbox) {
			if err := sb.StopKernel(t.Context(), "default"); err != nil {
				t.Fatal(err)
			}
			_, err := sb.Files().Write(t.Context(), "/dev/shm/big", &zeros{left: 200 << 20}, client.WriteOptions{})
			if err == nil {
				t.Fatal("200 MiB fitted into 48")
			}
		}},
	}
	causes := map[string]string{}
	for cause, c := range ends {
		t.Run(cause, func(t *testing.T) {
			sb := s.create(t, c.create)
			causes[sb.ID] = cause
			if c.end != nil {
				c.end(t, sb)
			}
			info := s.ended(t, sb.ID)
			if info.Cause != cause || !strings.Contains(info.Message, c.words) || info.EndedAt.Before(info.CreatedAt) || info.Usage == nil {
				t.Errorf("it is %+v", info)
			}
			_, err := sb.Run(t.Context(), client.RunRequest{Code: "1"})
			expect(t, err, client.Gone, cause)
		})
	}
	s.crash(t)
	s.start(t)
	for id, cause := range causes {
		if info := s.after(t, id); info.State != "ended" || info.Cause != cause {
			t.Errorf("after a crash of the server %s is %s by %q, not ended by %q", id, info.State, info.Cause, cause)
		}
	}
}

type zeros struct{ left int64 }

func (z *zeros) Read(p []byte) (int, error) {
	if z.left <= 0 {
		return 0, io.EOF
	}
	n := min(int64(len(p)), z.left)
	clear(p[:n])
	z.left -= n
	return int(n), nil
}

func TestTheEndOfTheMakerEndsItsSandboxesAndIsSaid(t *testing.T) {
	s := sharedServer(t)
	sb := s.create(t, client.CreateRequest{})
	sb.value("x = 1")
	living := s.inside()
	if len(living) == 0 {
		t.Fatal("nothing is inside")
	}
	maker := makerPID(s.dir)
	if maker == 0 {
		t.Fatal("no maker is found")
	}
	if err := syscall.Kill(maker, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all that it made has gone with it", 2*time.Minute, func() bool {
		for _, pid := range living {
			if state := status(pid, "State"); state != "" && !strings.HasPrefix(state, "Z") {
				return false
			}
		}
		return true
	})
	t.Run("the server says so and goes on", func(t *testing.T) {
		_, err := s.Create(t.Context(), client.CreateRequest{})
		expect(t, err, client.Unavailable, "maker")
		_, err = s.Sandbox(sb.ID).Run(t.Context(), client.RunRequest{Code: "x"})
		if k := client.KindOf(err); k != client.Unavailable && k != client.Gone {
			t.Errorf("a cell there: %v (%s)", err, k)
		}
		if _, err := s.Templates(t.Context()); err != nil {
			t.Errorf("the server does not answer any more: %v", err)
		}
	})
	t.Run("a restart makes another maker and leaves nothing of the first", func(t *testing.T) {
		s.signal(t, syscall.SIGTERM)
		s.start(t)
		if now := makerPID(s.dir); now == 0 || now == maker {
			t.Errorf("the maker is process %d, it was %d", now, maker)
		}
		info := s.ended(t, sb.ID)
		if info.Cause != "maker_died" || info.Message == "" {
			t.Errorf("the old sandbox ended by %q: %s", info.Cause, info.Message)
		}
		fresh := s.create(t, client.CreateRequest{})
		if got := fresh.value("6 * 7"); got != "42" {
			t.Errorf("a new sandbox says %s", got)
		}
		fresh.kill()
		s.awaitDrained(t)
		got := s.census(t)
		if pool := got["maker's pool"]; got["loop devices"] != pool || got["links"] != pool || got["maker's slots"] != pool {
			t.Errorf("more is there than a pool of %d needs: %v", pool, got)
		}
	})
}

// awaitDrained waits until the maker holds a full pool and nothing else.
func (s *server) awaitDrained(t testing.TB) {
	t.Helper()
	var last census
	defer func() {
		if t.Failed() {
			t.Logf("the last count was %v", last)
		}
	}()
	eventually(t, "the maker has drained and filled its pool", 5*time.Minute, func() bool {
		c := census{}
		s.countMaker(t, c)
		last = c
		return c["maker's sandboxes"] == 0 && c["maker's dying"] == 0 && c["maker's pool"] >= 8 && c["maker's slots"] == c["maker's pool"] &&
			c["zygotes' children"] <= c["maker's pool"] // a kernel may wait in each pooled shell
	})
}
