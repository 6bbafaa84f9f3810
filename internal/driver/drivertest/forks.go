package drivertest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
)

func (s *box) forkRequest(n int) sandbox.ForkRequest {
	req := sandbox.ForkRequest{Parent: s.id}
	for range n {
		req.Children = append(req.Children, sandbox.ForkChild{
			ID: fmt.Sprintf("sb-%016x", rand.Uint64()), Limits: s.b.Limits, Network: policy.Network{Mode: policy.None},
		})
	}
	return req
}

// fork makes n copies for one claim.
func (s *box) fork(t *testing.T, n int, change ...func(*sandbox.ForkRequest)) ([]*box, sandbox.Forked) {
	t.Helper()
	req := s.forkRequest(n)
	for _, f := range change {
		f(&req)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	forked, err := s.b.Driver.Fork(ctx, req)
	if err != nil {
		t.Fatalf("fork: %v", err)
	}
	var all []*box
	for _, c := range req.Children {
		t.Cleanup(func() { s.b.Driver.Stop(context.Background(), c.ID, sandbox.CauseKilled) }) // the test's own ctx is over
		all = append(all, s.b.open(c.ID))
	}
	return all, forked
}

// tryFork is a fork that should fail, and soon.
func (b *bench) tryFork(t *testing.T, req sandbox.ForkRequest) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	_, err := b.Driver.Fork(ctx, req)
	return err
}

// value is what an expression is in the default kernel.
func (s *box) value(t *testing.T, code string) string {
	t.Helper()
	got := s.cell(t, code)
	if len(got.results) != 1 {
		t.Fatalf("%s: %+v", code, got)
	}
	return text(got.results[0])
}

// expectUnforked checks that a fork came to nothing and its parent did not suffer.
func (s *box) expectUnforked(t *testing.T, req sandbox.ForkRequest) {
	t.Helper()
	for _, c := range req.Children {
		eventually(t, "the end of copy "+c.ID, func() bool { return !s.b.lives(t, c.ID) })
	}
	if got := s.value(t, "20+22"); got != "42" {
		t.Errorf("the parent says %s", got)
	}
}

var forks = []claim{
	{"a driver that cannot fork says so", needsNothing, func(t *testing.T, b *bench) {
		if b.Driver.Caps().Fork {
			t.Skip("it can")
		}
		expectKind(t, b.tryFork(t, b.shared(t).forkRequest(1)), fault.Unsupported)
	}},
	{"a copy has its parent's memory and files, and both go their own way", needsFork, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.cell(t, "x = [1, 2]; f = lambda: len(x); own = b'x' * (16 << 20)\nopen('note', 'w').write('before')")
		copies, forked := s.fork(t, 1)
		c := copies[0]
		if got := c.value(t, "f(), open('note').read()"); got != "(2, 'before')" {
			t.Errorf("the copy says %s", got)
		}
		c.cell(t, "x.append(3); open('note', 'w').write('of the copy')")
		s.cell(t, "x.clear(); open('own', 'w').write('of the parent')")
		if got := s.value(t, "f(), open('note').read()"); got != "(0, 'before')" {
			t.Errorf("the parent says %s", got)
		}
		if got := c.value(t, "import os; (f(), open('note').read(), os.path.exists('own'))"); got != "(3, 'of the copy', False)" {
			t.Errorf("the copy says %s", got)
		}
		if forked.Stall <= 0 || forked.Memory < 8<<20 || forked.Memory > 64<<20 {
			t.Errorf("%+v", forked)
		}
	}},
	{"a copy has commands, files and further kernels as any sandbox", needsFork, func(t *testing.T, b *bench) {
		copies, _ := b.start(t).fork(t, 1)
		c := copies[0]
		if got := c.exec(t, sh("echo hello; exit 3")); got.stdout != "hello\n" || got.end.ExitCode != 3 {
			t.Errorf("%+v", got)
		}
		if _, err := c.Write(t.Context(), agentapi.WriteParams{Path: "sent"}, strings.NewReader("x")); err != nil {
			t.Error(err)
		}
		c.replace(t, "second")
		if got := c.run(t, agentapi.RunParams{Code: "print(1+1)", Kernel: "second"}); got.stdout != "2\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"a copy is listed with what it was forked with", needsFork, func(t *testing.T, b *bench) {
		deadline := time.Now().Add(time.Hour).Truncate(time.Second)
		copies, _ := b.start(t).fork(t, 1, func(r *sandbox.ForkRequest) { r.Children[0].Deadline = deadline })
		got := copies[0].instance(t)
		if got.Tenant != b.Tenant || got.Template != b.Template.Name || !got.Deadline.Equal(deadline) || got.Paused || time.Since(got.Started) > time.Minute {
			t.Errorf("%+v", got)
		}
	}},
	{"a copy ends at its deadline without the server's help", needsFork, func(t *testing.T, b *bench) {
		s := b.start(t)
		var req sandbox.ForkRequest
		inTime(t, func(deadline time.Time) error {
			req = s.forkRequest(1)
			req.Children[0].Deadline = deadline
			_, err := b.Driver.Fork(t.Context(), req)
			return err
		})
		if e := b.awaitEnd(t, req.Children[0].ID); e.Cause != sandbox.CauseExpired {
			t.Errorf("%+v", e)
		}
		if !b.lives(t, s.id) {
			t.Error("the parent ended too")
		}
	}},
	{"several copies are all alike and apart", needsFork, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.cell(t, "x = 'shared'")
		copies, _ := s.fork(t, 3)
		for i, c := range copies {
			c.cell(t, fmt.Sprintf("x += str(%d); open('mine', 'a').write(x)", i))
		}
		for i, c := range copies {
			want := fmt.Sprintf("shared%d", i)
			if got := c.value(t, "x, open('mine').read()"); got != fmt.Sprintf("('%s', '%s')", want, want) {
				t.Errorf("copy %d says %s", i, got)
			}
		}
	}},
	{"what a parent was given is inherited only when asked for", needsFork, func(t *testing.T, b *bench) {
		s := b.start(t, func(r *sandbox.StartRequest) {
			r.Env = map[string]string{"COVE_SECRET": "s3cret", "COVE_BOTH": "parent"}
		})
		both, _ := s.fork(t, 2, func(r *sandbox.ForkRequest) {
			for i := range r.Children {
				r.Children[i].Env = map[string]string{"COVE_OWN": "own", "COVE_BOTH": "copy"}
			}
			r.Children[1].InheritEnv = true
		})
		for i, want := range []string{"|own|copy", "s3cret|own|copy"} {
			if got := both[i].exec(t, sh(`echo "$COVE_SECRET|$COVE_OWN|$COVE_BOTH"`)); strings.TrimSpace(got.stdout) != want {
				t.Errorf("a command of copy %d sees %q, want %q", i, got.stdout, want)
			}
			code := `import os; "|".join(os.environ.get(k, "") for k in ("COVE_SECRET", "COVE_OWN", "COVE_BOTH"))`
			if got := both[i].value(t, code); strings.Trim(got, "'") != want {
				t.Errorf("the kernel of copy %d sees %s, want %q", i, got, want)
			}
		}
	}},
	{"what is not copied is told", needsFork, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.begin(t, t.Context(), sh("exec sleep 98765"))
		s.replace(t, "second")
		copies, forked := s.fork(t, 1)
		for kind, what := range map[string]string{"process": "sleep 98765", "kernel": "second"} {
			if !slices.ContainsFunc(forked.NotCopied, func(n sandbox.NotCopied) bool { return n.Kind == kind && strings.Contains(n.What, what) }) {
				t.Errorf("no %s %q in %+v", kind, what, forked.NotCopied)
			}
		}
		list, err := copies[0].Kernels(t.Context())
		if err != nil || len(list) != 1 || list[0].Name != agentapi.DefaultKernel {
			t.Errorf("%+v, %v", list, err)
		}
		if got := copies[0].exec(t, sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '; true")); strings.Contains(got.stdout, "sleep 98765") {
			t.Errorf("the copy has %q", got.stdout)
		}
	}},
	{"another kernel than the default one can be copied", needsFork, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.replace(t, "second")
		s.cell(t, "x = 'default'")
		s.run(t, agentapi.RunParams{Code: "x = 'second'", Kernel: "second"})
		copies, _ := s.fork(t, 1, func(r *sandbox.ForkRequest) { r.Kernel = "second" })
		list, err := copies[0].Kernels(t.Context())
		if err != nil || len(list) != 1 {
			t.Fatalf("%+v, %v", list, err)
		}
		if got := copies[0].run(t, agentapi.RunParams{Code: "print(x)", Kernel: list[0].Name}); got.stdout != "second\n" {
			t.Errorf("%+v", got)
		}
	}},
	{"a copy can be copied, also after its parent's end", needsFork, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.cell(t, "x = 1; open('deep', 'w').write('1')")
		first, _ := s.fork(t, 1)
		first[0].cell(t, "x += 1; open('deep', 'a').write('2')")
		if err := b.Driver.Stop(t.Context(), s.id, sandbox.CauseKilled); err != nil {
			t.Fatal(err)
		}
		second, _ := first[0].fork(t, 1)
		if err := b.Driver.Stop(t.Context(), first[0].id, sandbox.CauseKilled); err != nil {
			t.Fatal(err)
		}
		if got := second[0].value(t, "x, open('deep').read()"); got != "(2, '12')" {
			t.Errorf("it says %s", got)
		}
	}},
	{"a busy kernel is refused when asked so, and nothing is left", needsFork, func(t *testing.T, b *bench) {
		s := b.start(t)
		stream, err := s.Run(t.Context(), agentapi.RunParams{Code: "import time; time.sleep(1000)"})
		if err != nil {
			t.Fatal(err)
		}
		pull(t, stream)
		req := s.forkRequest(2)
		req.Refuse = true
		expectKind(t, b.tryFork(t, req), fault.Conflict)
		if err := s.Interrupt(t.Context(), agentapi.KernelParams{Kernel: agentapi.DefaultKernel}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the kernel is idle", func() bool {
			list, err := s.Kernels(t.Context())
			return err == nil && len(list) == 1 && list[0].State == agentapi.KernelIdle
		})
		s.expectUnforked(t, req)
	}},
	{"a busy kernel is waited for", needsFork, func(t *testing.T, b *bench) {
		s := b.start(t)
		stream, err := s.Run(t.Context(), agentapi.RunParams{Code: "import time; time.sleep(1); x = 'after'"})
		if err != nil {
			t.Fatal(err)
		}
		next, _ := pull(t, stream)
		copies, _ := s.fork(t, 1)
		for {
			if e, err, ok := next(); !ok || err != nil || e.Type == agentapi.EventEnd {
				break
			}
		}
		if got := copies[0].value(t, "x"); got != "'after'" {
			t.Errorf("the copy was made before the cell's end: %s", got)
		}
	}},
	{"who gives up waiting leaves nothing", needsFork, func(t *testing.T, b *bench) {
		s := b.start(t)
		tried := s.mark(t)
		stream, err := s.Run(t.Context(), agentapi.RunParams{Code: until(tried)})
		if err != nil {
			t.Fatal(err)
		}
		next, _ := pull(t, stream)
		req := s.forkRequest(2)
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		if _, err := b.Driver.Fork(ctx, req); err == nil {
			t.Error("a busy kernel was forked")
		}
		s.set(t, tried)
		for {
			if e, err, ok := next(); !ok || err != nil || e.Type == agentapi.EventEnd {
				break
			}
		}
		s.expectUnforked(t, req)
	}},
	{"all copies are made or none", needsFork, func(t *testing.T, b *bench) {
		s, other := b.start(t), b.start(t)
		req := s.forkRequest(3)
		req.Children[2].ID = other.id
		expectKind(t, b.tryFork(t, req), fault.Conflict)
		if _, err := other.Hello(t.Context()); err != nil {
			t.Errorf("the one whose name was taken suffered: %v", err)
		}
		req.Children = req.Children[:2]
		s.expectUnforked(t, req)
	}},
	{"what is not there or stands still cannot be forked", needsFork, func(t *testing.T, b *bench) {
		s := b.start(t)
		req := s.forkRequest(1)
		req.Parent = "sb-never"
		expectKind(t, b.tryFork(t, req), fault.NotFound)
		req = s.forkRequest(1)
		req.Kernel = "never"
		expectKind(t, b.tryFork(t, req), fault.Conflict)
		if b.Driver.Caps().Pause {
			s.pause(t)
			expectKind(t, b.tryFork(t, s.forkRequest(1)), fault.Conflict)
			s.resume(t)
		}
		s.expectUnforked(t, req)
	}},
	{"forks of one parent at once all succeed", needsFork, func(t *testing.T, b *bench) {
		s := b.start(t)
		s.cell(t, "x = 7")
		var wg sync.WaitGroup
		for range 4 {
			req := s.forkRequest(1)
			t.Cleanup(func() { b.Driver.Stop(context.Background(), req.Children[0].ID, sandbox.CauseKilled) })
			wg.Go(func() {
				if _, err := b.Driver.Fork(t.Context(), req); err != nil {
					t.Error(err)
					return
				}
				stream, err := b.open(req.Children[0].ID).Run(t.Context(), agentapi.RunParams{Code: "print(x)"})
				if err != nil {
					t.Error(err)
					return
				}
				var said []byte
				for e, err := range stream.Events() {
					if err != nil {
						t.Error(err)
						return
					}
					if e.Type == agentapi.EventStdout {
						said = append(said, e.Data...)
					}
				}
				if string(said) != "7\n" {
					t.Errorf("a copy says %q", said)
				}
			})
		}
		wg.Wait()
	}},
}
