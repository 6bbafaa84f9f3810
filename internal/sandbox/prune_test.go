package sandbox_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

func TestMaxEnded(t *testing.T) {
	for name, c := range map[string]struct{ most, want int }{
		"bound":    {3, 3},
		"no bound": {0, 8},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, sandbox.Config{MaxEnded: c.most})
				end := func(p auth.Principal) string {
					sb, _, err := w.Create(t.Context(), p, sandbox.Spec{})
					if err != nil {
						t.Fatal(err)
					}
					if _, err := w.Kill(t.Context(), p, sb.ID); err != nil {
						t.Fatal(err)
					}
					time.Sleep(time.Millisecond) // so that no two end at the same time
					synctest.Wait()
					return sb.ID
				}
				lives := w.create(sandbox.Spec{})
				other := end(globex)
				var ids []string
				for range 8 {
					ids = append(ids, end(acme))
				}
				if got := len(w.all()); got != c.want+1 {
					t.Errorf("%d sandboxes are left, want %d and one that lives", got, c.want)
				}
				for i, id := range ids {
					_, err := w.Get(t.Context(), acme, id)
					if kept := i >= len(ids)-c.want; kept != (err == nil) || !kept && !fault.Is(err, fault.NotFound) {
						t.Errorf("end %d: %v, want it kept: %v", i, err, kept)
					}
				}
				events, err := w.store.Events(t.Context(), "acme", sandbox.EventQuery{Sandbox: ids[0]}, 10)
				if err != nil || (len(events) > 0) != (c.want == len(ids)) {
					t.Errorf("the first one's events: %v, %v", events, err)
				}
				if sb := w.get(lives.ID); sb.State != sandbox.StateRunning {
					t.Errorf("the one that lives is %s", sb.State)
				}
				if _, err := w.Get(t.Context(), globex, other); err != nil {
					t.Errorf("another tenant's: %v", err)
				}
			})
		})
	}
}
