package sandbox_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// forkSlowly begins a fork, and gives its copy when that can be found running while the fork still sets its deadline.
func (w *world) forkSlowly() (child string, forked <-chan error) {
	w.t.Helper()
	parent := w.create(sandbox.Spec{}).ID
	w.driver.failWith(func(op string, n int) error {
		if op == "change" && n == 1 {
			time.Sleep(time.Second)
		}
		return nil
	})
	done := make(chan error, 1)
	go func() {
		_, err := w.Fork(w.t.Context(), acme, parent, sandbox.ForkSpec{Count: 1, Lifetime: time.Minute})
		done <- err
	}()
	sleep(time.Second / 2)
	page, err := w.List(w.t.Context(), acme, sandbox.ListQuery{States: []sandbox.State{sandbox.StateRunning}})
	if err != nil || len(page.Items) != 2 {
		w.t.Fatalf("%d run, %v", len(page.Items), err)
	}
	for _, sb := range page.Items {
		if sb.ID != parent {
			child = sb.ID
		}
	}
	return child, done
}

func (w *world) fork(id string, spec sandbox.ForkSpec) sandbox.ForkResult {
	w.t.Helper()
	result, err := w.Fork(w.t.Context(), acme, id, spec)
	if err != nil {
		w.t.Fatal(err)
	}
	return result
}

// children are the copies of a sandbox that have a row.
func (w *world) children(parent string) (list []sandbox.Sandbox) {
	w.t.Helper()
	for _, sb := range w.all() {
		if sb.ForkedFrom == parent {
			list = append(list, sb)
		}
	}
	return list
}

// wantUnforked checks that a fork came to nothing: the parent runs on alone, and n rows tell of starts that failed.
func (w *world) wantUnforked(parent string, n int) {
	w.t.Helper()
	synctest.Wait()
	w.wantRunning(parent)
	children := w.children(parent)
	if len(children) != n || w.driver.size() != 1 {
		w.t.Fatalf("%d rows and %d sandboxes at the driver, want %d and 1", len(children), w.driver.size(), n)
	}
	for _, sb := range children {
		w.wantEnded(sb.ID, sandbox.CauseStartFail)
	}
	if slices.Contains(w.events(sandbox.EventQuery{Sandbox: parent}), sandbox.LifecycleForked) {
		w.t.Fatal("the parent is told to be forked")
	}
}

func TestFork(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a copy is like its parent, and its own": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{
				Template: "base", Key: "k", Lifetime: time.Hour, IdleTimeout: time.Minute, IdleAction: sandbox.IdlePause, AutoResume: true,
				Limits: template.Limits{CPUs: 0.5}, Metadata: map[string]string{"a": "b"}, Env: map[string]string{"SECRET": "1"},
				Network: &policy.Network{Mode: policy.Internet}, Storage: sandbox.StorageTmpfs,
				ResumeLifetime: time.Hour, ColdPause: true, Annotations: map[string]string{"the": "parent's"},
			})
			if _, err := w.SetNetwork(t.Context(), acme, parent.ID, policy.Network{Mode: policy.None}); err != nil {
				t.Fatal(err)
			}
			sleep(time.Second)
			got := w.fork(parent.ID, sandbox.ForkSpec{
				Count: 2, Kernel: "other", Metadata: map[string]string{"branch": "1"}, Env: map[string]string{"A": "1"}, InheritEnv: true,
				IDEnv: "ID", Annotations: map[string]string{"the": "child's"},
			})
			if diff := cmp.Diff(forked, got.Forked); diff != "" {
				t.Fatal(diff)
			}
			req := sandbox.ForkRequest{Parent: parent.ID, Kernel: "other"}
			for _, child := range got.Sandboxes {
				want := sandbox.Sandbox{
					ID: child.ID, Tenant: "acme", Template: "base", TemplateDigest: "sha256:base", State: sandbox.StateRunning, ForkedFrom: parent.ID,
					CreatedAt: time.Now().UTC(), StartedAt: time.Now().UTC(), LastUsed: time.Now().UTC(), Deadline: time.Now().Add(300 * time.Second).UTC(),
					IdleTimeout: time.Minute, IdleAction: sandbox.IdlePause, AutoResume: true, Limits: parent.Limits,
					Metadata: map[string]string{"branch": "1"}, Network: policy.Network{Mode: policy.None}, Storage: sandbox.StorageTmpfs,
					DeadlineAction: sandbox.IdleKill, ResumeLifetime: time.Hour, ColdPause: true,
					Annotations: map[string]string{"the": "child's"},
				}
				if diff := cmp.Diff(want, child); diff != "" {
					t.Fatal(diff)
				}
				if diff := cmp.Diff(want, w.wantRunning(child.ID)); diff != "" {
					t.Fatal(diff)
				}
				req.Children = append(req.Children, sandbox.ForkChild{
					ID: child.ID, Limits: parent.Limits, Network: want.Network, Deadline: want.Deadline.Add(30 * time.Second),
					Env: map[string]string{"A": "1", "ID": child.ID}, InheritEnv: true,
				})
				if !w.driver.deadline(child.ID).Equal(want.Deadline) {
					t.Fatalf("the driver ends it at %v", w.driver.deadline(child.ID))
				}
			}
			if diff := cmp.Diff([]sandbox.ForkRequest{req}, w.driver.forks); diff != "" || len(got.Sandboxes) != 2 {
				t.Fatal(diff)
			}
			if got, err := w.run(got.Sandboxes[0].ID, agentapi.RunParams{Code: "1"}); err != nil || !slices.Equal(got, plain) {
				t.Fatalf("%v, %v", got, err)
			}
		},
		"a fork is told on both sides": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			got := w.fork(parent, sandbox.ForkSpec{Count: 2})
			a, b := got.Sandboxes[0].ID, got.Sandboxes[1].ID
			type line struct {
				id      string
				kind    sandbox.LifecycleType
				message string
			}
			var lines []line
			for e, err := range w.Events(t.Context(), acme, sandbox.EventQuery{}) {
				if err != nil {
					t.Fatal(err)
				}
				lines = append(lines, line{e.Sandbox, e.Type, e.Message})
			}
			want := []line{
				{parent, sandbox.LifecycleCreated, ""}, {parent, sandbox.LifecycleStarted, ""},
				{a, sandbox.LifecycleCreated, ""}, {b, sandbox.LifecycleCreated, ""},
				{a, sandbox.LifecycleForked, parent}, {a, sandbox.LifecycleStarted, ""},
				{b, sandbox.LifecycleForked, parent}, {b, sandbox.LifecycleStarted, ""},
				{parent, sandbox.LifecycleForked, a + ", " + b},
			}
			if !slices.Equal(lines, want) {
				t.Fatalf("events are %v", lines)
			}
			if !slices.Equal(w.observer.forked, []told{{2, ""}}) || w.observer.created != 3 {
				t.Fatalf("observed %v and %d creates", w.observer.forked, w.observer.created)
			}
		},
		"a copy has the lifetime that was asked for": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{Lifetime: time.Minute}).ID
			child := w.fork(parent, sandbox.ForkSpec{Count: 1, Lifetime: time.Hour}).Sandboxes[0]
			wantDeadline(t, child, time.Hour)
			sleep(time.Minute)
			w.wantEnded(parent, sandbox.CauseExpired)
			w.wantRunning(child.ID)
			sleep(59 * time.Minute)
			w.wantEnded(child.ID, sandbox.CauseExpired)
		},
		"a copy lives from when it is made, however long that takes": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{Lifetime: time.Hour}).ID
			w.driver.onFork = func(context.Context, sandbox.ForkRequest) error { time.Sleep(20 * time.Minute); return nil }
			child := w.fork(parent, sandbox.ForkSpec{Count: 1, Wait: time.Hour, Lifetime: time.Minute}).Sandboxes[0]
			wantDeadline(t, child, time.Minute)
			sleep(59 * time.Second)
			w.wantRunning(child.ID)
			sleep(time.Second)
			w.wantEnded(child.ID, sandbox.CauseExpired)
		},
		"a copy without a deadline has none": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			child := w.fork(parent, sandbox.ForkSpec{Count: 1, Lifetime: -1}).Sandboxes[0]
			if !child.Deadline.IsZero() || !w.driver.deadline(child.ID).IsZero() {
				t.Fatalf("%v and %v", child.Deadline, w.driver.deadline(child.ID))
			}
		},
		"a copy whose deadline cannot be set ends the fork": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			w.driver.failWith(func(op string, n int) error {
				if op == "change" && n == 2 {
					return errBoom
				}
				return nil
			})
			if _, err := w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 3}); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
			w.wantUnforked(parent, 3)
		},
		"whoever finds a copy running changes its deadline after the fork has set it": func(t *testing.T, w *world) {
			child, forked := w.forkSlowly()
			changed, err := w.SetLifetime(t.Context(), acme, child, time.Hour)
			if err := errors.Join(err, <-forked); err != nil {
				t.Fatal(err)
			}
			if at := w.driver.deadline(child); !at.Equal(changed.Deadline) || time.Until(at) < 59*time.Minute {
				t.Fatalf("the driver ends it in %v, its row says %v", time.Until(at), time.Until(changed.Deadline))
			}
		},
		"whoever finds a copy running can end it": func(t *testing.T, w *world) {
			child, forked := w.forkSlowly()
			ended, err := w.Kill(t.Context(), acme, child)
			if err := errors.Join(err, <-forked); err != nil {
				t.Fatal(err)
			}
			if ended.State != sandbox.StateEnded || w.driver.has(child) {
				t.Fatalf("it is %s, and lives in the driver: %v", ended.State, w.driver.has(child))
			}
		},
		"a copy ends when whoever found it running wants it to and leaves": func(t *testing.T, w *world) {
			child, forked := w.forkSlowly()
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			if _, err := w.Kill(ctx, acme, child); err == nil {
				t.Fatal("it ended at once")
			}
			if err := <-forked; err != nil {
				t.Fatal(err)
			}
			sleep(10 * time.Second)
			if w.driver.has(child) {
				t.Fatal("it still lives in the driver")
			}
		},
		"a copy can be copied after its parent's end": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			child := w.fork(parent, sandbox.ForkSpec{Count: 1}).Sandboxes[0].ID
			if _, err := w.Kill(t.Context(), acme, parent); err != nil {
				t.Fatal(err)
			}
			grandchild := w.fork(child, sandbox.ForkSpec{Count: 1}).Sandboxes[0]
			if grandchild.ForkedFrom != child {
				t.Fatalf("it is forked from %s", grandchild.ForkedFrom)
			}
			w.wantRunning(grandchild.ID)
		},
		"a copy that is adopted still knows its parent": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			child := w.fork(parent, sandbox.ForkSpec{Count: 1}).Sandboxes[0]
			w.restart()
			if sb := w.wantRunning(child.ID); sb.ForkedFrom != parent {
				t.Fatalf("it is forked from %q", sb.ForkedFrom)
			}
		},
		"what cannot be forked says why": func(t *testing.T, w *world) {
			one := sandbox.ForkSpec{Count: 1}
			paused := w.create(sandbox.Spec{AutoResume: true}).ID
			w.pause(paused, sandbox.PauseSpec{})
			_, err := w.Fork(t.Context(), acme, paused, one)
			if wantKind(t, err, fault.Conflict); !strings.Contains(fault.Message(err), "paused; resume it first") {
				t.Fatalf("the sentence is %q", fault.Message(err))
			}
			w.wantPaused(paused)
			ended := w.create(sandbox.Spec{}).ID
			if _, err := w.Kill(t.Context(), acme, ended); err != nil {
				t.Fatal(err)
			}
			_, err = w.Fork(t.Context(), acme, ended, one)
			wantKind(t, err, fault.Gone)
			foreign := w.create(sandbox.Spec{}).ID
			_, err = w.Fork(t.Context(), globex, foreign, one)
			wantKind(t, err, fault.NotFound)
			_, err = w.Fork(t.Context(), acme, "sbnone", one)
			wantKind(t, err, fault.NotFound)
			w.driver.caps.Fork = false
			_, err = w.Fork(t.Context(), acme, foreign, one)
			wantKind(t, err, fault.Unsupported)
			if w.driver.count("fork") != 0 || len(w.all()) != 3 {
				t.Fatal("a refused fork reached store or driver")
			}
		},
		"what is still starting or is ending cannot be forked": func(t *testing.T, w *world) {
			w.driver.onStart = func(ctx context.Context, _ sandbox.StartRequest) error { time.Sleep(time.Second); return nil }
			w.driver.onStop = func(string) { time.Sleep(time.Second) }
			var wg sync.WaitGroup
			wg.Go(func() { _, _, _ = w.Create(t.Context(), acme, sandbox.Spec{}) })
			time.Sleep(time.Second / 2)
			id := w.all()[0].ID
			_, err := w.Fork(t.Context(), acme, id, sandbox.ForkSpec{Count: 1})
			wantKind(t, err, fault.Conflict)
			wg.Wait()
			wg.Go(func() { _, _ = w.Kill(t.Context(), acme, id) })
			synctest.Wait()
			_, err = w.Fork(t.Context(), acme, id, sandbox.ForkSpec{Count: 1})
			wantKind(t, err, fault.Gone)
			wg.Wait()
		},
		"a fork that the driver refuses leaves nothing": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			w.driver.failWith(failing("fork", 1, fault.New(fault.Conflict, "kernel default is busy")))
			_, err := w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 3, Refuse: true})
			if wantKind(t, err, fault.Conflict); fault.Message(err) != "kernel default is busy" {
				t.Fatalf("the sentence is %q", fault.Message(err))
			}
			w.wantUnforked(parent, 3)
			if sb := w.children(parent)[0]; sb.CauseMessage != "kernel default is busy" {
				t.Fatalf("the row says %q", sb.CauseMessage)
			}
			if !slices.Equal(w.observer.forked, []told{{3, fault.Conflict}}) || w.observer.created != 1 {
				t.Fatalf("observed %v and %d creates", w.observer.forked, w.observer.created)
			}
			w.fork(parent, sandbox.ForkSpec{Count: 3})
		},
		"a fork of which one row cannot be written leaves nothing": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			w.store.failWith(func(op string, n int) error {
				if op == "insert" && n == 3 { // the first is the parent
					return errBoom
				}
				return nil
			})
			if _, err := w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 3}); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
			w.wantUnforked(parent, 0)
		},
		"a fork whose start cannot be recorded leaves nothing": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			w.store.failWith(func(op string, n int) error {
				if op == "save running" && n == 3 { // the first is the parent
					return errBoom
				}
				return nil
			})
			if _, err := w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 3}); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
			w.wantUnforked(parent, 3)
		},
		"a caller who leaves leaves nothing": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			for name, hook := range map[string]func(context.Context, sandbox.ForkRequest) error{
				"the driver gives up":   func(ctx context.Context, _ sandbox.ForkRequest) error { <-ctx.Done(); return ctx.Err() },
				"the driver was faster": func(ctx context.Context, _ sandbox.ForkRequest) error { <-ctx.Done(); return nil },
			} {
				w.driver.onFork = hook
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(time.Second, cancel)
				_, err := w.Fork(ctx, acme, parent, sandbox.ForkSpec{Count: 2})
				if wantKind(t, err, fault.Unavailable); !errors.Is(err, context.Canceled) {
					t.Fatalf("%s: %v", name, err)
				}
			}
			w.wantUnforked(parent, 4)
			if sb := w.children(parent)[0]; sb.CauseMessage != "its caller left while it was starting" {
				t.Fatalf("the row says %q", sb.CauseMessage)
			}
		},
		"a busy kernel is waited for as long as was said": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{Lifetime: time.Hour, IdleTimeout: time.Second}).ID
			w.driver.onFork = func(ctx context.Context, _ sandbox.ForkRequest) error { <-ctx.Done(); return ctx.Err() }
			for wait, want := range map[time.Duration]time.Duration{0: 30 * time.Second, time.Minute: time.Minute} {
				begun := time.Now()
				_, err := w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 1, Wait: wait})
				if wantKind(t, err, fault.Timeout); time.Since(begun) != want {
					t.Fatalf("it took %v, want %v", time.Since(begun), want)
				}
			}
			w.wantUnforked(parent, 2)
		},
		"a fork that waits for nobody is bounded as a start is": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{Lifetime: time.Hour}).ID
			w.driver.onFork = func(ctx context.Context, req sandbox.ForkRequest) error {
				if !req.Refuse {
					t.Error("the driver waits for the kernel")
				}
				<-ctx.Done()
				return ctx.Err()
			}
			begun := time.Now()
			_, err := w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 1, Refuse: true})
			if wantKind(t, err, fault.Unavailable); time.Since(begun) != time.Minute {
				t.Fatalf("it took %v", time.Since(begun))
			}
			w.wantUnforked(parent, 1)
		},
		"a parent that ends meanwhile is gone": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			w.driver.onFork = func(context.Context, sandbox.ForkRequest) error {
				w.driver.die(sandbox.Ended{ID: parent, Cause: sandbox.CauseOOM, At: time.Now()})
				return nil // and the double finds no parent
			}
			_, err := w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 2})
			if wantKind(t, err, fault.Gone); !strings.Contains(fault.Message(err), "oom") {
				t.Fatalf("the sentence is %q", fault.Message(err))
			}
			for _, sb := range w.children(parent) {
				w.wantEnded(sb.ID, sandbox.CauseStartFail)
			}
			if w.driver.size() != 0 {
				t.Fatal("something is left")
			}
		},
		"a copy that is killed while it is made ends the fork": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			var wg sync.WaitGroup
			var killed string
			w.driver.onFork = func(ctx context.Context, req sandbox.ForkRequest) error {
				killed = req.Children[1].ID
				wg.Go(func() {
					if sb, err := w.Kill(t.Context(), acme, killed); err != nil || sb.Cause != sandbox.CauseKilled {
						t.Errorf("%+v, %v", sb, err)
					}
				})
				<-ctx.Done()
				return ctx.Err()
			}
			_, err := w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 3})
			wg.Wait()
			wantKind(t, err, fault.Conflict)
			for _, child := range w.children(parent) {
				cause := sandbox.CauseStartFail
				if child.ID == killed {
					cause = sandbox.CauseKilled
				}
				w.wantEnded(child.ID, cause)
			}
			w.wantRunning(parent)
		},
		"a server that stops ends its forks": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			w.driver.onFork = func(ctx context.Context, _ sandbox.ForkRequest) error { <-ctx.Done(); return ctx.Err() }
			failed := make(chan error, 1)
			go func() {
				_, err := w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 2})
				failed <- err
			}()
			synctest.Wait()
			w.restart()
			wantKind(t, <-failed, fault.Unavailable)
			w.wantUnforked(parent, 2)
		},
		"a parent that is being forked cannot be paused": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			w.driver.onFork = func(context.Context, sandbox.ForkRequest) error { time.Sleep(time.Second); return nil }
			done := make(chan error, 1)
			go func() {
				_, err := w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 1})
				done <- err
			}()
			synctest.Wait()
			_, err := w.Pause(t.Context(), acme, parent, sandbox.PauseSpec{})
			if wantKind(t, err, fault.Conflict); !strings.Contains(fault.Message(err), "being forked") {
				t.Fatalf("the sentence is %q", fault.Message(err))
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			w.pause(parent, sandbox.PauseSpec{})
		},
		"a parent that is being forked is in use": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{Lifetime: time.Hour, IdleTimeout: time.Second}).ID
			w.driver.onFork = func(context.Context, sandbox.ForkRequest) error { time.Sleep(20 * time.Second); return nil }
			w.fork(parent, sandbox.ForkSpec{Count: 1})
			w.wantRunning(parent)
			sleep(time.Second)
			w.wantEnded(parent, sandbox.CauseIdle)
		},
	})
}

func TestForkOfBadRequest(t *testing.T) {
	for name, c := range map[string]struct {
		spec sandbox.ForkSpec
		says string
	}{
		"none":               {sandbox.ForkSpec{}, "1 to 100"},
		"fewer than none":    {sandbox.ForkSpec{Count: -1}, "not -1"},
		"too many":           {sandbox.ForkSpec{Count: 101}, "not 101"},
		"a bad kernel":       {sandbox.ForkSpec{Count: 1, Kernel: "../x"}, "kernel name"},
		"a negative wait":    {sandbox.ForkSpec{Count: 1, Wait: -1}, "waits"},
		"too long a wait":    {sandbox.ForkSpec{Count: 1, Wait: 2 * time.Hour}, "1h0m0s"},
		"too long a life":    {sandbox.ForkSpec{Count: 1, Lifetime: 2 * time.Hour}, "longer than"},
		"a bad variable":     {sandbox.ForkSpec{Count: 1, Env: map[string]string{"A B": ""}}, "environment variable"},
		"a bad metadata key": {sandbox.ForkSpec{Count: 1, Metadata: map[string]string{"": ""}}, "empty key"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, sandbox.Config{MaxLifetime: time.Hour})
				parent := w.create(sandbox.Spec{}).ID
				_, err := w.Fork(t.Context(), acme, parent, c.spec)
				if wantKind(t, err, fault.Invalid); !strings.Contains(fault.Message(err), c.says) {
					t.Fatalf("the sentence is %q", fault.Message(err))
				}
				if w.store.count("insert") != 1 || w.driver.count("fork") != 0 {
					t.Fatal("a refused fork reached store or driver")
				}
			})
		})
	}
}

func TestForkAdmission(t *testing.T) {
	claims(t, sandbox.Config{MaxPerTenant: 4}, map[string]func(*testing.T, *world){
		"every copy counts": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			_, err := w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 4})
			if wantKind(t, err, fault.Exhausted); !strings.Contains(fault.Message(err), "no room for 4 more") {
				t.Fatalf("the sentence is %q", fault.Message(err))
			}
			w.wantUnforked(parent, 0)
			children := w.fork(parent, sandbox.ForkSpec{Count: 3}).Sandboxes
			_, err = w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 1})
			wantKind(t, err, fault.Exhausted)
			_, _, err = w.Create(t.Context(), acme, sandbox.Spec{})
			wantKind(t, err, fault.Exhausted)
			if _, err := w.Kill(t.Context(), acme, children[0].ID); err != nil {
				t.Fatal(err)
			}
			w.fork(parent, sandbox.ForkSpec{Count: 1})
		},
		"a fork that failed counts no more": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			w.driver.failWith(failing("fork", 1, errBoom))
			w.store.failWith(func(op string, n int) error {
				if op == "insert" && n == 6 { // in the second fork
					return errBoom
				}
				return nil
			})
			for range 2 {
				if _, err := w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 3}); !errors.Is(err, errBoom) {
					t.Fatalf("error is %v", err)
				}
			}
			w.fork(parent, sandbox.ForkSpec{Count: 3})
		},
	})
	claims(t, sandbox.Config{CreateRate: 2}, map[string]func(*testing.T, *world){
		"copies are creates of the same rate": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			_, err := w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 2})
			wantKind(t, err, fault.Exhausted)
			w.wantUnforked(parent, 0)
			sleep(500 * time.Millisecond)
			w.fork(parent, sandbox.ForkSpec{Count: 2})
		},
		"more copies than a second has are owed": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			sleep(time.Second)
			w.fork(parent, sandbox.ForkSpec{Count: 10})
			sleep(4*time.Second + 499*time.Millisecond)
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{})
			wantKind(t, err, fault.Exhausted)
			sleep(2 * time.Millisecond)
			w.create(sandbox.Spec{})
		},
	})
	claims(t, sandbox.Config{MaxStarting: 1}, map[string]func(*testing.T, *world){
		"a fork that waits for its kernel holds up no create, and forks take turns": func(t *testing.T, w *world) {
			parent := w.create(sandbox.Spec{}).ID
			going, most := 0, 0
			var mu sync.Mutex
			w.driver.onFork = func(context.Context, sandbox.ForkRequest) error {
				mu.Lock()
				going++
				most = max(most, going)
				mu.Unlock()
				time.Sleep(10 * time.Second)
				mu.Lock()
				going--
				mu.Unlock()
				return nil
			}
			var wg sync.WaitGroup
			for range 2 {
				wg.Go(func() {
					if _, err := w.Fork(t.Context(), acme, parent, sandbox.ForkSpec{Count: 2}); err != nil {
						t.Error(err)
					}
				})
			}
			synctest.Wait()
			begun := time.Now()
			w.create(sandbox.Spec{})
			if time.Since(begun) != 0 {
				t.Fatalf("the create took %v", time.Since(begun))
			}
			wg.Wait()
			if most != 1 {
				t.Fatalf("%d forks at once", most)
			}
		},
	})
}
