package sandbox_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// followers are streams of one tenant's events that end with the test.
type followers struct {
	heard  atomic.Int64 // events, of all streams together
	failed atomic.Int64 // streams that ended with fault.Exhausted
}

func follow(w *world, p auth.Principal, n int, q sandbox.EventQuery) *followers {
	f := &followers{}
	ctx, cancel := context.WithCancel(w.t.Context())
	w.t.Cleanup(cancel)
	q.Follow = true
	for range n {
		go func() {
			for _, err := range w.Events(ctx, p, q) {
				switch {
				case fault.Is(err, fault.Exhausted):
					f.failed.Add(1)
				case err == nil:
					f.heard.Add(1)
				}
			}
		}()
	}
	synctest.Wait()
	return f
}

func TestEvents_ShareOfTenant(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"the 65th stream is exhausted, and another tenant's is not": func(t *testing.T, w *world) {
			if f := follow(w, acme, 64, sandbox.EventQuery{}); f.failed.Load() != 0 {
				t.Fatalf("%d of 64 streams were refused", f.failed.Load())
			}
			if f := follow(w, acme, 3, sandbox.EventQuery{}); f.failed.Load() != 3 {
				t.Errorf("%d of 3 streams over the share were refused", f.failed.Load())
			}
			if f := follow(w, globex, 1, sandbox.EventQuery{}); f.failed.Load() != 0 {
				t.Error("another tenant's stream was refused")
			}
			w.events(sandbox.EventQuery{}) // one that does not follow is no stream
		},
	})
}

func TestEvents_ReadOnceForAllFollowers(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"history and news": func(t *testing.T, w *world) {
			for range 150 {
				w.create(sandbox.Spec{}) // two events each: more than one batch
			}
			before := w.store.eventReads.Load()
			f := follow(w, acme, 60, sandbox.EventQuery{})
			if got := f.heard.Load(); got != 60*300 {
				t.Fatalf("the streams heard %d events, want %d", got, 60*300)
			}
			if reads := w.store.eventReads.Load() - before; reads > 5 {
				t.Errorf("60 streams read the store %d times for the same history", reads)
			}
			before = w.store.eventReads.Load()
			for range 10 {
				w.create(sandbox.Spec{})
				synctest.Wait()
			}
			if got := f.heard.Load(); got != 60*320 {
				t.Fatalf("the streams heard %d events, want %d", got, 60*320)
			}
			if reads := w.store.eventReads.Load() - before; reads > 30 {
				t.Errorf("60 streams read the store %d times for 20 events", reads)
			}
		},
		"another tenant's events wake none": func(t *testing.T, w *world) {
			follow(w, globex, 60, sandbox.EventQuery{})
			before := w.store.eventReads.Load()
			for range 10 {
				w.create(sandbox.Spec{})
				synctest.Wait()
			}
			if reads := w.store.eventReads.Load() - before; reads > 0 {
				t.Errorf("streams of another tenant read the store %d times", reads)
			}
		},
		"history older than memory, of one sandbox": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			for range 1100 {
				w.create(sandbox.Spec{})
			}
			f := follow(w, acme, 3, sandbox.EventQuery{Sandbox: id})
			all := follow(w, acme, 2, sandbox.EventQuery{})
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if got := f.heard.Load(); got != 3*3 {
				t.Errorf("streams of one sandbox heard %d events, want 9", got)
			}
			if got, want := all.heard.Load(), int64(2*(2*1101+1)); got != want {
				t.Errorf("streams of all heard %d events, want %d", got, want)
			}
		},
	})
}
