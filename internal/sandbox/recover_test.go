package sandbox_test

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
)

func TestRecovery(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a living sandbox is adopted as it was": func(t *testing.T, w *world) {
			before := w.create(sandbox.Spec{Key: "k", Metadata: map[string]string{"a": "b"}, IdleTimeout: time.Minute})
			sleep(time.Second)
			w.restart()
			after := w.wantRunning(before.ID)
			before.LastUsed = after.LastUsed
			if diff := cmp.Diff(before, after); diff != "" {
				t.Fatal(diff)
			}
			if w.observer.adopted != 1 || w.driver.count("stop") != 0 {
				t.Fatalf("%d adopted, %d stopped", w.observer.adopted, w.driver.count("stop"))
			}
			sleep(time.Minute)
			w.wantEnded(before.ID, sandbox.CauseIdle)
		},
		"an adopted sandbox expires at its deadline": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute}).ID
			sleep(30 * time.Second)
			w.restart()
			sleep(29 * time.Second)
			w.wantRunning(id)
			sleep(time.Second)
			w.wantEnded(id, sandbox.CauseExpired)
		},
		"the driver's deadline is the true one": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute}).ID
			w.store.failWith(failing("save running", 1, errBoom))
			if _, err := w.SetLifetime(t.Context(), acme, id, time.Hour); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
			w.restart()
			if sb := w.get(id); !sb.Deadline.Equal(time.Now().Add(time.Hour)) {
				t.Fatalf("deadline is %v", sb.Deadline)
			}
			if r, err := w.store.Get(t.Context(), id); err != nil || !r.Deadline.Equal(time.Now().Add(time.Hour)) {
				t.Fatalf("the row's deadline is %v, %v", r.Deadline, err)
			}
		},
		"an end that nobody heard is told by the driver": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.Manager.Close()
			at := time.Now()
			w.driver.die(sandbox.Ended{ID: id, Cause: sandbox.CauseExpired, Message: "by itself", At: at})
			sleep(time.Hour)
			w.serve()
			if sb := w.wantEnded(id, sandbox.CauseExpired); sb.CauseMessage != "by itself" || !sb.EndedAt.Equal(at) {
				t.Fatalf("recorded %+v", sb)
			}
			synctest.Wait()
			if w.driver.remembered() != 0 {
				t.Fatal("the driver was not told to forget it")
			}
		},
		"a sandbox that vanished lost its maker": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.Manager.Close()
			w.driver.vanish()
			w.serve()
			w.wantEnded(id, sandbox.CauseMakerDied)
		},
		"a sandbox that vanished over a reboot lost its host": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.Manager.Close()
			w.driver.vanish()
			w.cfg.BootID = "boot-2"
			w.serve()
			w.wantEnded(id, sandbox.CauseHostReboot)
		},
		"a sandbox that survives a reboot of the server's host is remembered by the new boot": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.cfg.BootID = "boot-2"
			w.restart()
			w.Manager.Close()
			w.driver.vanish()
			w.serve()
			w.wantEnded(id, sandbox.CauseMakerDied)
		},
		"an instance without a row is stopped": func(t *testing.T, w *world) {
			w.Manager.Close()
			w.driver.put(sandbox.StartRequest{ID: "sbstray", Tenant: "acme"})
			w.serve()
			synctest.Wait()
			if w.driver.has("sbstray") || w.driver.remembered() != 0 {
				t.Fatal("it is still there")
			}
		},
		"instances without a row are told to their tenants and counted": func(t *testing.T, w *world) {
			ended := w.create(sandbox.Spec{}).ID
			if _, err := w.Kill(t.Context(), acme, ended); err != nil {
				t.Fatal(err)
			}
			w.Manager.Close()
			w.driver.put(sandbox.StartRequest{ID: ended, Tenant: "acme"}) // another server recorded its end
			for _, id := range []string{"sbone", "sbtwo"} {
				w.driver.put(sandbox.StartRequest{ID: id, Tenant: "acme"})
			}
			w.driver.put(sandbox.StartRequest{ID: "sbthree", Tenant: "globex"})
			w.serve()
			synctest.Wait()
			for _, id := range []string{ended, "sbone", "sbtwo", "sbthree"} {
				if w.driver.has(id) {
					t.Errorf("%s is still there", id)
				}
			}
			w.wantEnded("sbone", sandbox.CauseRecordLost)
			w.wantEnded("sbtwo", sandbox.CauseRecordLost)
			w.wantEnded(ended, sandbox.CauseKilled)
			page, err := w.List(t.Context(), acme, sandbox.ListQuery{States: []sandbox.State{sandbox.StateEnded}})
			if err != nil || len(page.Items) != 3 {
				t.Errorf("%d ended sandboxes are listed, %v", len(page.Items), err)
			}
			logged := w.logged.String()
			for _, line := range []string{"sandboxes without a row were ended", "count=3 tenants=2", "after their end was recorded were ended\" count=1"} {
				if strings.Count(logged, line) != 1 {
					t.Errorf("the log has not one line with %q:\n%s", line, logged)
				}
			}
			if n := strings.Count(logged, "level=WARN"); n != 2 {
				t.Errorf("%d warnings:\n%s", n, logged)
			}
		},
		"a crash between row and driver leaves an ended row": func(t *testing.T, w *world) {
			w.Manager.Close()
			id := w.leftBehind(sandbox.StateStarting, "")
			w.serve()
			w.wantEnded(id, sandbox.CauseStartFail)
		},
		"a crash between driver and row leaves an ended row and no instance": func(t *testing.T, w *world) {
			w.Manager.Close()
			id := w.leftBehind(sandbox.StateStarting, "")
			w.driver.put(sandbox.StartRequest{ID: id, Tenant: "acme"})
			w.serve()
			w.wantEnded(id, sandbox.CauseStartFail)
		},
		"a crash during a stop keeps the cause and finishes the stop": func(t *testing.T, w *world) {
			w.Manager.Close()
			id := w.leftBehind(sandbox.StateStopping, sandbox.CauseIdle)
			w.driver.put(sandbox.StartRequest{ID: id, Tenant: "acme"})
			w.serve()
			w.wantEnded(id, sandbox.CauseIdle)
		},
		"a crash after a stop keeps the cause": func(t *testing.T, w *world) {
			w.Manager.Close()
			id := w.leftBehind(sandbox.StateStopping, sandbox.CauseIdle)
			w.driver.die(sandbox.Ended{ID: id, Cause: sandbox.CauseIdle, At: time.Now()})
			w.serve()
			synctest.Wait()
			w.wantEnded(id, sandbox.CauseIdle)
		},
		"a left sandbox that cannot be stopped at once does not hold up the server": func(t *testing.T, w *world) {
			w.Manager.Close()
			id := w.leftBehind(sandbox.StateStarting, "")
			w.driver.put(sandbox.StartRequest{ID: id, Tenant: "acme"})
			w.driver.failWith(failing("stop", 3, errBoom))
			w.serve()
			w.create(sandbox.Spec{})
			sleep(time.Minute)
			w.wantEnded(id, sandbox.CauseStartFail)
		},
		"a server that is closed twice stays closed": func(t *testing.T, w *world) {
			w.Manager.Close()
			w.Manager.Close()
			_, err := w.Kill(t.Context(), acme, "sb1")
			wantKind(t, err, fault.Unavailable)
		},
		"a driver that cannot list is told": func(t *testing.T, w *world) {
			w.Manager.Close()
			w.driver.failWith(failing("list", 2, errBoom))
			m := sandbox.NewManager(w.cfg, w.driver, w.store, fakeTemplates{}, w.observer, slog.New(slog.DiscardHandler))
			if err := m.Open(t.Context()); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
			m.Close()
		},
		"a default network that the driver cannot keep is told": func(t *testing.T, w *world) {
			w.driver.caps.Network = false
			cfg := sandbox.Config{DefaultNetwork: policy.Network{Mode: policy.None}}
			m := sandbox.NewManager(cfg, w.driver, w.store, fakeTemplates{}, w.observer, slog.New(slog.DiscardHandler))
			wantKind(t, m.Open(t.Context()), fault.Unsupported)
			m.Close()
		},
		"a wrong configuration is told": func(t *testing.T, w *world) {
			m := sandbox.NewManager(sandbox.Config{MaxLifetime: time.Second}, w.driver, w.store, fakeTemplates{}, w.observer, slog.New(slog.DiscardHandler))
			err := m.Open(t.Context())
			if wantKind(t, err, fault.Invalid); !strings.Contains(err.Error(), "5m0s") {
				t.Fatalf("error is %v", err)
			}
			m.Close()
		},
	})
}

func TestRecoveryOfAColdPause(t *testing.T) {
	// unrecorded crashes a server between a pause at the driver and its row.
	unrecorded := func(w *world, pause func(id string)) string {
		spec := pausing(time.Minute)
		spec.ColdPause, spec.AutoResume = true, true
		id := w.create(spec).ID
		w.driver.failWith(func(op string, _ int) error {
			if op == "change" || op == "resume" {
				w.store.failWith(func(string, int) error { return errBoom })
				return errBoom
			}
			return nil
		})
		pause(id)
		w.driver.failWith(nil)
		w.Manager.Close()
		w.store.failWith(nil)
		w.serve()
		return id
	}
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"one of a deadline is not resumed by a use": func(t *testing.T, w *world) {
			id := unrecorded(w, func(id string) { _, _ = w.Pause(t.Context(), acme, id, sandbox.PauseSpec{Cold: true}) })
			sb := w.wantPaused(id)
			if !sb.Cold || sb.Deadline.IsZero() || !w.driver.deadline(id).Equal(sb.Deadline) {
				t.Fatalf("%+v", sb)
			}
			_, err := w.Exec(t.Context(), acme, id, agentapi.ExecParams{Argv: []string{"true"}})
			wantKind(t, err, fault.Conflict)
			starts := w.driver.count("op kernel_start")
			if sb := w.resume(id); sb.Cold || w.driver.count("op kernel_start") != starts+1 {
				t.Fatalf("%+v", sb)
			}
		},
		"one that somebody asked for before the deadline kept its processes": func(t *testing.T, w *world) {
			id := unrecorded(w, func(id string) {
				if _, err := w.Pause(t.Context(), acme, id, sandbox.PauseSpec{}); !errors.Is(err, errBoom) {
					t.Fatalf("error is %v", err)
				}
			})
			if sb := w.wantPaused(id); sb.Cold {
				t.Fatalf("%+v", sb)
			}
		},
	})
}

// leftBehind inserts the row that a server left when it was killed.
func (w *world) leftBehind(state sandbox.State, cause sandbox.Cause) string {
	w.t.Helper()
	sb := sandbox.Sandbox{
		ID: "sbleft", Tenant: "acme", Template: "python", State: state, Cause: cause, CreatedAt: time.Now().UTC(),
		Storage: sandbox.StorageVolatile,
	}
	if err := w.store.Insert(w.t.Context(), sandbox.Record{Sandbox: sb, BootID: w.cfg.BootID}); err != nil {
		w.t.Fatal(err)
	}
	return sb.ID
}

func TestList(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a listing has the caller's sandboxes, newest first, page by page": func(t *testing.T, w *world) {
			var want []string
			for range 5 {
				want = append([]string{w.create(sandbox.Spec{}).ID}, want...)
				sleep(time.Microsecond) // those of one moment come by their ids
			}
			if _, _, err := w.Create(t.Context(), globex, sandbox.Spec{}); err != nil {
				t.Fatal(err)
			}
			var got []string
			q := sandbox.ListQuery{Limit: 2}
			for {
				page, err := w.List(t.Context(), acme, q)
				if err != nil {
					t.Fatal(err)
				}
				for _, sb := range page.Items {
					got = append(got, sb.ID)
				}
				if q.Cursor = page.Next; q.Cursor == "" {
					break
				}
			}
			if !slices.Equal(got, want) {
				t.Fatalf("got %v, want %v", got, want)
			}
		},
		"a listing is what a read of each would be": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Metadata: map[string]string{"a": "b"}}).ID
			sleep(time.Second)
			client, err := w.Agent(t.Context(), acme, id)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := client.Hello(t.Context()); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]sandbox.Sandbox{w.get(id)}, w.all()); diff != "" {
				t.Fatal(diff)
			}
		},
		"a wrong query is invalid": func(t *testing.T, w *world) {
			for _, q := range []sandbox.ListQuery{{Limit: -1}, {Limit: 1001}, {States: []sandbox.State{"zombie"}}, {Cursor: "!"}} {
				_, err := w.List(t.Context(), acme, q)
				wantKind(t, err, fault.Invalid)
			}
		},
	})
}

func TestEvents(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a life is told in order": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			if _, err := w.SetLifetime(t.Context(), acme, id, time.Hour); err != nil {
				t.Fatal(err)
			}
			w.restart()
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			want := []sandbox.LifecycleType{sandbox.LifecycleCreated, sandbox.LifecycleStarted, sandbox.LifecycleLifetime, sandbox.LifecycleAdopted, sandbox.LifecycleEnded}
			if got := w.events(sandbox.EventQuery{Sandbox: id}); !slices.Equal(got, want) {
				t.Fatalf("told %v, want %v", got, want)
			}
		},
		"events of others are not told": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			for e, err := range w.Events(t.Context(), globex, sandbox.EventQuery{}) {
				t.Fatalf("told %v, %v", e, err)
			}
			for _, err := range w.Events(t.Context(), globex, sandbox.EventQuery{Sandbox: id}) {
				wantKind(t, err, fault.NotFound)
			}
		},
		"a follower hears what comes, from where it left off": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute}).ID
			var got []sandbox.LifecycleEvent
			for e, err := range w.Events(t.Context(), acme, sandbox.EventQuery{Follow: true}) {
				if err != nil {
					t.Fatal(err)
				}
				if got = append(got, e); len(got) == 3 {
					break
				}
			}
			if end := got[2]; end.Sandbox != id || end.Type != sandbox.LifecycleEnded || end.Cause != sandbox.CauseExpired {
				t.Fatalf("the last event is %+v", end)
			}
			if rest := w.events(sandbox.EventQuery{After: got[1].Seq}); !slices.Equal(rest, []sandbox.LifecycleType{sandbox.LifecycleEnded}) {
				t.Fatalf("after the second came %v", rest)
			}
		},
		"a follower ends with its server": func(t *testing.T, w *world) {
			done := make(chan int)
			go func() {
				n := 0
				for range w.Events(t.Context(), acme, sandbox.EventQuery{Follow: true}) {
					n++
				}
				done <- n
			}()
			for range 300 { // more than one batch
				w.create(sandbox.Spec{})
			}
			synctest.Wait()
			w.Manager.Close()
			if n := <-done; n != 600 {
				t.Fatalf("heard %d events, want 600", n)
			}
		},
	})
}
