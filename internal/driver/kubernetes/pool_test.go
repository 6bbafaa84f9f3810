package kubernetes_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/driver/kubernetes"
)

// eventually waits for something that the driver does beside.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not seen: %s", what)
		}
	}
}

// pods counts those in a state that are not being deleted.
func (a *api) pods(state string) (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, o := range a.objects {
		meta := o["metadata"].(object)
		labels, _ := meta["labels"].(object)
		if strings.HasPrefix(key, "pods/") && labels["cove.dev/state"] == state && meta["deletionTimestamp"] == nil {
			n++
		}
	}
	return n
}

// finish plays a kubelet that lets go of what was deleted, and makes Pods ready.
func (a *api) finish(t *testing.T, status object) {
	t.Helper()
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			a.mu.Lock()
			changed := a.changed
			for key, o := range a.objects {
				name, isPod := strings.CutPrefix(key, "pods/")
				switch {
				case !isPod:
				case o["metadata"].(object)["deletionTimestamp"] != nil:
					a.put("pods", name, clone(o), "DELETED")
				case o["status"] == nil || len(o["status"].(object)) == 0:
					made := clone(o)
					made["status"] = clone(status)
					a.put("pods", name, made, "MODIFIED")
				}
			}
			a.mu.Unlock()
			select {
			case <-changed:
			case <-stop:
				return
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-done })
}

var ready = object{"phase": "Running", "podIP": "192.0.2.1", "conditions": []any{object{"type": "Ready", "status": "True"}}}

func TestOneServerKeepsThePool(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	a.finish(t, ready)
	kinds := map[string]kubernetes.Template{"python": {Image: "img", Pool: 7}}
	one := open(t, a, "server-1", kinds)
	eventually(t, "a full pool", func() bool { return a.pods("idle") == 7 })
	two := open(t, a, "server-2", kinds)
	for i := range 3 {
		eventually(t, "a claim", func() bool {
			name, err := two.Claim(t.Context(), "python", fmt.Sprintf("sb-%d", i))
			if err != nil {
				t.Fatal(err)
			}
			return name != ""
		})
	}
	eventually(t, "a pool that is full again", func() bool { return a.pods("idle") == 7 })
	if n := a.pods("claimed"); n != 3 {
		t.Errorf("%d are claimed", n)
	}
	if made := a.count("POST pods"); made != 10 {
		t.Errorf("%d Pods were made", made)
	}
	if err := one.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := two.Claim(t.Context(), "python", "sb-9"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another server that keeps the pool", func() bool { return a.pods("idle") == 7 })
}

func TestPoolsOfTemplatesThatAreAlikeAreTwo(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	a.finish(t, ready)
	open(t, a, "server-1", map[string]kubernetes.Template{"one": {Image: "img", Pool: 3}, "two": {Image: "img", Pool: 1}, "none": {Image: "img"}})
	eventually(t, "full pools", func() bool { return a.pods("idle") == 4 })
	eventually(t, "some looks of the leader's", func() bool { return a.count("PUT leases") > 0 })
	if made, gone := a.count("POST pods"), a.count("DELETE pods"); made != 4 || gone != 0 {
		t.Errorf("%d Pods were made and %d deleted", made, gone)
	}
}

func TestAPoolShrinksAndIsReplaced(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	a.finish(t, ready)
	first := open(t, a, "server-1", map[string]kubernetes.Template{"python": {Image: "img", Pool: 5}})
	eventually(t, "a full pool", func() bool { return a.pods("idle") == 5 })
	first.Close()
	second := open(t, a, "server-1", map[string]kubernetes.Template{"python": {Image: "img", Pool: 2}})
	eventually(t, "a smaller pool", func() bool { return a.pods("idle") == 2 })
	second.Close()
	a.mu.Lock() // those that are there are older than a server with another configuration would leave alone
	for key, o := range a.objects {
		if name, isPod := strings.CutPrefix(key, "pods/"); isPod {
			old := clone(o)
			old["metadata"].(object)["creationTimestamp"] = time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)
			a.put("pods", name, old, "MODIFIED")
		}
	}
	a.mu.Unlock()
	before := a.count("POST pods")
	open(t, a, "server-1", map[string]kubernetes.Template{"python": {Image: "another", Pool: 2}})
	eventually(t, "Pods of the new image only", func() bool { return a.count("POST pods") == before+2 && a.pods("idle") == 2 && a.pods("retired") == 0 })
}

func TestPodsThatFailAreMadeAgainLessAndLess(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	a.finish(t, object{"phase": "Failed", "reason": "Error", "message": "no"})
	open(t, a, "server-1", map[string]kubernetes.Template{"python": {Image: "img", Pool: 1}})
	eventually(t, "a second attempt", func() bool { return a.count("POST pods") >= 2 })
	begun := time.Now()
	eventually(t, "a fourth attempt", func() bool { return a.count("POST pods") >= 4 })
	if took := time.Since(begun); took < 3*time.Second {
		t.Errorf("two more attempts took only %v", took)
	}
	if n := a.count("POST pods"); n > 4 {
		t.Errorf("%d Pods were made", n)
	}
}

func TestALeaderThatCannotWriteStopsLeading(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	d := open(t, a, "server-1", map[string]kubernetes.Template{"python": {Image: "img"}})
	eventually(t, "a leader", d.Leads)
	a.mu.Lock()
	a.refuse = func(r *http.Request) int {
		if strings.Contains(r.URL.Path, "leases") {
			return http.StatusInternalServerError
		}
		return 0
	}
	a.mu.Unlock()
	d.Lapse()
	if d.Leads() {
		t.Error("it still leads")
	}
	a.mu.Lock()
	a.refuse = nil
	a.mu.Unlock()
	eventually(t, "a leader again", d.Leads)
}

func TestAPodThatWasClaimedAndNeverBootedIsRemoved(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	newKubelet(t, a)
	kinds := map[string]kubernetes.Template{"python": template(t, 1)}
	first := open(t, a, "server-1", kinds)
	if err := first.Prepare(t.Context(), "acme", first.Templates()[0]); err != nil {
		t.Fatal(err)
	}
	if name, err := first.Claim(t.Context(), "python", "sb-1"); err != nil || name == "" {
		t.Fatalf("%q, %v", name, err)
	}
	first.Close()
	quick(t, a, "server-2", kinds)
	eventually(t, "no such Pod", func() bool { return a.pods("claimed") == 0 })
}

func TestASandboxThatDoesNotAnswerIsLeftAlone(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	status := clone(ready)
	status["podIP"] = "127.0.0.1" // where nobody listens
	a.finish(t, status)
	kinds := map[string]kubernetes.Template{"python": {Image: "img", Pool: 1}}
	d := quick(t, a, "server-1", kinds)
	eventually(t, "a claim", func() bool {
		name, err := d.Claim(t.Context(), "python", "sb-1")
		if err != nil {
			t.Fatal(err)
		}
		return name != ""
	})
	eventually(t, "the question", func() bool { return d.Asked() == 1 })
	if a.pods("claimed") != 1 {
		t.Error("it was ended")
	}
}
