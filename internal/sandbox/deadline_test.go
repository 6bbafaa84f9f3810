package sandbox_test

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// slowFork makes every fork take so long.
func slowFork(d time.Duration) func(context.Context, sandbox.ForkRequest) error {
	return func(ctx context.Context, _ sandbox.ForkRequest) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// pausing asks for a sandbox whose lifetime ends in a pause.
func pausing(lifetime time.Duration) sandbox.Spec {
	return sandbox.Spec{Lifetime: lifetime, DeadlineAction: sandbox.IdlePause}
}

func (w *world) wantNoDriverDeadline(id string) {
	w.t.Helper()
	if at := w.driver.deadline(id); !at.IsZero() {
		w.t.Fatalf("the driver would end it at %v", at)
	}
}

func TestPauseAtDeadline(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a lifetime may end in a pause, of which the driver has the deadline": func(t *testing.T, w *world) {
			sb := w.create(pausing(time.Minute))
			wantDeadline(t, sb, time.Minute)
			w.wantNoDriverDeadline(sb.ID)
			sleep(59 * time.Second)
			w.wantRunning(sb.ID)
			sleep(time.Second)
			paused := w.wantPaused(sb.ID)
			wantDeadline(t, paused, 24*time.Hour)
			if paused.Cold || !w.driver.deadline(sb.ID).Equal(paused.Deadline) || w.driver.count("op halt") != 0 {
				t.Fatalf("%+v", paused)
			}
			sleep(24 * time.Hour)
			w.wantEnded(sb.ID, sandbox.CauseExpired)
		},
		"a use does not put it off": func(t *testing.T, w *world) {
			id := w.create(pausing(time.Minute)).ID
			stream, err := w.Exec(t.Context(), acme, id, agentapi.ExecParams{Argv: []string{"sleep"}})
			if err != nil {
				t.Fatal(err)
			}
			defer stream.Close()
			sleep(time.Minute)
			w.wantPaused(id)
		},
		"resumed without a lifetime it has the server's default, and pauses again": func(t *testing.T, w *world) {
			id := w.create(pausing(time.Minute)).ID
			for range 2 {
				sleep(time.Minute)
				w.wantPaused(id)
				wantDeadline(t, w.resume(id), 300*time.Second)
				w.wantNoDriverDeadline(id)
				sleep(4 * time.Minute)
				w.wantRunning(id)
			}
		},
		"paused before its deadline it has what was left": func(t *testing.T, w *world) {
			id := w.create(pausing(time.Minute)).ID
			sleep(20 * time.Second)
			w.pause(id, sandbox.PauseSpec{})
			sleep(time.Hour)
			wantDeadline(t, w.resume(id), 40*time.Second)
			sleep(40 * time.Second)
			w.wantPaused(id)
		},
		"a new lifetime is kept from the driver": func(t *testing.T, w *world) {
			id := w.create(pausing(time.Minute)).ID
			sb, err := w.SetLifetime(t.Context(), acme, id, time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			wantDeadline(t, sb, time.Hour)
			w.wantNoDriverDeadline(id)
			sleep(59 * time.Minute)
			w.wantRunning(id)
			if _, err := w.SetLifetime(t.Context(), acme, id, 0); err != nil {
				t.Fatal(err)
			}
			w.wantPaused(id)
		},
		"a pause that fails is tried again": func(t *testing.T, w *world) {
			id := w.create(pausing(time.Minute)).ID
			w.driver.failWith(failing("pause", 2, errBoom))
			sleep(time.Minute)
			w.wantRunning(id)
			sleep(4 * time.Second)
			w.wantPaused(id)
		},
		"a fork that goes on is waited for": func(t *testing.T, w *world) {
			id := w.create(pausing(time.Minute)).ID
			w.driver.onFork = slowFork(70 * time.Second)
			if _, err := w.Fork(t.Context(), acme, id, sandbox.ForkSpec{Count: 1, Wait: 2 * time.Minute}); err != nil {
				t.Fatal(err)
			}
			sleep(2 * time.Second)
			w.wantPaused(id)
			child := w.children(id)[0]
			w.wantNoDriverDeadline(child.ID)
			sleep(300 * time.Second)
			w.wantPaused(child.ID)
		},
		"one that is overdue when a server comes is paused": func(t *testing.T, w *world) {
			id := w.create(pausing(time.Minute)).ID
			w.Manager.Close()
			sleep(time.Hour)
			if w.driver.isPaused(id) || !w.driver.has(id) {
				t.Fatal("it did not run on while nobody watched")
			}
			w.serve()
			w.wantPaused(id)
		},
		"a driver that cannot pause refuses it": func(t *testing.T, w *world) {
			w.driver.caps.Pause = false
			_, _, err := w.Create(t.Context(), acme, pausing(time.Minute))
			wantKind(t, err, fault.Unsupported)
		},
		"an unknown action is invalid": func(t *testing.T, w *world) {
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{DeadlineAction: "sleep"})
			wantKind(t, err, fault.Invalid)
		},
	})
}

func TestAdoptPauseAtDeadline(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"the row's deadline is in force": func(t *testing.T, w *world) {
			id := w.create(pausing(time.Minute)).ID
			w.restart()
			wantDeadline(t, w.wantRunning(id), time.Minute)
			sleep(time.Minute)
			w.wantPaused(id)
		},
		"a pause without a deadline of its own is given one": func(t *testing.T, w *world) {
			id := w.create(pausing(time.Minute)).ID
			w.Manager.Close()
			w.driver.setPaused(id, true)
			sleep(20 * time.Second)
			w.serve()
			sb := w.wantPaused(id)
			wantDeadline(t, sb, 24*time.Hour)
			if !w.driver.deadline(id).Equal(sb.Deadline) {
				t.Fatal("the driver does not know the deadline")
			}
			wantDeadline(t, w.resume(id), 40*time.Second)
		},
		"a resume that was cut short leaves the driver no deadline": func(t *testing.T, w *world) {
			id := w.create(pausing(time.Minute)).ID
			w.pause(id, sandbox.PauseSpec{})
			w.Manager.Close()
			w.driver.setPaused(id, false)
			w.serve()
			wantDeadline(t, w.wantRunning(id), time.Minute)
			w.wantNoDriverDeadline(id)
		},
	})
}

func TestExpire(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a lifetime that ends is ended now": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			if sb, err := w.Expire(t.Context(), acme, id); err != nil || sb.State != sandbox.StateEnded {
				t.Fatalf("%+v, %v", sb, err)
			}
			w.wantEnded(id, sandbox.CauseExpired)
			_, err := w.Expire(t.Context(), acme, id)
			wantKind(t, err, fault.Gone)
		},
		"a lifetime that pauses is paused now, as its deadline would": func(t *testing.T, w *world) {
			spec := pausing(time.Minute)
			spec.ColdPause = true
			id := w.create(spec).ID
			for range 2 {
				if sb, err := w.Expire(t.Context(), acme, id); err != nil || !sb.Cold {
					t.Fatalf("%+v, %v", sb, err)
				}
			}
			w.wantPaused(id)
			wantDeadline(t, w.resume(id), 300*time.Second)
		},
		"another tenant's is not there": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			_, err := w.Expire(t.Context(), globex, id)
			wantKind(t, err, fault.NotFound)
			w.wantRunning(id)
		},
	})
}

func TestColdPause(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"processes are ended before it stands still, and a kernel is made after": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{AutoResume: true}).ID
			var order []string
			synctest.Wait()
			w.driver.failWith(func(op string, _ int) error { order = append(order, op); return nil })
			if sb := w.pause(id, sandbox.PauseSpec{Cold: true}); !sb.Cold {
				t.Fatalf("%+v", sb)
			}
			if want := []string{"dial", "op halt", "pause", "change"}; !slices.Equal(order, want) {
				t.Fatalf("the driver was asked for %v, want %v", order, want)
			}
			order = nil
			if sb := w.resume(id); sb.Cold {
				t.Fatalf("%+v", sb)
			}
			want := []string{"resume", "change", "dial", "op kernel_start", "dial", "op kernel_wait"}
			if !slices.Equal(order, want) {
				t.Fatalf("the driver was asked for %v, want %v", order, want)
			}
			for event, err := range w.Run(t.Context(), acme, id, agentapi.RunParams{Code: "1"}) {
				if err != nil || event.Type == agentapi.EventNotice {
					t.Fatalf("%+v, %v", event, err)
				}
			}
		},
		"a use does not resume it": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{AutoResume: true, Key: "k"}).ID
			w.pause(id, sandbox.PauseSpec{Cold: true})
			_, err := w.Exec(t.Context(), acme, id, agentapi.ExecParams{Argv: []string{"true"}})
			wantKind(t, err, fault.Conflict)
			if sb, created, err := w.Create(t.Context(), acme, sandbox.Spec{Key: "k"}); err != nil || created || sb.State != sandbox.StatePaused {
				t.Fatalf("%+v, %v", sb, err)
			}
			w.wantPaused(id)
		},
		"it stays cold over a restart": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.pause(id, sandbox.PauseSpec{Cold: true})
			w.restart()
			if sb := w.wantPaused(id); !sb.Cold {
				t.Fatalf("%+v", sb)
			}
			starts := w.driver.count("op kernel_start")
			if sb := w.resume(id); sb.Cold || w.driver.count("op kernel_start") != starts+1 {
				t.Fatalf("%+v", sb)
			}
		},
		"what was asked for at the create is how its deadline pauses it": func(t *testing.T, w *world) {
			spec := pausing(time.Minute)
			spec.ColdPause = true
			id := w.create(spec).ID
			sleep(time.Minute)
			if sb := w.wantPaused(id); !sb.Cold {
				t.Fatalf("%+v", sb)
			}
		},
		"processes that cannot be ended leave it running": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.driver.failWith(failing("dial", 1, errBoom))
			if _, err := w.Pause(t.Context(), acme, id, sandbox.PauseSpec{Cold: true}); err == nil {
				t.Fatal("it was paused")
			}
			if sb := w.wantRunning(id); sb.Cold || w.driver.count("pause") != 0 {
				t.Fatalf("%+v", sb)
			}
		},
		"a kernel that cannot be made does not keep it from going on": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.pause(id, sandbox.PauseSpec{Cold: true})
			w.driver.failWith(func(op string, _ int) error {
				if op == "dial" {
					return errBoom
				}
				return nil
			})
			w.resume(id)
			w.wantRunning(id)
		},
		"one that ends is not cold any more": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.pause(id, sandbox.PauseSpec{Cold: true})
			if sb, err := w.Kill(t.Context(), acme, id); err != nil || sb.Cold {
				t.Fatalf("%+v, %v", sb, err)
			}
		},
	})
}

func TestResumeLifetime(t *testing.T) {
	claims(t, sandbox.Config{MaxLifetime: time.Hour, DefaultLifetime: time.Minute}, map[string]func(*testing.T, *world){
		"a use that resumes a sandbox lets it live for so long": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute, AutoResume: true, ResumeLifetime: 5 * time.Minute}).ID
			w.pause(id, sandbox.PauseSpec{})
			stream, err := w.Exec(t.Context(), acme, id, agentapi.ExecParams{Argv: []string{"true"}})
			if err != nil {
				t.Fatal(err)
			}
			stream.Close()
			wantDeadline(t, w.wantRunning(id), 5*time.Minute)
		},
		"its owner's resume is not such a use": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute, AutoResume: true, ResumeLifetime: 5 * time.Minute}).ID
			w.pause(id, sandbox.PauseSpec{})
			wantDeadline(t, w.resume(id), time.Minute)
		},
		"it is no longer than the server allows, and not negative": func(t *testing.T, w *world) {
			if sb := w.create(sandbox.Spec{ResumeLifetime: 2 * time.Hour}); sb.ResumeLifetime != time.Hour {
				t.Fatalf("it is %v", sb.ResumeLifetime)
			}
			_, _, err := w.Create(t.Context(), acme, sandbox.Spec{ResumeLifetime: -1})
			wantKind(t, err, fault.Invalid)
		},
	})
}

func TestExtendLifetime(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a deadline moves away and never nearer": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute}).ID
			for _, c := range []struct{ ask, want time.Duration }{{time.Second, time.Minute}, {time.Hour, time.Hour}, {time.Minute, time.Hour}} {
				sb, err := w.ExtendLifetime(t.Context(), acme, id, c.ask)
				if err != nil {
					t.Fatal(err)
				}
				wantDeadline(t, sb, c.want)
				if !w.driver.deadline(id).Equal(sb.Deadline) {
					t.Fatal("the driver does not know the deadline")
				}
			}
			if sb, err := w.ExtendLifetime(t.Context(), acme, id, -1); err != nil || !sb.Deadline.IsZero() {
				t.Fatalf("%+v, %v", sb, err)
			}
			if sb, err := w.ExtendLifetime(t.Context(), acme, id, time.Hour); err != nil || !sb.Deadline.IsZero() {
				t.Fatalf("%+v, %v", sb, err)
			}
		},
		"the deadline of a pause is left alone": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			before := w.pause(id, sandbox.PauseSpec{})
			_, err := w.ExtendLifetime(t.Context(), acme, id, 48*time.Hour)
			wantKind(t, err, fault.Conflict)
			if sb := w.wantPaused(id); !sb.Deadline.Equal(before.Deadline) {
				t.Fatalf("the deadline is %v", sb.Deadline)
			}
		},
		"another tenant's is not there": func(t *testing.T, w *world) {
			_, err := w.ExtendLifetime(t.Context(), globex, w.create(sandbox.Spec{}).ID, time.Hour)
			wantKind(t, err, fault.NotFound)
		},
	})
}
