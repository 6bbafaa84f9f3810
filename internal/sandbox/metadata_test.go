package sandbox_test

import (
	"errors"
	"maps"
	"strings"
	"sync"
	"testing"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func TestMetadataChanges(t *testing.T) {
	put := func(k, v string) func(map[string]string) (map[string]string, error) {
		return func(old map[string]string) (map[string]string, error) {
			merged := maps.Clone(old)
			merged[k] = v
			return merged, nil
		}
	}
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"a change is seen, survives a restart and is told": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Metadata: map[string]string{"a": "b"}}).ID
			sb, err := w.SetMetadata(t.Context(), acme, id, put("c", "d"))
			if err != nil || sb.Metadata["a"] != "b" || sb.Metadata["c"] != "d" {
				t.Fatalf("%+v, %v", sb.Metadata, err)
			}
			w.restart()
			if got := w.get(id).Metadata; len(got) != 2 {
				t.Fatalf("after a restart it is %v", got)
			}
			if types := w.events(sandbox.EventQuery{Sandbox: id}); types[2] != sandbox.LifecycleMetadata {
				t.Fatalf("events are %v", types)
			}
		},
		"changes at once are all kept": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Metadata: map[string]string{"a": "b"}}).ID
			var all sync.WaitGroup
			for _, k := range strings.Split("cdefghij", "") {
				all.Go(func() {
					if _, err := w.SetMetadata(t.Context(), acme, id, put(k, k)); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			if got := w.get(id).Metadata; len(got) != 9 {
				t.Fatalf("it is %v", got)
			}
		},
		"what is refused changes nothing": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{Metadata: map[string]string{"a": "b"}}).ID
			if _, err := w.SetMetadata(t.Context(), acme, id, put("", "x")); !fault.Is(err, fault.Invalid) {
				t.Errorf("an empty key: %v", err)
			}
			no := errors.New("no")
			if _, err := w.SetMetadata(t.Context(), acme, id, func(map[string]string) (map[string]string, error) { return nil, no }); !errors.Is(err, no) {
				t.Errorf("%v", err)
			}
			if _, err := w.SetMetadata(t.Context(), auth.Principal{Tenant: "globex"}, id, put("x", "y")); !fault.Is(err, fault.NotFound) {
				t.Errorf("another tenant: %v", err)
			}
			if got := w.get(id).Metadata; len(got) != 1 {
				t.Fatalf("it is %v", got)
			}
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			if _, err := w.SetMetadata(t.Context(), acme, id, put("x", "y")); !fault.Is(err, fault.Gone) {
				t.Errorf("after its end: %v", err)
			}
		},
	})
}

func TestAnEndThatADialectSaw(t *testing.T) {
	claims(t, sandbox.Config{}, map[string]func(*testing.T, *world){
		"the first cause is kept": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			sb, err := w.End(t.Context(), acme, id, sandbox.CauseFailed, "its entrypoint ended with exit status 3")
			if err != nil || sb.State != sandbox.StateEnded || sb.CauseMessage != "its entrypoint ended with exit status 3" {
				t.Fatalf("%+v, %v", sb, err)
			}
			if _, err := w.Kill(t.Context(), acme, id); err != nil {
				t.Fatal(err)
			}
			w.wantEnded(id, sandbox.CauseFailed)
		},
		"another tenant's is not there": func(t *testing.T, w *world) {
			id := w.create(sandbox.Spec{}).ID
			if _, err := w.End(t.Context(), auth.Principal{Tenant: "globex"}, id, sandbox.CauseExited, ""); !fault.Is(err, fault.NotFound) {
				t.Fatal(err)
			}
			w.wantRunning(id)
		},
	})
}
