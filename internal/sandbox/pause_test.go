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
)

func (w *world) pause(id string, spec sandbox.PauseSpec) sandbox.Sandbox {
	w.t.Helper()
	sb, err := w.Pause(w.t.Context(), acme, id, spec)
	if err != nil {
		w.t.Fatal(err)
	}
	return sb
}

func (w *world) resume(id string) sandbox.Sandbox {
	w.t.Helper()
	sb, err := w.Resume(w.t.Context(), acme, id, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	return sb
}

// wantPaused checks memory, row and driver.
func (w *world) wantPaused(id string) sandbox.Sandbox {
	w.t.Helper()
	synctest.Wait()
	sb := w.get(id)
	if sb.State != sandbox.StatePaused || sb.PausedAt.IsZero() || !w.driver.has(id) || !w.driver.isPaused(id) {
		w.t.Fatalf("sandbox is %s by %q, paused at %v, want paused", sb.State, sb.Cause, sb.PausedAt)
	}
	r, err := w.store.Get(w.t.Context(), id)
	if err != nil || r.State != sandbox.StatePaused || r.Unspent == 0 {
		w.t.Fatalf("the row says %s with %v left, %v", r.State, r.Unspent, err)
	}
	return sb
}

func (d *fakeDriver) isPaused(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.boxes[id] != nil && d.boxes[id].paused
}

func (d *fakeDriver) setPaused(id string, paused bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.boxes[id].paused = paused
}

func (d *fakeDriver) deadline(id string) time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.boxes[id].req.Deadline
}

func is(b bool) *bool { return &b }

func wantDeadline(t *testing.T, sb sandbox.Sandbox, in time.Duration) {
	t.Helper()
	if !sb.Deadline.Equal(time.Now().Add(in)) {
		t.Fatalf("the deadline is in %v, want %v", time.Until(sb.Deadline), in)
	}
}

func TestPause(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a paused sandbox keeps everything but its deadline": func(t *testing.T, w *world) {
			before := w.create(sandbox.Spec{Lifetime: time.Minute, Metadata: map[string]string{"a": "b"}})
			sleep(10 * time.Second)
			got := w.pause(before.ID, sandbox.PauseSpec{})
			want := before
			want.State, want.PausedAt, want.Deadline = sandbox.StatePaused, time.Now().UTC(), time.Now().Add(24*time.Hour).UTC()
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatal(diff)
			}
			if diff := cmp.Diff(want, w.wantPaused(before.ID)); diff != "" {
				t.Fatal(diff)
			}
			if !w.driver.deadline(before.ID).Equal(want.Deadline) {
				t.Fatal("the driver does not know the new deadline")
			}
			if !slices.Equal(w.observer.paused, []fault.Kind{""}) {
				t.Fatalf("observed %v", w.observer.paused)
			}
		},
		"what was left of a lifetime counts on after the resume": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute}).ID
			sleep(20 * time.Second)
			w.pause(id, sandbox.PauseSpec{})
			sleep(time.Hour)
			sb := w.resume(id)
			wantDeadline(t, sb, 40*time.Second)
			if sb.State != sandbox.StateRunning || !sb.PausedAt.IsZero() || !w.driver.deadline(id).Equal(sb.Deadline) || w.driver.isPaused(id) {
				t.Fatalf("%+v", sb)
			}
			sleep(39 * time.Second)
			w.wantRunning(id)
			sleep(time.Second)
			w.wantEnded(id, sandbox.CauseExpired)
		},
		"a sandbox without a deadline has none after the resume": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: -1}).ID
			wantDeadline(t, w.pause(id, sandbox.PauseSpec{Lifetime: time.Hour}), time.Hour)
			if sb := w.resume(id); !sb.Deadline.IsZero() || !w.driver.deadline(id).IsZero() {
				t.Fatalf("the deadline is %v", sb.Deadline)
			}
		},
		"a resume may give a new lifetime": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute}).ID
			w.pause(id, sandbox.PauseSpec{})
			sb, err := w.Resume(t.Context(), acme, id, time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			wantDeadline(t, sb, time.Hour)
		},
		"a pause may have a deadline of its own or none": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			wantDeadline(t, w.pause(id, sandbox.PauseSpec{Lifetime: time.Minute}), time.Minute)
			w.resume(id)
			if sb := w.pause(id, sandbox.PauseSpec{Lifetime: -1}); !sb.Deadline.IsZero() {
				t.Fatalf("the deadline is %v", sb.Deadline)
			}
		},
		"a paused sandbox ends at its deadline": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Hour}).ID
			w.pause(id, sandbox.PauseSpec{Lifetime: time.Minute})
			sleep(59 * time.Second)
			w.wantPaused(id)
			sleep(time.Second)
			if sb := w.wantEnded(id, sandbox.CauseExpired); !sb.PausedAt.IsZero() {
				t.Fatalf("an ended sandbox is paused since %v", sb.PausedAt)
			}
		},
		"a new lifetime of a paused sandbox is its pause's": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Hour}).ID
			w.pause(id, sandbox.PauseSpec{Lifetime: time.Minute})
			if _, err := w.SetLifetime(t.Context(), acme, id, 2*time.Minute); err != nil {
				t.Fatal(err)
			}
			wantDeadline(t, w.wantPaused(id), 2*time.Minute)
			wantDeadline(t, w.resume(id), time.Hour)
		},
		"network and usage of a paused sandbox need no resume": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{AutoResume: true}).ID
			w.driver.usage = sandbox.Usage{MemoryBytes: 3 << 20}
			w.pause(id, sandbox.PauseSpec{})
			if _, err := w.SetNetwork(t.Context(), acme, id, policy.Network{Mode: policy.None}); err != nil {
				t.Fatal(err)
			}
			if u, err := w.Usage(t.Context(), acme, id); err != nil || u.MemoryBytes != 3<<20 {
				t.Fatalf("usage is %+v, %v", u, err)
			}
			w.wantPaused(id)
		},
		"pausing the paused and resuming the running change nothing": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			if _, err := w.Resume(t.Context(), acme, id, time.Hour); err != nil {
				t.Fatal(err)
			}
			wantDeadline(t, w.wantRunning(id), 300*time.Second)
			first := w.pause(id, sandbox.PauseSpec{})
			sleep(time.Second)
			if diff := cmp.Diff(first, w.pause(id, sandbox.PauseSpec{Lifetime: time.Minute, AutoResume: is(true)})); diff != "" {
				t.Fatal(diff)
			}
			want := []sandbox.LifecycleType{sandbox.LifecycleCreated, sandbox.LifecycleStarted, sandbox.LifecyclePaused}
			if got := w.events(sandbox.EventQuery{Sandbox: id}); !slices.Equal(got, want) {
				t.Fatalf("events are %v", got)
			}
			if w.driver.count("pause") != 1 || w.driver.count("resume") != 0 {
				t.Fatal("the driver was asked for nothing")
			}
		},
		"many pauses and resumes at once are one of each": func(t *testing.T, w *world) {
			w.driver.onFreeze = func(string, string) { time.Sleep(time.Second) }
			id := w.create(sandbox.Spec{}).ID
			for _, op := range []string{"pause", "resume"} {
				var wg sync.WaitGroup
				for range 10 {
					wg.Go(func() {
						var err error
						if op == "pause" {
							_, err = w.Pause(t.Context(), acme, id, sandbox.PauseSpec{})
						} else {
							_, err = w.Resume(t.Context(), acme, id, 0)
						}
						if err != nil {
							t.Error(err)
						}
					})
				}
				wg.Wait()
				if n := w.driver.count(op); n != 1 {
					t.Fatalf("the driver was asked %d times to %s", n, op)
				}
			}
			w.wantRunning(id)
		},
		"a listing finds the paused": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.create(sandbox.Spec{})
			w.pause(id, sandbox.PauseSpec{})
			page, err := w.List(t.Context(), acme, sandbox.ListQuery{States: []sandbox.State{sandbox.StatePaused}})
			if err != nil || len(page.Items) != 1 || page.Items[0].ID != id {
				t.Fatalf("%v, %v", page, err)
			}
		},
		"a run stands still and goes on": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Hour, IdleTimeout: time.Minute}).ID
			ended := make(chan error, 1)
			go func() {
				_, err := w.run(id, agentapi.RunParams{Code: "hang"})
				ended <- err
			}()
			synctest.Wait()
			w.pause(id, sandbox.PauseSpec{})
			sleep(time.Hour)
			select {
			case err := <-ended:
				t.Fatalf("the run ended with %v", err)
			default:
			}
			w.wantPaused(id)
			w.resume(id)
			sleep(10 * time.Minute) // it is in use: no idle clock runs
			w.wantRunning(id)
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			wantKind(t, <-ended, fault.Gone)
		},
		"the idle clock stands still and begins anew": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Hour, IdleTimeout: time.Minute}).ID
			sleep(50 * time.Second)
			w.pause(id, sandbox.PauseSpec{})
			sleep(10 * time.Minute)
			w.wantPaused(id)
			w.resume(id)
			sleep(59 * time.Second)
			w.wantRunning(id)
			sleep(time.Second)
			w.wantEnded(id, sandbox.CauseIdle)
		},
		"a paused sandbox is killed as any other": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.pause(id, sandbox.PauseSpec{})
			if sb, err := w.Kill(t.Context(), acme, id); err != nil || sb.State != sandbox.StateEnded || !sb.PausedAt.IsZero() {
				t.Fatalf("%+v, %v", sb, err)
			}
			w.wantEnded(id, sandbox.CauseKilled)
			for _, op := range []func() error{
				func() error { _, err := w.Pause(t.Context(), acme, id, sandbox.PauseSpec{}); return err },
				func() error { _, err := w.Resume(t.Context(), acme, id, 0); return err },
			} {
				wantKind(t, op(), fault.Gone)
			}
		},
		"a paused sandbox that ends by itself is told": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.pause(id, sandbox.PauseSpec{})
			w.driver.die(sandbox.Ended{ID: id, Cause: sandbox.CauseOOM, At: time.Now()})
			synctest.Wait()
			w.wantEnded(id, sandbox.CauseOOM)
		},
		"a sandbox that is ending cannot be paused": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.driver.onStop = func(string) { time.Sleep(time.Second) }
			var wg sync.WaitGroup
			wg.Go(func() { _, _ = w.Kill(t.Context(), acme, id) })
			synctest.Wait()
			_, err := w.Pause(t.Context(), acme, id, sandbox.PauseSpec{})
			wantKind(t, err, fault.Gone)
			wg.Wait()
			w.wantEnded(id, sandbox.CauseKilled)
		},
		"a kill during a pause or resume wins": func(t *testing.T, w *world) {
			for _, op := range []string{"pause", "resume"} {
				id := w.create(sandbox.Spec{}).ID
				if op == "resume" {
					w.pause(id, sandbox.PauseSpec{})
				}
				w.driver.onFreeze = func(string, string) { time.Sleep(time.Second) }
				failed := make(chan error, 1)
				go func() {
					var err error
					if op == "pause" {
						_, err = w.Pause(t.Context(), acme, id, sandbox.PauseSpec{})
					} else {
						_, err = w.Resume(t.Context(), acme, id, 0)
					}
					failed <- err
				}()
				sleep(time.Millisecond)
				if _, err := w.Kill(t.Context(), acme, id); err != nil {
					t.Fatal(err)
				}
				wantKind(t, <-failed, fault.Gone)
				w.wantEnded(id, sandbox.CauseKilled)
				w.driver.onFreeze = nil
			}
		},
		"a caller who leaves does not leave half a pause": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.driver.onFreeze = func(string, string) { time.Sleep(time.Second) }
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			if _, err := w.Pause(ctx, acme, id, sandbox.PauseSpec{}); err != nil {
				t.Fatal(err)
			}
			w.wantPaused(id)
		},
		"a pause that the driver refuses leaves it running": func(t *testing.T, w *world) {
			before := w.create(sandbox.Spec{AutoResume: true})
			for _, op := range []string{"pause", "change"} {
				w.driver.failWith(failing(op, 99, errBoom))
				if _, err := w.Pause(t.Context(), acme, before.ID, sandbox.PauseSpec{AutoResume: is(false)}); !errors.Is(err, errBoom) {
					t.Fatalf("error is %v", err)
				}
				if w.driver.isPaused(before.ID) {
					t.Fatalf("it is paused although %s failed", op)
				}
				after := w.wantRunning(before.ID)
				if diff := cmp.Diff(before, after); diff != "" {
					t.Fatal(diff)
				}
			}
			w.driver.failWith(nil)
			if _, err := w.run(before.ID, agentapi.RunParams{Code: "1"}); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(w.observer.paused, []fault.Kind{fault.Internal, fault.Internal}) {
				t.Fatalf("observed %v", w.observer.paused)
			}
		},
		"a pause that the driver never answers is undone": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.driver.failWith(func(op string, n int) error {
				if op == "pause" {
					w.driver.setPaused(id, true)
					return fault.New(fault.Timeout, "the maker did not answer")
				}
				return nil
			})
			_, err := w.Pause(t.Context(), acme, id, sandbox.PauseSpec{})
			wantKind(t, err, fault.Timeout)
			if w.wantRunning(id); w.driver.isPaused(id) {
				t.Fatal("it stands still")
			}
		},
		"a resume that the driver refuses leaves it paused": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute}).ID
			before := w.pause(id, sandbox.PauseSpec{})
			for _, op := range []string{"resume", "change"} {
				w.driver.failWith(failing(op, 99, errBoom))
				if _, err := w.Resume(t.Context(), acme, id, 0); !errors.Is(err, errBoom) {
					t.Fatalf("error is %v", err)
				}
				if diff := cmp.Diff(before, w.wantPaused(id)); diff != "" {
					t.Fatal(diff)
				}
			}
			w.driver.failWith(nil)
			wantDeadline(t, w.resume(id), time.Minute)
			if !slices.Equal(w.observer.resumed, []fault.Kind{fault.Internal, fault.Internal, ""}) {
				t.Fatalf("observed %v", w.observer.resumed)
			}
		},
		"a resume that cannot be had now says so": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.pause(id, sandbox.PauseSpec{})
			w.driver.failWith(failing("resume", 1, fault.New(fault.Unavailable, "the maker is away")))
			_, err := w.Resume(t.Context(), acme, id, 0)
			if wantKind(t, err, fault.Unavailable); fault.Message(err) != "the maker is away" {
				t.Fatalf("the sentence is %q", fault.Message(err))
			}
			w.wantPaused(id)
		},
		"another tenant's sandbox is not found": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			_, err := w.Pause(t.Context(), globex, id, sandbox.PauseSpec{})
			wantKind(t, err, fault.NotFound)
			w.pause(id, sandbox.PauseSpec{AutoResume: is(true)})
			_, err = w.Resume(t.Context(), globex, id, 0)
			wantKind(t, err, fault.NotFound)
			for _, err := range w.Run(t.Context(), globex, id, agentapi.RunParams{Code: "1"}) {
				wantKind(t, err, fault.NotFound)
			}
			w.wantPaused(id)
		},
		"a driver that cannot pause says so": func(t *testing.T, w *world) {
			w.driver.caps.Pause = false
			id := w.create(sandbox.Spec{}).ID
			_, err := w.Pause(t.Context(), acme, id, sandbox.PauseSpec{})
			wantKind(t, err, fault.Unsupported)
			_, _, err = w.Create(t.Context(), acme, sandbox.Spec{IdleAction: sandbox.IdlePause})
			wantKind(t, err, fault.Unsupported)
		},
		"a pause and a resume are told": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute, AutoResume: true}).ID
			w.pause(id, sandbox.PauseSpec{Lifetime: time.Hour})
			if _, err := w.run(id, agentapi.RunParams{Code: "1"}); err != nil {
				t.Fatal(err)
			}
			var got []sandbox.LifecycleEvent
			for e, err := range w.Events(t.Context(), acme, sandbox.EventQuery{Sandbox: id}) {
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, sandbox.LifecycleEvent{Type: e.Type, Deadline: e.Deadline, Message: e.Message})
			}
			want := []sandbox.LifecycleEvent{
				{Type: sandbox.LifecycleCreated}, {Type: sandbox.LifecycleStarted},
				{Type: sandbox.LifecyclePaused, Deadline: time.Now().Add(time.Hour).UTC()},
				{Type: sandbox.LifecycleResumed, Deadline: time.Now().Add(time.Minute).UTC(), Message: "used"},
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatal(diff)
			}
		},
	})
}

func TestPauseLifetimes(t *testing.T) {
	for name, c := range map[string]struct {
		cfg   sandbox.Config
		asked time.Duration
		want  time.Duration // negative: no deadline; zero: refused
	}{
		"the default":                             {sandbox.Config{}, 0, 24 * time.Hour},
		"the server's":                            {sandbox.Config{PausedLifetime: time.Hour}, 0, time.Hour},
		"for ever":                                {sandbox.Config{PausedLifetime: -1}, 0, -1},
		"any, where lifetimes have no maximum":    {sandbox.Config{PausedLifetime: time.Hour}, 100 * time.Hour, 100 * time.Hour},
		"for ever, where lifetimes have none":     {sandbox.Config{PausedLifetime: time.Hour}, -1, -1},
		"up to the longer of the two maxima":      {sandbox.Config{PausedLifetime: time.Hour, MaxLifetime: 2 * time.Hour}, 2 * time.Hour, 2 * time.Hour},
		"not beyond it":                           {sandbox.Config{PausedLifetime: 3 * time.Hour, MaxLifetime: 2 * time.Hour}, 4 * time.Hour, 0},
		"not for ever, where there is a maximum":  {sandbox.Config{PausedLifetime: time.Hour, MaxLifetime: 2 * time.Hour}, -1, 0},
		"for ever, where pauses have no deadline": {sandbox.Config{PausedLifetime: -1, MaxLifetime: 2 * time.Hour}, -1, -1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, c.cfg)
				id := w.create(sandbox.Spec{}).ID
				sb, err := w.Pause(t.Context(), acme, id, sandbox.PauseSpec{Lifetime: c.asked})
				switch {
				case c.want == 0:
					wantKind(t, err, fault.Invalid)
					w.wantRunning(id)
				case err != nil:
					t.Fatal(err)
				case c.want < 0:
					if !sb.Deadline.IsZero() {
						t.Fatalf("the deadline is %v", sb.Deadline)
					}
				default:
					wantDeadline(t, sb, c.want)
				}
			})
		})
	}
}

func TestAutoResume(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"without it a use is refused": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			client, err := w.Agent(t.Context(), acme, id)
			if err != nil {
				t.Fatal(err)
			}
			w.pause(id, sandbox.PauseSpec{})
			for name, use := range uses(w, id, client) {
				err := use(t)
				if !fault.Is(err, fault.Conflict) || !strings.Contains(fault.Message(err), "paused; resume it first") {
					t.Fatalf("%s: %v", name, err)
				}
			}
			w.wantPaused(id)
			if w.driver.count("dial")+w.observer.runs != 0 {
				t.Fatal("a refused use reached the agent")
			}
		},
		"any use resumes it first": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{AutoResume: true}).ID
			client, err := w.Agent(t.Context(), acme, id)
			if err != nil {
				t.Fatal(err)
			}
			for name, use := range uses(w, id, client) {
				w.pause(id, sandbox.PauseSpec{})
				if err := use(t); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				if w.wantRunning(id); w.driver.isPaused(id) {
					t.Fatalf("%s did not resume it", name)
				}
			}
		},
		"a pause may turn it on and off": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			if sb := w.pause(id, sandbox.PauseSpec{AutoResume: is(true)}); !sb.AutoResume {
				t.Fatal("it is off")
			}
			if _, err := w.run(id, agentapi.RunParams{Code: "1"}); err != nil {
				t.Fatal(err)
			}
			if sb := w.pause(id, sandbox.PauseSpec{AutoResume: is(false)}); sb.AutoResume {
				t.Fatal("it is on")
			}
			_, err := w.run(id, agentapi.RunParams{Code: "1"})
			wantKind(t, err, fault.Conflict)
		},
		"many uses at once resume it once and all go on": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{AutoResume: true}).ID
			w.driver.onFreeze = func(string, string) { time.Sleep(time.Second) }
			w.pause(id, sandbox.PauseSpec{})
			var wg sync.WaitGroup
			for range 20 {
				wg.Go(func() {
					if got, err := w.run(id, agentapi.RunParams{Code: "1"}); err != nil || !slices.Equal(got, plain) {
						t.Errorf("%v, %v", got, err)
					}
				})
			}
			wg.Wait()
			if n := w.driver.count("resume"); n != 1 || len(w.observer.resumed) != 1 {
				t.Fatalf("resumed %d times, observed %d", n, len(w.observer.resumed))
			}
			want := []sandbox.LifecycleType{sandbox.LifecycleCreated, sandbox.LifecycleStarted, sandbox.LifecyclePaused, sandbox.LifecycleResumed}
			if got := w.events(sandbox.EventQuery{Sandbox: id}); !slices.Equal(got, want) {
				t.Fatalf("events are %v", got)
			}
		},
		"a use that cannot resume it says why": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{AutoResume: true}).ID
			w.pause(id, sandbox.PauseSpec{})
			w.driver.failWith(failing("resume", 1, errBoom))
			if _, err := w.run(id, agentapi.RunParams{Code: "1"}); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
			w.wantPaused(id)
			if _, err := w.run(id, agentapi.RunParams{Code: "1"}); err != nil {
				t.Fatal(err)
			}
		},
		"a user who leaves while it resumes leaves it resumed": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{AutoResume: true}).ID
			w.pause(id, sandbox.PauseSpec{})
			w.driver.onFreeze = func(string, string) { time.Sleep(time.Second) }
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			for _, err := range w.Run(ctx, acme, id, agentapi.RunParams{Code: "1"}) {
				if err == nil {
					break
				}
			}
			w.wantRunning(id)
		},
		"a create with the key of a paused sandbox finds it, and wakes it where that is a use": func(t *testing.T, w *world) {
			for _, auto := range []bool{false, true} {
				key := map[bool]string{false: "sleeper", true: "waker"}[auto]
				id := w.create(sandbox.Spec{Key: key, AutoResume: auto}).ID
				w.pause(id, sandbox.PauseSpec{})
				want := map[bool]sandbox.State{false: sandbox.StatePaused, true: sandbox.StateRunning}[auto]
				sb, created, err := w.Create(t.Context(), acme, sandbox.Spec{Key: key})
				if err != nil || created || sb.ID != id || sb.State != want {
					t.Fatalf("%s is %s, created %v, %v", sb.ID, sb.State, created, err)
				}
			}
		},
	})
}

// uses are all the ways in which somebody can use a sandbox; client was made before.
func uses(w *world, id string, client *agentapi.Client) map[string]func(t *testing.T) error {
	return map[string]func(t *testing.T) error{
		"run": func(*testing.T) error { _, err := w.run(id, agentapi.RunParams{Code: "1"}); return err },
		"exec": func(t *testing.T) error {
			stream, err := w.Exec(t.Context(), acme, id, agentapi.ExecParams{Argv: []string{"true"}})
			if err == nil {
				stream.Close()
			}
			return err
		},
		"kernel": func(t *testing.T) error {
			_, err := w.StartKernel(t.Context(), acme, id, sandbox.KernelSpec{})
			return err
		},
		"old client": func(t *testing.T) error { _, err := client.Kernels(t.Context()); return err },
		"new client": func(t *testing.T) error {
			c, err := w.Agent(t.Context(), acme, id)
			if err != nil {
				return err
			}
			_, err = c.Kernels(t.Context())
			return err
		},
	}
}

func TestIdlePause(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"an idle sandbox is paused instead of killed": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Hour, IdleTimeout: time.Minute, IdleAction: sandbox.IdlePause, AutoResume: true}).ID
			sleep(time.Minute)
			wantDeadline(t, w.wantPaused(id), 24*time.Hour)
			sleep(time.Hour)
			w.wantPaused(id)
			if _, err := w.run(id, agentapi.RunParams{Code: "1"}); err != nil {
				t.Fatal(err)
			}
			wantDeadline(t, w.wantRunning(id), 59*time.Minute)
			sleep(time.Minute)
			w.wantPaused(id)
			want := []sandbox.LifecycleType{
				sandbox.LifecycleCreated, sandbox.LifecycleStarted, sandbox.LifecyclePaused, sandbox.LifecycleResumed, sandbox.LifecyclePaused,
			}
			if got := w.events(sandbox.EventQuery{Sandbox: id}); !slices.Equal(got, want) {
				t.Fatalf("events are %v", got)
			}
		},
		"its lifetime still ends it": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute, IdleTimeout: time.Hour, IdleAction: sandbox.IdlePause}).ID
			sleep(time.Minute)
			w.wantEnded(id, sandbox.CauseExpired)
		},
		"a use that comes while it is being paused wakes it": func(t *testing.T, w *world) {
			w.driver.onFreeze = func(string, string) { time.Sleep(time.Second) }
			id := w.create(sandbox.Spec{Lifetime: time.Hour, IdleTimeout: time.Minute, IdleAction: sandbox.IdlePause, AutoResume: true}).ID
			sleep(time.Minute + time.Millisecond) // in the middle of the pause
			got, err := w.run(id, agentapi.RunParams{Code: "1"})
			wantTypes(t, got, err, plain...)
			if w.wantRunning(id); w.driver.isPaused(id) || w.driver.count("pause") != 1 || w.driver.count("resume") != 1 {
				t.Fatalf("%d pauses, %d resumes", w.driver.count("pause"), w.driver.count("resume"))
			}
		},
		"a use that holds it keeps it from being paused": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Hour, IdleTimeout: time.Minute, IdleAction: sandbox.IdlePause}).ID
			stream, err := w.Exec(t.Context(), acme, id, agentapi.ExecParams{Argv: []string{"sleep"}})
			if err != nil {
				t.Fatal(err)
			}
			sleep(10 * time.Minute)
			w.wantRunning(id)
			stream.Close()
			sleep(time.Minute)
			w.wantPaused(id)
		},
		"a use that comes while the pause waits for its turn wins": func(t *testing.T, w *world) {
			w.driver.failWith(func(op string, _ int) error {
				if op == "change" {
					time.Sleep(2 * time.Second)
				}
				return nil
			})
			id := w.create(sandbox.Spec{Lifetime: time.Hour, IdleTimeout: time.Minute, IdleAction: sandbox.IdlePause}).ID
			sleep(59 * time.Second)
			var wg sync.WaitGroup
			wg.Go(func() {
				if _, err := w.SetNetwork(t.Context(), acme, id, policy.Network{Mode: policy.None}); err != nil {
					t.Error(err)
				}
			})
			sleep(1500 * time.Millisecond) // the idle clock waits for the change to end
			stream, err := w.Exec(t.Context(), acme, id, agentapi.ExecParams{Argv: []string{"sleep"}})
			if err != nil {
				t.Fatal(err)
			}
			wg.Wait()
			sleep(time.Minute)
			if w.wantRunning(id); w.driver.count("pause") != 0 {
				t.Fatal("it was paused under a run")
			}
			stream.Close()
			sleep(time.Minute + 2*time.Second)
			w.wantPaused(id)
		},
		"a pause that fails is tried again": func(t *testing.T, w *world) {
			w.driver.failWith(failing("pause", 2, errBoom))
			id := w.create(sandbox.Spec{Lifetime: time.Hour, IdleTimeout: time.Minute, IdleAction: sandbox.IdlePause}).ID
			sleep(time.Minute)
			w.wantRunning(id)
			sleep(time.Minute)
			w.wantPaused(id)
			if n := w.driver.count("pause"); n != 3 {
				t.Fatalf("%d attempts, want 3", n)
			}
		},
		"an unknown action is refused": func(t *testing.T, w *world) {
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{IdleAction: "nap"})
			wantKind(t, err, fault.Invalid)
		},
	})
}

func TestPausedRecovery(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a paused sandbox is adopted as it was and goes on where it was": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute, IdleTimeout: time.Second * 30}).ID
			sleep(20 * time.Second)
			before := w.pause(id, sandbox.PauseSpec{})
			sleep(time.Hour)
			w.restart()
			if diff := cmp.Diff(before, w.wantPaused(id)); diff != "" {
				t.Fatal(diff)
			}
			if w.observer.adopted != 1 {
				t.Fatalf("%d adopted", w.observer.adopted)
			}
			wantDeadline(t, w.resume(id), 40*time.Second)
			sleep(30 * time.Second)
			w.wantEnded(id, sandbox.CauseIdle)
		},
		"a paused sandbox that is gone has an end": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.pause(id, sandbox.PauseSpec{})
			w.Manager.Close()
			w.driver.vanish()
			w.serve()
			w.wantEnded(id, sandbox.CauseMakerDied)
		},
		"a pause that the row does not know is the driver's to tell": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute}).ID
			w.store.failWith(failing("save paused", 1, errBoom))
			if _, err := w.Pause(t.Context(), acme, id, sandbox.PauseSpec{}); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
			sleep(20 * time.Second)
			w.restart()
			wantDeadline(t, w.wantPaused(id), 24*time.Hour-20*time.Second)
			events := w.events(sandbox.EventQuery{Sandbox: id})
			if want := []sandbox.LifecycleType{sandbox.LifecycleAdopted, sandbox.LifecyclePaused}; !slices.Equal(events[2:], want) {
				t.Fatalf("events are %v", events)
			}
			wantDeadline(t, w.resume(id), 40*time.Second)
		},
		"a pause that nobody recorded outlives the lifetime before it": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute}).ID
			w.store.failWith(failing("save paused", 1, errBoom))
			_, _ = w.Pause(t.Context(), acme, id, sandbox.PauseSpec{}) // checked above
			w.Manager.Close()
			sleep(time.Hour)
			w.serve()
			w.wantPaused(id)
			wantDeadline(t, w.resume(id), 300*time.Second)
		},
		"a resume that the row does not know is the driver's to tell": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute}).ID
			w.pause(id, sandbox.PauseSpec{})
			w.store.failWith(failing("save running", 1, errBoom))
			if _, err := w.Resume(t.Context(), acme, id, 0); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
			sleep(20 * time.Second)
			w.restart()
			wantDeadline(t, w.wantRunning(id), 40*time.Second)
			if sb := w.get(id); !sb.PausedAt.IsZero() {
				t.Fatalf("paused at %v", sb.PausedAt)
			}
			events := w.events(sandbox.EventQuery{Sandbox: id})
			if want := []sandbox.LifecycleType{sandbox.LifecycleAdopted, sandbox.LifecycleResumed}; !slices.Equal(events[3:], want) {
				t.Fatalf("events are %v", events)
			}
		},
		"a resume that was cut short gets its deadline": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute}).ID
			w.pause(id, sandbox.PauseSpec{})
			w.Manager.Close()
			w.driver.setPaused(id, false)
			sleep(time.Hour)
			w.serve()
			sb := w.wantRunning(id)
			wantDeadline(t, sb, time.Minute)
			if !w.driver.deadline(id).Equal(sb.Deadline) {
				t.Fatal("the driver does not know it")
			}
			sleep(time.Minute)
			w.wantEnded(id, sandbox.CauseExpired)
		},
	})
}
