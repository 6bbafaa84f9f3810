package sandbox_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func TestSnapshot(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a snapshot is the tenant's own template": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			got, err := w.Snapshot(t.Context(), acme, id, "my-env.2", "with pandas")
			if err != nil || got.Name != "my-env.2" || got.Tenant != "acme" {
				t.Fatalf("%+v, %v", got, err)
			}
			want := []sandbox.SnapshotRequest{{ID: id, Tenant: "acme", Name: "my-env.2", Description: "with pandas"}}
			if diff := cmp.Diff(want, w.driver.snapshots); diff != "" {
				t.Fatal(diff)
			}
			w.wantRunning(id)
			for e, err := range w.Events(t.Context(), acme, sandbox.EventQuery{Sandbox: id, After: 2}) {
				if err != nil || e.Type != sandbox.LifecycleSnapshot || e.Message != "my-env.2" {
					t.Fatalf("%+v, %v", e, err)
				}
			}
			if n := len(w.events(sandbox.EventQuery{Sandbox: id})); n != 3 {
				t.Fatalf("%d events", n)
			}
		},
		"a paused sandbox stays paused": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{AutoResume: true}).ID
			w.pause(id, sandbox.PauseSpec{})
			if _, err := w.Snapshot(t.Context(), acme, id, "asleep", ""); err != nil {
				t.Fatal(err)
			}
			w.wantPaused(id)
		},
		"a name that is taken is a conflict": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			for _, name := range []string{"python", "unbuilt", "acmes"} {
				_, err := w.Snapshot(t.Context(), acme, id, name, "")
				wantKind(t, err, fault.Conflict)
			}
			if len(w.driver.snapshots) != 0 {
				t.Fatal("the driver was asked")
			}
		},
		"another tenant's name is not taken": func(t *testing.T, w *world) {
			sb, _, err := w.Create(t.Context(), globex, sandbox.Spec{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := w.Snapshot(t.Context(), globex, sb.ID, "acmes", ""); err != nil {
				t.Fatal(err)
			}
		},
		"a name that is no template's is invalid": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			for _, name := range []string{"", "Upper", "-x", ".", "../x", "a/b", "a b", "ü", strings.Repeat("a", 64), "a\n"} {
				_, err := w.Snapshot(t.Context(), acme, id, name, "")
				wantKind(t, err, fault.Invalid)
			}
			for _, text := range []string{strings.Repeat("a", 1025), "a\x00b", "\xff"} {
				_, err := w.Snapshot(t.Context(), acme, id, "x", text)
				wantKind(t, err, fault.Invalid)
			}
		},
		"what is not there cannot be taken": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			_, err := w.Snapshot(t.Context(), globex, id, "x", "")
			wantKind(t, err, fault.NotFound)
			w.driver.failWith(failing("snapshot", 1, fault.New(fault.DiskFull, "the server's disk is full")))
			_, err = w.Snapshot(t.Context(), acme, id, "x", "")
			wantKind(t, err, fault.DiskFull)
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			_, err = w.Snapshot(t.Context(), acme, id, "x", "")
			wantKind(t, err, fault.Gone)
			other := w.create(sandbox.Spec{}).ID
			w.driver.caps.Snapshot = false
			_, err = w.Snapshot(t.Context(), acme, other, "x", "")
			wantKind(t, err, fault.Unsupported)
		},
		"a sandbox that ends meanwhile has given its template": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.driver.onSnapshot = func() {
				w.driver.die(sandbox.Ended{ID: id, Cause: sandbox.CauseOOM, At: time.Now()})
				synctest.Wait()
			}
			if _, err := w.Snapshot(t.Context(), acme, id, "x", ""); err != nil {
				t.Fatal(err)
			}
			w.wantEnded(id, sandbox.CauseOOM)
		},
	})
}

func TestTemplates(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a tenant starts from its own template, and nobody else": func(t *testing.T, w *world) {
			w.create(sandbox.Spec{Template: "acmes"})
			_, _, err := w.Create(t.Context(), globex, sandbox.Spec{Template: "acmes"})
			wantKind(t, err, fault.NotFound)
			if err := w.Prepare(t.Context(), "globex", "acmes"); !fault.Is(err, fault.NotFound) {
				t.Fatalf("error is %v", err)
			}
		},
		"only a snapshot of one's own can be removed": func(t *testing.T, w *world) {
			for name, kind := range map[string]fault.Kind{"python": fault.Denied, "nothing": fault.NotFound} {
				wantKind(t, w.RemoveTemplate(t.Context(), acme, name), kind)
			}
			wantKind(t, w.RemoveTemplate(t.Context(), globex, "acmes"), fault.NotFound)
			if len(w.driver.removed) != 0 {
				t.Fatalf("the driver removed %v", w.driver.removed)
			}
			if err := w.RemoveTemplate(t.Context(), acme, "acmes"); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(w.driver.removed, []string{"acme/acmes"}) {
				t.Fatalf("the driver removed %v", w.driver.removed)
			}
			w.driver.failWith(failing("remove", 9, errBoom))
			for _, name := range []string{"acmes", "unbuilt"} {
				if err := w.RemoveTemplate(t.Context(), acme, name); !errors.Is(err, errBoom) {
					t.Fatalf("error is %v", err)
				}
			}
			w.driver.failWith(failing("remove", 9, fault.New(fault.NotFound, "no such snapshot")))
			wantKind(t, w.RemoveTemplate(t.Context(), acme, "unbuilt"), fault.Denied)
			wantKind(t, w.RemoveTemplate(t.Context(), acme, "acmes"), fault.NotFound) // somebody else was faster
		},
		"a removal waits for the creates from its template": func(t *testing.T, w *world) {
			var began, started atomic.Int32
			w.driver.onStart = func(context.Context, sandbox.StartRequest) error {
				began.Add(1)
				time.Sleep(time.Minute)
				started.Add(1)
				return nil
			}
			made := make(chan error, 2)
			create := func() {
				_, _, err := w.Create(t.Context(), acme, sandbox.Spec{Template: "acmes"})
				made <- err
			}
			go create()
			synctest.Wait()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			wantKind(t, w.RemoveTemplate(ctx, acme, "acmes"), fault.Timeout)
			go create() // a removal that gave up holds up nothing
			synctest.Wait()
			if began.Load() != 2 || started.Load() != 0 {
				t.Fatalf("%d began, %d started", began.Load(), started.Load())
			}
			if err := w.RemoveTemplate(t.Context(), acme, "acmes"); err != nil {
				t.Fatal(err)
			}
			if started.Load() != 2 || len(w.driver.removed) != 1 {
				t.Fatalf("%d started, removed %v", started.Load(), w.driver.removed)
			}
			if err := errors.Join(<-made, <-made); err != nil {
				t.Fatal(err)
			}
		},
		"a create waits for the removal of its template": func(t *testing.T, w *world) {
			var removed atomic.Bool
			w.driver.failWith(func(op string, n int) error {
				if op == "remove" {
					time.Sleep(time.Minute)
					removed.Store(true)
				}
				return nil
			})
			w.driver.onStart = func(context.Context, sandbox.StartRequest) error {
				if !removed.Load() {
					t.Error("a sandbox was started while its template was removed")
				}
				return nil
			}
			done := make(chan error, 1)
			go func() { done <- w.RemoveTemplate(t.Context(), acme, "acmes") }()
			synctest.Wait()
			w.create(sandbox.Spec{Template: "acmes"})
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		},
	})
}
