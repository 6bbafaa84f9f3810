package sandbox_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// run collects the types of a run's events.
func (w *world) run(id string, params agentapi.RunParams) (types []agentapi.EventType, err error) {
	for event, err := range w.Run(w.t.Context(), acme, id, params) {
		if err != nil {
			return types, err
		}
		types = append(types, event.Type)
	}
	return types, nil
}

var plain = []agentapi.EventType{agentapi.EventStarted, agentapi.EventStdout, agentapi.EventEnd}

func wantTypes(t *testing.T, got []agentapi.EventType, err error, want ...agentapi.EventType) {
	t.Helper()
	if err != nil || !slices.Equal(got, want) {
		t.Fatalf("events are %v, %v; want %v", got, err, want)
	}
}

func TestRun(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a cell's events pass as they are": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			got, err := w.run(id, agentapi.RunParams{Code: "1+1"})
			wantTypes(t, got, err, plain...)
			if !slices.Equal(w.observer.outcomes, []agentapi.Outcome{agentapi.OutcomeOK}) || w.observer.runs != 1 {
				t.Fatalf("observed %v", w.observer.outcomes)
			}
		},
		"a kernel that is gone is replaced, with a notice": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			if _, err := w.run(id, agentapi.RunParams{Code: "die"}); err != nil {
				t.Fatal(err)
			}
			got, err := w.run(id, agentapi.RunParams{Code: "1+1"})
			wantTypes(t, got, err, append([]agentapi.EventType{agentapi.EventNotice}, plain...)...)
			if w.driver.count("kernel") != 0 || w.driver.count("op kernel_start") != 1 {
				t.Fatal("a driver without warm kernels was asked for one")
			}
			got, err = w.run(id, agentapi.RunParams{Code: "1+1"})
			wantTypes(t, got, err, plain...)
		},
		"where there never was a kernel nothing is said to be lost": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.driver.mu.Lock()
			clear(w.driver.boxes[id].kernels)
			w.driver.mu.Unlock()
			got, err := w.run(id, agentapi.RunParams{Code: "1+1"})
			wantTypes(t, got, err, plain...)
		},
		"a warm kernel comes from the driver": func(t *testing.T, w *world) {
			w.driver.caps.WarmKernels = true
			id := w.create(sandbox.Spec{}).ID
			if _, err := w.run(id, agentapi.RunParams{Code: "die"}); err != nil {
				t.Fatal(err)
			}
			if _, err := w.run(id, agentapi.RunParams{Code: "1+1"}); err != nil {
				t.Fatal(err)
			}
			if w.driver.count("kernel") != 1 || w.driver.count("op kernel_start") != 0 {
				t.Fatal("the kernel came from elsewhere")
			}
		},
		"where the template has no zygote the agent starts the kernel": func(t *testing.T, w *world) {
			w.driver.caps.WarmKernels = true
			w.driver.failWith(failing("kernel", 9, fault.New(fault.Unsupported, "no zygote")))
			id := w.create(sandbox.Spec{}).ID
			if _, err := w.run(id, agentapi.RunParams{Code: "die"}); err != nil {
				t.Fatal(err)
			}
			if _, err := w.run(id, agentapi.RunParams{Code: "1+1"}); err != nil {
				t.Fatal(err)
			}
		},
		"many runs on a gone kernel replace it once": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			if _, err := w.run(id, agentapi.RunParams{Code: "die"}); err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			for range 10 {
				wg.Go(func() {
					if _, err := w.run(id, agentapi.RunParams{Code: "1+1"}); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			if n := w.driver.count("op kernel_start"); n != 1 {
				t.Fatalf("%d kernels were made, want 1", n)
			}
		},
		"a kernel that cannot be replaced is told": func(t *testing.T, w *world) {
			w.driver.caps.WarmKernels = true
			w.driver.failWith(failing("kernel", 9, errBoom))
			id := w.create(sandbox.Spec{}).ID
			if _, err := w.run(id, agentapi.RunParams{Code: "die"}); err != nil {
				t.Fatal(err)
			}
			if _, err := w.run(id, agentapi.RunParams{Code: "1+1"}); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
		},
		"an unknown kernel is not found": func(t *testing.T, w *world) {
			_, err := w.run(w.create(sandbox.Spec{}).ID, agentapi.RunParams{Kernel: "other", Code: "1"})
			wantKind(t, err, fault.NotFound)
		},
		"a wrong request is invalid and is no run": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			for _, p := range []agentapi.RunParams{
				{Code: strings.Repeat("x", sandbox.MaxCode+1)}, {Kernel: "../x"}, {Kernel: strings.Repeat("k", 65)}, {TimeoutMS: -1}, {Disconnect: "maybe"},
				{Env: map[string]string{"": "x"}}, {Env: map[string]string{"A=B": "x"}}, {Env: map[string]string{"A": "x\x00"}}, {Cwd: "/a\x00b"},
			} {
				_, err := w.run(id, p)
				wantKind(t, err, fault.Invalid)
			}
			for _, p := range []agentapi.ExecParams{{}, {Argv: []string{""}}, {Argv: []string{"a"}, TimeoutMS: -1}, {Argv: []string{"a"}, Disconnect: "maybe"}} {
				_, err := w.Exec(t.Context(), acme, id, p)
				wantKind(t, err, fault.Invalid)
			}
			if w.observer.runs != 0 {
				t.Fatalf("observed %d runs", w.observer.runs)
			}
		},
		"a run in a sandbox that ends tells why it ended": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			time.AfterFunc(time.Second, func() {
				w.driver.die(sandbox.Ended{ID: id, Cause: sandbox.CauseOOM, Message: "python3 (pid 17)", At: time.Now()})
			})
			_, err := w.run(id, agentapi.RunParams{Code: "hang"})
			if wantKind(t, err, fault.Gone); !strings.Contains(fault.Message(err), "pid 17") {
				t.Fatalf("the sentence is %q", fault.Message(err))
			}
		},
		"a command's outcome is observed, and that its caller left": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			for _, program := range []string{"true", "false", "sleep"} {
				stream, err := w.Exec(t.Context(), acme, id, agentapi.ExecParams{Argv: []string{program}})
				if err != nil {
					t.Fatal(err)
				}
				for range stream.Events() {
					if program == "sleep" {
						break
					}
				}
			}
			want := []agentapi.Outcome{agentapi.OutcomeOK, agentapi.OutcomeError, ""}
			if !slices.Equal(w.observer.outcomes, want) || w.observer.runs != 3 {
				t.Fatalf("observed %q", w.observer.outcomes)
			}
		},
		"a command's broken stream can be explained": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			stream, err := w.Exec(t.Context(), acme, id, agentapi.ExecParams{Argv: []string{"sleep"}})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			var broke error
			for _, err := range stream.Events() {
				broke = err
			}
			wantKind(t, w.Explain(t.Context(), acme, id, broke), fault.Gone)
			if err := w.Explain(t.Context(), acme, id, errBoom); err != errBoom {
				t.Fatalf("another error became %v", err)
			}
		},
		"a late store is told without a wait": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			hangs := fault.Wrap(fault.Unavailable, sandbox.ErrStoreLate, "the database does not answer")
			w.store.failWith(failing("save running", 1, hangs))
			asked := time.Now()
			_, err := w.SetLifetime(t.Context(), acme, id, time.Minute)
			err = w.Explain(t.Context(), acme, id, err)
			wantKind(t, err, fault.Unavailable)
			if took := time.Since(asked); took != 0 || !errors.Is(err, hangs) {
				t.Fatalf("told %v after %v more than the store took", err, took)
			}
		},
		"a caller who leaves ends the stream and its use": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{IdleTimeout: time.Minute}).ID
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			var last error
			for _, err := range w.Run(ctx, acme, id, agentapi.RunParams{Code: "hang"}) {
				last = err
			}
			wantKind(t, last, fault.Timeout)
			for range w.Run(t.Context(), acme, id, agentapi.RunParams{Code: "hang"}) {
				break
			}
			sleep(time.Minute)
			w.wantEnded(id, sandbox.CauseIdle)
		},
		"a dial that fails is not the sandbox's end": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{IdleTimeout: time.Minute}).ID
			w.driver.failWith(failing("dial", 1, fault.New(fault.NotFound, "no socket")))
			_, err := w.run(id, agentapi.RunParams{Code: "1"})
			wantKind(t, err, fault.Unavailable)
			got, err := w.run(id, agentapi.RunParams{Code: "1"})
			wantTypes(t, got, err, plain...)
			sleep(time.Minute)
			w.wantEnded(id, sandbox.CauseIdle)
		},
		"a run in an ended sandbox is gone, in an unknown one not found": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			_, err := w.run(id, agentapi.RunParams{Code: "1"})
			wantKind(t, err, fault.Gone)
			_, err = w.run("sbnone", agentapi.RunParams{Code: "1"})
			wantKind(t, err, fault.NotFound)
			_, err = w.Exec(t.Context(), acme, id, agentapi.ExecParams{Argv: []string{"true"}})
			wantKind(t, err, fault.Gone)
		},
	})
}

func TestKernels(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a kernel is started once, restarted and stopped": func(t *testing.T, w *world) {
			w.driver.caps.WarmKernels = true
			id := w.create(sandbox.Spec{}).ID
			k, err := w.StartKernel(t.Context(), acme, id, sandbox.KernelSpec{Name: "second"})
			if err != nil || !k.Warm {
				t.Fatalf("%+v, %v", k, err)
			}
			_, err = w.StartKernel(t.Context(), acme, id, sandbox.KernelSpec{Name: "second"})
			wantKind(t, err, fault.Conflict)
			if _, err := w.RestartKernel(t.Context(), acme, id, "second"); err != nil {
				t.Fatal(err)
			}
			if err := w.StopKernel(t.Context(), acme, id, "second"); err != nil {
				t.Fatal(err)
			}
			wantKind(t, w.StopKernel(t.Context(), acme, id, "second"), fault.NotFound)
			_, err = w.RestartKernel(t.Context(), acme, id, "second")
			wantKind(t, err, fault.NotFound)
		},
		"a warm kernel with its own directory is born and then moved": func(t *testing.T, w *world) {
			w.driver.caps.WarmKernels = true
			k, err := w.StartKernel(t.Context(), acme, w.create(sandbox.Spec{}).ID, sandbox.KernelSpec{Name: "second", Cwd: "/tmp"})
			if err != nil || k.Cwd != "/tmp" || w.driver.count("kernel") != 1 || w.driver.count("op run") != 1 {
				t.Fatalf("%+v, %v", k, err)
			}
		},
		"a kernel that dies at once is told": func(t *testing.T, w *world) {
			w.driver.caps.WarmKernels = true
			id := w.create(sandbox.Spec{}).ID
			w.driver.failWith(func(op string, _ int) error {
				if op == "op kernel_wait" {
					w.driver.setKernel(id, agentapi.Kernel{Name: "second", State: agentapi.KernelDead, Message: "no module named site"})
				}
				return nil
			})
			_, err := w.StartKernel(t.Context(), acme, id, sandbox.KernelSpec{Name: "second"})
			if wantKind(t, err, fault.Unavailable); !strings.Contains(fault.Message(err), "no module named site") {
				t.Fatalf("the sentence is %q", fault.Message(err))
			}
		},
		"a kernel without a name gets one that nobody has": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			one, err := w.StartKernel(t.Context(), acme, id, sandbox.KernelSpec{})
			if err != nil || !strings.HasPrefix(one.Name, "kernel-") || one.Language != "python" {
				t.Fatalf("%+v, %v", one, err)
			}
			if two, err := w.StartKernel(t.Context(), acme, id, sandbox.KernelSpec{Language: "python"}); err != nil || two.Name == one.Name {
				t.Fatalf("%+v, %v", two, err)
			}
		},
		"a kernel of another language is the agent's to start, and to start again": func(t *testing.T, w *world) {
			w.driver.caps.WarmKernels = true
			id := w.create(sandbox.Spec{}).ID
			k, err := w.StartKernel(t.Context(), acme, id, sandbox.KernelSpec{Name: "js", Language: "javascript", Cwd: "/tmp"})
			if err != nil || k.Language != "javascript" {
				t.Fatalf("%+v, %v", k, err)
			}
			if k, err = w.RestartKernel(t.Context(), acme, id, "js"); err != nil || k.Language != "javascript" || k.Cwd != "/tmp" {
				t.Fatalf("%+v, %v", k, err)
			}
			w.driver.setKernel(id, agentapi.Kernel{Name: "js", Language: "javascript", Cwd: "/tmp", State: agentapi.KernelDead})
			for _, err := range w.Run(t.Context(), acme, id, agentapi.RunParams{Kernel: "js", Code: "1"}) {
				if err != nil {
					t.Fatal(err)
				}
			}
			if w.driver.count("op kernel_start") != 3 || w.driver.count("kernel") != 0 {
				t.Fatalf("the agent started %d, the driver %d", w.driver.count("op kernel_start"), w.driver.count("kernel"))
			}
		},
		"a caller who leaves leaves no kernel": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			for _, c := range []struct {
				at   string
				warm bool
			}{{"op kernel_start", false}, {"op kernel_wait", false}, {"kernel", true}, {"op kernel_wait", true}, {"op run", true}} {
				w.driver.caps.WarmKernels = c.warm
				ctx := w.leavesAt(c.at)
				_, err := w.StartKernel(ctx, acme, id, sandbox.KernelSpec{Cwd: "/tmp"})
				if ctx.Err() == nil || err == nil {
					t.Fatalf("%+v: the caller did not leave: %v", c, err)
				}
				if names := w.driver.kernelNames(id); !slices.Equal(names, []string{agentapi.DefaultKernel}) {
					t.Errorf("%+v: there are %v", c, names)
				}
			}
		},
		"a caller who leaves a kernel that is replaced leaves it to others": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			if _, err := w.run(id, agentapi.RunParams{Code: "die"}); err != nil {
				t.Fatal(err)
			}
			for _, err := range w.Run(w.leavesAt("op kernel_wait"), acme, id, agentapi.RunParams{Code: "1"}) {
				if err == nil {
					t.Fatal("the caller did not leave")
				}
			}
			w.driver.failWith(nil)
			got, err := w.run(id, agentapi.RunParams{Code: "1"})
			wantTypes(t, got, err, plain...)
		},
		"a wrong name is invalid": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			_, err := w.StartKernel(t.Context(), acme, id, sandbox.KernelSpec{Name: "a b"})
			wantKind(t, err, fault.Invalid)
			wantKind(t, w.StopKernel(t.Context(), acme, id, ""), fault.Invalid)
		},
	})
}

// leavesAt is the context of a caller who leaves while the driver, or the agent, does an operation.
func (w *world) leavesAt(operation string) context.Context {
	ctx, leave := context.WithCancel(w.t.Context())
	w.t.Cleanup(leave)
	w.driver.failWith(func(op string, _ int) error {
		if op == operation {
			leave()
			time.Sleep(time.Second) // until everybody has noticed
		}
		return nil
	})
	return ctx
}

func (d *fakeDriver) kernelNames(id string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Sorted(maps.Keys(d.boxes[id].kernels))
}

func TestMany(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"creates, runs, changes, kills and deaths at once leave one end each": func(t *testing.T, w *world) {
			var wg sync.WaitGroup
			for i := range 40 {
				wg.Go(func() {
					sb, _, err := w.Create(t.Context(), acme, sandbox.Spec{Lifetime: time.Minute, IdleTimeout: time.Minute})
					if err != nil {
						t.Error(err)
						return
					}
					var each sync.WaitGroup
					each.Go(func() { _, _ = w.run(sb.ID, agentapi.RunParams{Code: "1"}) })
					each.Go(func() { _, _ = w.SetLifetime(t.Context(), acme, sb.ID, time.Duration(i)*time.Second) })
					if i%2 == 0 {
						each.Go(func() { _, _ = w.Kill(t.Context(), acme, sb.ID) })
					}
					if i%3 == 0 {
						each.Go(func() { w.driver.dieIfLiving(sandbox.Ended{ID: sb.ID, Cause: sandbox.CauseOOM, At: time.Now()}) })
					}
					each.Wait()
				})
			}
			wg.Wait()
			sleep(2 * time.Minute)
			synctest.Wait()
			for _, sb := range w.all() {
				w.wantEnded(sb.ID, w.get(sb.ID).Cause)
				if w.observer.ended[sb.ID] != 1 {
					t.Errorf("observed %d ends of %s", w.observer.ended[sb.ID], sb.ID)
				}
			}
			if w.driver.size() != 0 || w.driver.remembered() != 0 {
				t.Errorf("%d live and %d remembered, want none", w.driver.size(), w.driver.remembered())
			}
		},
	})
}
