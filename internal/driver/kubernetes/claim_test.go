package kubernetes_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/driver/kubernetes"
)

// fakePods puts Pods that wait, and that nobody runs, before the API server.
func (a *api) fakePods(digest string, n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range n {
		name := fmt.Sprintf("cove-fake-%d", i)
		a.put("pods", name, object{
			"metadata": object{
				"name": name, "uid": "uid-" + name, "annotations": object{"x": "y"}, "creationTimestamp": time.Now().UTC().Format(time.RFC3339),
				"labels": object{"app.kubernetes.io/managed-by": "cove", "cove.dev/state": "idle", "cove.dev/template": "python", "cove.dev/digest": digest},
			},
			"status": object{"phase": "Running", "podIP": "192.0.2.1", "conditions": []any{object{"type": "Ready", "status": "True"}}},
		}, "ADDED")
	}
}

// sandboxes are the ids that Pods have.
func (a *api) sandboxes() map[string]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := map[string]string{}
	for key, o := range a.objects {
		labels, _ := o["metadata"].(object)["labels"].(object)
		if id, ok := labels["cove.dev/sandbox"].(string); ok {
			all[key] = id
		}
	}
	return all
}

func TestNoPodIsClaimedTwice(t *testing.T) {
	t.Parallel()
	const servers, pods = 4, 1000
	a := newAPI(t)
	before := open(t, a, "server-0", map[string]kubernetes.Template{"python": {Image: "host"}})
	before.Close()
	a.fakePods(before.Digest("python"), pods)
	kinds := map[string]kubernetes.Template{"python": {Image: "host", Pool: pods}}
	var all []*kubernetes.Driver
	for i := range servers {
		all = append(all, open(t, a, fmt.Sprintf("server-%d", i), kinds))
	}
	race(t, all, pods)
	byPod := a.sandboxes()
	ids := map[string]bool{}
	for pod, id := range byPod {
		if ids[id] {
			t.Errorf("%s has a second Pod: %s", id, pod)
		}
		ids[id] = true
	}
	if len(ids) != pods {
		t.Errorf("%d sandboxes", len(ids))
	}
	t.Logf("%d writes for %d claims by %d servers", a.count("PATCH pods"), pods, servers)
}

// race has every server claim until each of so many sandboxes has a Pod.
func race(t *testing.T, servers []*kubernetes.Driver, pods int) {
	t.Helper()
	var mu sync.Mutex
	winners := map[string]string{} // Pod → sandbox
	var wg sync.WaitGroup
	const hands = 8
	for s, d := range servers {
		for h := range hands {
			wg.Go(func() {
				for i := h; i < pods/len(servers); i += hands {
					id := fmt.Sprintf("sb-%d-%d", s, i)
					deadline := time.Now().Add(time.Minute)
					for {
						pod, err := d.Claim(t.Context(), "python", id)
						if err != nil {
							t.Error(err)
							return
						}
						if pod != "" {
							mu.Lock()
							if other := winners[pod]; other != "" {
								t.Errorf("%s was given to %s and to %s", pod, other, id)
							}
							winners[pod] = id
							mu.Unlock()
							break
						}
						if time.Now().After(deadline) {
							t.Errorf("%s found no Pod", id)
							return
						}
						time.Sleep(5 * time.Millisecond) // its view is behind
					}
				}
			})
		}
	}
	wg.Wait()
	if len(winners) != pods {
		t.Errorf("%d Pods were claimed, not %d", len(winners), pods)
	}
}
