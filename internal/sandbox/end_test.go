package sandbox_test

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
)

func (w *world) wantRunning(id string) sandbox.Sandbox {
	w.t.Helper()
	synctest.Wait()
	sb := w.get(id)
	if sb.State != sandbox.StateRunning || !w.driver.has(id) {
		w.t.Fatalf("sandbox is %s by %q, want running", sb.State, sb.Cause)
	}
	return sb
}

// sleep lets time pass and everything that it starts happen.
func sleep(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestKill(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a killed sandbox ends once and can be read afterwards": func(t *testing.T, w *world) {
			w.driver.usage = sandbox.Usage{CPUMS: 7, PeakBytes: 8}
			id := w.create(sandbox.Spec{Metadata: map[string]string{"a": "b"}}).ID
			first, err := w.Kill(t.Context(), acme, id)
			if err != nil {
				t.Fatal(err)
			}
			second, err := w.Kill(t.Context(), acme, id)
			if err != nil || second.EndedAt != first.EndedAt || first.Cause != sandbox.CauseKilled || second.Usage.CPUMS != 7 {
				t.Fatalf("kills answer %+v and %+v, %v", first, second, err)
			}
			sb := w.wantEnded(id, sandbox.CauseKilled)
			if sb.Metadata["a"] != "b" || w.observer.ended[id] != 1 || w.driver.causes[0] != sandbox.CauseKilled {
				t.Fatalf("%+v, observed %d ends", sb, w.observer.ended[id])
			}
			if u, err := w.Usage(t.Context(), acme, id); err != nil || u.CPUMS != 7 {
				t.Fatalf("usage after the end is %+v, %v", u, err)
			}
			synctest.Wait()
			if w.driver.remembered() != 0 {
				t.Fatal("the driver was not told to forget it")
			}
		},
		"many kills at once are one end": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.driver.onStop = func(string) { time.Sleep(time.Second) }
			var wg sync.WaitGroup
			for range 10 {
				wg.Go(func() {
					if sb, err := w.Kill(t.Context(), acme, id); err != nil || sb.State != sandbox.StateEnded {
						t.Errorf("%s, %v", sb.State, err)
					}
				})
			}
			wg.Wait()
			synctest.Wait()
			w.wantEnded(id, sandbox.CauseKilled)
			if w.observer.ended[id] != 1 {
				t.Fatalf("observed %d ends", w.observer.ended[id])
			}
		},
		"an unknown sandbox cannot be killed": func(t *testing.T, w *world) {
			_, err := w.Kill(t.Context(), acme, "sbnone")
			wantKind(t, err, fault.NotFound)
		},
		"a stop that fails is told and tried again": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.driver.failWith(failing("stop", 3, errBoom))
			if _, err := w.Kill(t.Context(), acme, id); !errors.Is(err, errBoom) {
				t.Fatalf("error is %v", err)
			}
			if sb := w.get(id); sb.State != sandbox.StateStopping || sb.Cause != sandbox.CauseKilled {
				t.Fatalf("sandbox is %s by %s", sb.State, sb.Cause)
			}
			_, err := w.Agent(t.Context(), acme, id)
			wantKind(t, err, fault.Gone)
			sleep(time.Minute)
			w.wantEnded(id, sandbox.CauseKilled)
		},
		"an end that cannot be recorded is told from memory and recorded later": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.store.failWith(failing("save ended", 3, errBoom))
			if sb, err := w.Kill(t.Context(), acme, id); err != nil || sb.State != sandbox.StateEnded {
				t.Fatalf("%s, %v", sb.State, err)
			}
			if sb := w.get(id); sb.State != sandbox.StateEnded {
				t.Fatalf("sandbox is %s", sb.State)
			}
			sleep(time.Minute)
			w.wantEnded(id, sandbox.CauseKilled)
			if w.observer.ended[id] != 1 {
				t.Fatalf("observed %d ends", w.observer.ended[id])
			}
		},
		"an end that the driver tells and that cannot be recorded is not forgotten until it is": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.store.failWith(failing("save ended", 1, errBoom))
			w.driver.die(sandbox.Ended{ID: id, Cause: sandbox.CauseAgentDied, At: time.Now()})
			synctest.Wait()
			if w.driver.remembered() != 1 {
				t.Fatal("forgotten too early")
			}
			sleep(time.Minute)
			w.wantEnded(id, sandbox.CauseAgentDied)
			if w.driver.remembered() != 0 {
				t.Fatal("never forgotten")
			}
		},
	})
}

func TestCauses(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"an end that the driver tells is recorded with message and usage": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			sleep(time.Second)
			end := sandbox.Ended{ID: id, Cause: sandbox.CauseOOM, Message: "out of memory: python3 (pid 17)", At: time.Now(), Usage: sandbox.Usage{OOMKills: 1}}
			w.driver.die(end)
			synctest.Wait()
			sb := w.wantEnded(id, sandbox.CauseOOM)
			if sb.CauseMessage != end.Message || sb.Usage != end.Usage || !sb.EndedAt.Equal(end.At) {
				t.Fatalf("recorded %+v", sb)
			}
			_, err := w.Agent(t.Context(), acme, id)
			if wantKind(t, err, fault.Gone); !strings.Contains(fault.Message(err), "pid 17") {
				t.Fatalf("the sentence is %q", fault.Message(err))
			}
		},
		"a death before a kill is the cause although its news come later": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			died := time.Now()
			sleep(time.Second)
			w.driver.onStop = func(id string) {
				w.driver.onStop = nil
				w.driver.die(sandbox.Ended{ID: id, Cause: sandbox.CauseOOM, At: died})
				synctestYield()
			}
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			w.wantEnded(id, sandbox.CauseOOM)
		},
		"what a stop does to the agent is not the cause": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.driver.onStop = func(id string) {
				w.driver.onStop = nil
				w.driver.die(sandbox.Ended{ID: id, Cause: sandbox.CauseAgentDied, At: time.Now().Add(time.Millisecond)})
				synctestYield()
			}
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			w.wantEnded(id, sandbox.CauseKilled)
		},
		"a driver that stops telling is asked again": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			w.driver.failWith(func(op string, n int) error {
				if op == "ended" && n < 5 {
					return errBoom
				}
				return nil
			})
			w.driver.die(sandbox.Ended{ID: id, Cause: sandbox.CauseAgentDied, At: time.Now()})
			sleep(time.Minute)
			w.wantEnded(id, sandbox.CauseAgentDied)
		},
	})
}

// synctestYield gives other goroutines of the bubble the time to settle.
func synctestYield() { time.Sleep(time.Nanosecond) }

func TestLifetime(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a sandbox expires at its deadline and not before": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute}).ID
			sleep(time.Minute - time.Second)
			w.wantRunning(id)
			sleep(time.Second)
			w.wantEnded(id, sandbox.CauseExpired)
		},
		"a sandbox without a deadline stays": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: -1}).ID
			sleep(100 * time.Hour)
			w.wantRunning(id)
		},
		"many sandboxes expire each at its own time": func(t *testing.T, w *world) {
			var ids []string
			for i := range 50 {
				ids = append(ids, w.create(sandbox.Spec{Lifetime: time.Duration(1+(i*37)%50) * time.Minute}).ID)
			}
			sleep(25*time.Minute + time.Second)
			if n := w.driver.size(); n != 25 {
				t.Fatalf("%d live after half the time, want 25", n)
			}
			sleep(25 * time.Minute)
			for _, id := range ids {
				w.wantEnded(id, sandbox.CauseExpired)
			}
		},
		"a new lifetime counts from now and is told to the driver": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: time.Minute}).ID
			sleep(30 * time.Second)
			sb, err := w.SetLifetime(t.Context(), acme, id, time.Minute)
			want := time.Now().Add(time.Minute)
			if err != nil || !sb.Deadline.Equal(want) || !w.driver.changes[0].Deadline.Equal(want) {
				t.Fatalf("deadline is %v, %v", sb.Deadline, err)
			}
			sleep(59 * time.Second)
			w.wantRunning(id)
			sleep(time.Second)
			w.wantEnded(id, sandbox.CauseExpired)
		},
		"a lifetime can be shortened, ended at once and taken away": func(t *testing.T, w *world) {
			short, now, none := w.create(sandbox.Spec{}).ID, w.create(sandbox.Spec{}).ID, w.create(sandbox.Spec{}).ID
			for id, d := range map[string]time.Duration{short: time.Second, now: 0, none: -1} {
				if _, err := w.SetLifetime(t.Context(), acme, id, d); err != nil {
					t.Fatal(err)
				}
			}
			synctest.Wait()
			w.wantEnded(now, sandbox.CauseExpired)
			w.wantRunning(short)
			sleep(time.Second)
			w.wantEnded(short, sandbox.CauseExpired)
			sleep(time.Hour)
			if !w.wantRunning(none).Deadline.IsZero() {
				t.Fatal("there is a deadline left")
			}
		},
		"an ended sandbox gets no new lifetime": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			_, err := w.SetLifetime(t.Context(), acme, id, time.Hour)
			wantKind(t, err, fault.Gone)
		},
		"a change that the driver refuses changes nothing": func(t *testing.T, w *world) {
			before := w.create(sandbox.Spec{})
			w.driver.failWith(failing("change", 2, fault.New(fault.Unsupported, "no")))
			_, err := w.SetLifetime(t.Context(), acme, before.ID, time.Hour)
			wantKind(t, err, fault.Unsupported)
			_, err = w.SetNetwork(t.Context(), acme, before.ID, policy.Network{Mode: policy.None})
			wantKind(t, err, fault.Unsupported)
			if after := w.get(before.ID); after.Deadline != before.Deadline || after.Network.Mode != before.Network.Mode {
				t.Fatalf("sandbox is %+v", after)
			}
		},
		"a network is replaced, told to the driver and kept": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			sb, err := w.SetNetwork(t.Context(), acme, id, policy.Network{Mode: policy.None})
			if err != nil || sb.Network.Mode != policy.None || w.driver.changes[0].Network.Mode != policy.None {
				t.Fatalf("network is %+v, %v", sb.Network, err)
			}
			_, err = w.SetNetwork(t.Context(), acme, id, policy.Network{Mode: "lan"})
			wantKind(t, err, fault.Invalid)
			w.restart()
			if w.get(id).Network.Mode != policy.None {
				t.Fatal("the next server does not know it")
			}
		},
	})
	claims(t, sandbox.Config{DefaultNetwork: policy.Network{Mode: policy.None}}, map[string]func(*testing.T, *world){
		"a network that is not said, or only narrowed, is no wider than the default": func(t *testing.T, w *world) {
			wide := &policy.Network{Mode: policy.Internet, Deny: []netip.Prefix{netip.MustParsePrefix("8.8.8.8/32")}}
			if sb := w.create(sandbox.Spec{Network: wide, NarrowNetwork: true}); sb.Network.Mode != policy.None {
				t.Fatalf("network is %+v", sb.Network)
			}
			id := w.create(sandbox.Spec{Network: wide}).ID
			for _, c := range []sandbox.NetworkChange{{}, {Network: wide}, {Network: wide, Narrow: true}} {
				want := policy.None
				if c.Network != nil && !c.Narrow {
					want = policy.Internet
				}
				if sb, err := w.ChangeNetwork(t.Context(), acme, id, c); err != nil || sb.Network.Mode != want {
					t.Fatalf("network is %+v, %v", sb.Network, err)
				}
			}
		},
	})
	claims(t, sandbox.Config{MaxLifetime: time.Hour}, map[string]func(*testing.T, *world){
		"a new lifetime keeps to the maximum": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			for _, d := range []time.Duration{2 * time.Hour, -1} {
				_, err := w.SetLifetime(t.Context(), acme, id, d)
				wantKind(t, err, fault.Invalid)
			}
		},
	})
}

func TestIdle(t *testing.T) {
	spec := sandbox.Spec{Lifetime: -1, IdleTimeout: time.Minute}
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a sandbox that nobody uses ends": func(t *testing.T, w *world) {
			id := w.create(spec).ID
			sleep(59 * time.Second)
			w.wantRunning(id)
			sleep(time.Second)
			w.wantEnded(id, sandbox.CauseIdle)
		},
		"reading about a sandbox is not using it": func(t *testing.T, w *world) {
			id := w.create(spec).ID
			sleep(30 * time.Second)
			w.get(id)
			w.all()
			sleep(30 * time.Second)
			w.wantEnded(id, sandbox.CauseIdle)
		},
		"every use begins the idle time anew": func(t *testing.T, w *world) {
			id := w.create(spec).ID
			client, err := w.Agent(t.Context(), acme, id)
			if err != nil {
				t.Fatal(err)
			}
			for range 5 {
				sleep(50 * time.Second)
				if _, err := client.Hello(t.Context()); err != nil {
					t.Fatal(err)
				}
				if sb := w.get(id); !sb.LastUsed.Equal(time.Now()) {
					t.Fatalf("last used %v, now is %v", sb.LastUsed, time.Now())
				}
			}
			sleep(time.Minute)
			w.wantEnded(id, sandbox.CauseIdle)
			_, err = client.Hello(t.Context())
			wantKind(t, err, fault.Gone)
		},
		"a create that finds it is a use": func(t *testing.T, w *world) {
			spec := spec
			spec.Key = "k"
			id := w.create(spec).ID
			sleep(50 * time.Second)
			if _, _, err := w.Create(t.Context(), acme, spec); err != nil {
				t.Fatal(err)
			}
			sleep(50 * time.Second)
			w.wantRunning(id)
		},
		"a long stream is use until it ends": func(t *testing.T, w *world) {
			id := w.create(spec).ID
			stream, err := w.Exec(t.Context(), acme, id, agentapi.ExecParams{Argv: []string{"sleep"}})
			if err != nil {
				t.Fatal(err)
			}
			sleep(time.Hour)
			w.wantRunning(id)
			stream.Close()
			stream.Close()
			sleep(59 * time.Second)
			w.wantRunning(id)
			sleep(time.Second)
			w.wantEnded(id, sandbox.CauseIdle)
			if !slices.Equal(w.observer.kinds, []sandbox.RunKind{sandbox.RunCommand}) {
				t.Fatalf("observed %v", w.observer.kinds)
			}
		},
		"a deadline ends a sandbox in use": func(t *testing.T, w *world) {
			spec := spec
			spec.Lifetime = 2 * time.Minute
			id := w.create(spec).ID
			stream, err := w.Exec(t.Context(), acme, id, agentapi.ExecParams{Argv: []string{"sleep"}})
			if err != nil {
				t.Fatal(err)
			}
			defer stream.Close()
			sleep(2 * time.Minute)
			w.wantEnded(id, sandbox.CauseExpired)
		},
		"the idle time begins anew with the next server": func(t *testing.T, w *world) {
			id := w.create(spec).ID
			sleep(50 * time.Second)
			w.restart()
			sleep(59 * time.Second)
			w.wantRunning(id)
			sleep(time.Second)
			w.wantEnded(id, sandbox.CauseIdle)
		},
	})
}

func TestRetention(t *testing.T) {
	claims(t, sandbox.Config{Retention: 2 * time.Hour}, map[string]func(*testing.T, *world){
		"an ended sandbox is readable until its retention has passed": func(t *testing.T, w *world) {
			id, lives := w.create(sandbox.Spec{}).ID, w.create(sandbox.Spec{Lifetime: -1}).ID
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			sleep(119 * time.Minute)
			w.wantEnded(id, sandbox.CauseKilled)
			sleep(10 * time.Minute)
			_, err := w.Get(t.Context(), acme, id)
			wantKind(t, err, fault.NotFound)
			_, err = w.Kill(t.Context(), acme, id)
			wantKind(t, err, fault.NotFound)
			w.wantRunning(lives)
		},
	})
}
