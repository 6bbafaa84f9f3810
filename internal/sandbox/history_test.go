package sandbox_test

import (
	"testing"
	"time"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func (d *fakeDriver) setUsage(u sandbox.Usage) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.usage = u
}

func TestHistory(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a sandbox is sampled every five seconds": func(t *testing.T, w *world) {
			sb := w.create(sandbox.Spec{Lifetime: -1})
			begun := time.Now().UTC()
			w.driver.setUsage(sandbox.Usage{CPUMS: 2500, MemoryBytes: 3, DiskBytes: 4})
			sleep(10 * time.Second)
			got, err := w.History(t.Context(), acme, sb.ID, time.Time{}, time.Time{})
			want := sandbox.Sample{At: begun.Add(5 * time.Second), CPUs: 1, CPUPercent: 50, MemoryBytes: 3,
				MemoryLimit: sb.Limits.MemoryBytes, DiskBytes: 4, DiskLimit: sb.Limits.DiskBytes}
			if err != nil || len(got) != 2 || got[0] != want {
				t.Fatalf("%+v, %v, want first %+v", got, err, want)
			}
			if want.At, want.CPUPercent = begun.Add(10*time.Second), 0; got[1] != want {
				t.Fatalf("%+v", got)
			}
			for _, c := range []struct {
				from, to time.Time
				n        int
			}{
				{begun.Add(-time.Hour), begun, 0}, {begun, begun.Add(5 * time.Second), 1},
				{begun.Add(5 * time.Second), begun.Add(time.Hour), 2}, {begun.Add(6 * time.Second), time.Time{}, 1},
			} {
				if got, err := w.History(t.Context(), acme, sb.ID, c.from, c.to); err != nil || len(got) != c.n {
					t.Fatalf("%d samples from %v to %v, %v", len(got), c.from, c.to, err)
				}
			}
		},
		"one that was never sampled is sampled when somebody asks": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			sleep(time.Second)
			for range 2 {
				if got, err := w.History(t.Context(), acme, id, time.Time{}, time.Time{}); err != nil || len(got) != 1 {
					t.Fatalf("%+v, %v", got, err)
				}
			}
		},
		"the last hour is kept, and a pause is not sampled": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: -1}).ID
			sleep(2 * time.Hour)
			at := time.Now().UTC()
			w.pause(id, sandbox.PauseSpec{})
			sleep(time.Minute)
			got, err := w.History(t.Context(), acme, id, time.Time{}, time.Time{})
			if err != nil || len(got) != 720 || got[719].At.After(at) || got[0].At.After(got[719].At) {
				t.Fatalf("%d samples, %v", len(got), err)
			}
		},
		"what the driver cannot tell is left out": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Lifetime: -1}).ID
			w.driver.failWith(failing("usage", 1, errBoom))
			sleep(10 * time.Second)
			if got, err := w.History(t.Context(), acme, id, time.Time{}, time.Time{}); err != nil || len(got) != 1 {
				t.Fatalf("%+v, %v", got, err)
			}
		},
		"another tenant's is not there, and an ended one has none": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			_, err := w.History(t.Context(), globex, id, time.Time{}, time.Time{})
			wantKind(t, err, fault.NotFound)
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			if got, err := w.History(t.Context(), acme, id, time.Time{}, time.Time{}); err != nil || len(got) != 0 {
				t.Fatalf("%+v, %v", got, err)
			}
		},
	})
}
