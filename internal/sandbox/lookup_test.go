package sandbox_test

import (
	"maps"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
)

func TestStopped(t *testing.T) {
	over := func(c <-chan struct{}) bool {
		synctest.Wait()
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a pause and an end are told to those who watch": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			first := w.Stopped(id)
			if over(first) {
				t.Fatal("a running sandbox has stopped")
			}
			w.pause(id, sandbox.PauseSpec{})
			if !over(first) || !over(w.Stopped(id)) {
				t.Fatal("a paused sandbox runs")
			}
			w.resume(id)
			second := w.Stopped(id)
			if over(second) || !over(first) {
				t.Fatal("a resumed sandbox has stopped, or the pause before it was not")
			}
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			if !over(second) || !over(w.Stopped(id)) {
				t.Fatal("an ended sandbox runs")
			}
		},
		"a pause that failed has stopped it, and it runs again": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.driver.failWith(failing("pause", 1, errBoom))
			if _, err := w.Pause(t.Context(), acme, id, sandbox.PauseSpec{}); err == nil {
				t.Fatal("it was paused")
			}
			if over(w.Stopped(id)) {
				t.Fatal("it does not run")
			}
		},
		"an adopted sandbox is watched like any other": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.restart()
			c := w.Stopped(id)
			if over(c) {
				t.Fatal("it does not run")
			}
			w.driver.die(sandbox.Ended{ID: id, Cause: sandbox.CauseOOM, At: time.Now()})
			if !over(c) {
				t.Fatal("it runs")
			}
		},
		"what is not known does not run": func(t *testing.T, w *world) {
			if !over(w.Stopped("sbx")) {
				t.Fatal("it runs")
			}
		},
	})
}

func TestLookup(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"every tenant's sandbox is found, with its tenant, ended or not": func(t *testing.T, w *world) {
			mine := w.create(sandbox.Spec{Annotations: map[string]string{"e2b": "{}"}})
			theirs, _, err := w.Create(t.Context(), globex, sandbox.Spec{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := w.Kill(t.Context(), globex, theirs.ID); err != nil {
				t.Fatal(err)
			}
			p, sb, err := w.Lookup(t.Context(), mine.ID)
			if err != nil || p != acme || sb.State != sandbox.StateRunning || sb.Annotations["e2b"] != "{}" {
				t.Fatalf("%+v %+v, %v", p, sb, err)
			}
			p, sb, err = w.Lookup(t.Context(), theirs.ID)
			if err != nil || p != globex || sb.State != sandbox.StateEnded {
				t.Fatalf("%+v %+v, %v", p, sb, err)
			}
			_, _, err = w.Lookup(t.Context(), "sbx")
			wantKind(t, err, fault.NotFound)
		},
		"each and running count the living and the running": func(t *testing.T, w *world) {
			one, two := w.create(sandbox.Spec{}).ID, w.create(sandbox.Spec{}).ID
			if _, _, err := w.Create(t.Context(), globex, sandbox.Spec{}); err != nil {
				t.Fatal(err)
			}
			w.pause(one, sandbox.PauseSpec{})
			w.create(sandbox.Spec{Annotations: map[string]string{"hidden": ""}})
			if w.Running(acme, "") != 2 || w.Running(acme, "hidden") != 1 || w.Running(globex, "hidden") != 1 {
				t.Fatalf("%d, %d and %d run", w.Running(acme, ""), w.Running(acme, "hidden"), w.Running(globex, "hidden"))
			}
			seen := 0
			w.Each(func(sandbox.Sandbox) bool { seen++; return true })
			w.Each(func(sandbox.Sandbox) bool { seen += 10; return false })
			if seen != 14 {
				t.Fatalf("%d", seen)
			}
			if _, err := w.Kill(t.Context(), acme, two); err != nil {
				t.Fatal(err)
			}
			if w.Running(acme, "hidden") != 0 {
				t.Fatal("an ended one runs")
			}
		},
	})
}

// annotate replaces annotations together with the network.
func (w *world) annotate(p auth.Principal, id string, some map[string]string) error {
	_, err := w.ChangeNetwork(w.t.Context(), p, id, sandbox.NetworkChange{
		Annotate: func(sandbox.Sandbox) (map[string]string, error) { return some, nil },
	})
	return err
}

func TestAnnotations(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a change of the network replaces some, others stay": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Annotations: map[string]string{"a": "1", "b": "2"}}).ID
			if err := w.annotate(acme, id, map[string]string{"a": "3", "c": "4"}); err != nil {
				t.Fatal(err)
			}
			w.restart()
			if got := w.get(id).Annotations; !maps.Equal(got, map[string]string{"a": "3", "b": "2", "c": "4"}) {
				t.Fatalf("%v", got)
			}
		},
		"a change that is refused changes neither": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			_, err := w.ChangeNetwork(t.Context(), acme, id, sandbox.NetworkChange{
				Network:  &policy.Network{Mode: policy.None},
				Annotate: func(sandbox.Sandbox) (map[string]string, error) { return nil, fault.New(fault.Conflict, "no") },
			})
			wantKind(t, err, fault.Conflict)
			if sb := w.get(id); sb.Network.Mode != policy.Internet || len(w.driver.changes) != 0 {
				t.Fatalf("%+v", sb)
			}
		},
		"what is kept of a change is of the change that is in force, whoever comes between": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			var second sync.WaitGroup
			change := func(mode policy.Mode, meanwhile func()) {
				_, err := w.ChangeNetwork(t.Context(), acme, id, sandbox.NetworkChange{
					Network: &policy.Network{Mode: mode},
					Annotate: func(sb sandbox.Sandbox) (map[string]string, error) {
						meanwhile()
						return map[string]string{"asked": sb.Annotations["asked"] + string(mode) + " "}, nil
					},
				})
				if err != nil {
					t.Error(err)
				}
			}
			change(policy.None, func() {
				second.Go(func() { change(policy.Internet, func() {}) })
				synctest.Wait()
			})
			second.Wait()
			if sb := w.get(id); sb.Network.Mode != policy.Internet || sb.Annotations["asked"] != "none internet " {
				t.Fatalf("%+v, %v", sb.Network, sb.Annotations)
			}
		},
		"they are bounded, and the owner's": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			wantKind(t, w.annotate(acme, id, map[string]string{"a": string(make([]byte, 64<<10+1))}), fault.Invalid)
			wantKind(t, w.annotate(globex, id, map[string]string{"a": "1"}), fault.NotFound)
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{Annotations: map[string]string{"": "1"}})
			wantKind(t, err, fault.Invalid)
			if got := w.get(id).Annotations; len(got) != 0 {
				t.Fatalf("%v", got)
			}
		},
		"the id is in the variable that was named": func(t *testing.T, w *world) {
			sb := w.create(sandbox.Spec{IDEnv: "E2B_SANDBOX_ID", Env: map[string]string{"A": "1"}})
			if env := w.driver.requests[0].Env; len(env) != 2 || env["E2B_SANDBOX_ID"] != sb.ID || env["A"] != "1" {
				t.Fatalf("%v", env)
			}
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{IDEnv: "A=B"})
			wantKind(t, err, fault.Invalid)
		},
	})
}

func TestListOrder(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a listing goes either way and begins where it is told": func(t *testing.T, w *world) {
			var all []string
			for range 3 {
				all = append(all, w.create(sandbox.Spec{}).ID)
				sleep(time.Second)
			}
			page, err := w.List(t.Context(), acme, sandbox.ListQuery{Ascending: true, Limit: 1, StartedAfter: w.get(all[1]).CreatedAt})
			if err != nil || len(page.Items) != 1 || page.Items[0].ID != all[1] || page.Next == "" {
				t.Fatalf("%+v, %v", page, err)
			}
		},
	})
}
