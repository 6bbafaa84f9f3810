package kubernetes_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/kubernetes"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	domain "github.com/covehq/cove/internal/template"
)

func request(d *kubernetes.Driver, id string) sandbox.StartRequest {
	return sandbox.StartRequest{ID: id, Tenant: "acme", Template: d.Templates()[0], Network: policy.Network{Mode: policy.None}}
}

func start(t *testing.T, d *kubernetes.Driver, req sandbox.StartRequest) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if err := d.Start(ctx, req); err != nil {
		t.Fatal(err)
	}
}

func agent(d *kubernetes.Driver, id string) *agentapi.Client {
	return agentapi.NewClient(func(ctx context.Context) (net.Conn, error) { return d.Dial(ctx, id) })
}

func awaitEnd(t *testing.T, d *kubernetes.Driver, id string) sandbox.Ended {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for e := range d.Ended(ctx) {
		if e.ID == id {
			return e
		}
	}
	t.Fatalf("the end of %s was never told", id)
	return sandbox.Ended{}
}

func TestASandboxCostsTwoWrites(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	newKubelet(t, a)
	d := open(t, a, "server-1", map[string]kubernetes.Template{"python": template(t, 2)})
	eventually(t, "a full pool", func() bool { return a.pods("idle") == 2 })
	if err := d.Prepare(t.Context(), "acme", d.Templates()[0]); err != nil {
		t.Fatal(err)
	}
	patches, deletes := a.count("PATCH pods"), a.count("DELETE pods")
	begun := time.Now()
	start(t, d, request(d, "sb-1"))
	t.Logf("a claim took %v", time.Since(begun))
	if err := d.Stop(t.Context(), "sb-1", sandbox.CauseKilled); err != nil {
		t.Fatal(err)
	}
	if p, del := a.count("PATCH pods")-patches, a.count("DELETE pods")-deletes; p != 1 || del != 1 {
		t.Errorf("%d patches and %d deletes", p, del)
	}
	eventually(t, "a full pool again", func() bool { return a.pods("idle") == 2 })
	if n := a.count("POST pods"); n != 3 {
		t.Errorf("%d Pods were made", n)
	}
}

func TestAnotherServerTakesOver(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	newKubelet(t, a)
	kinds := map[string]kubernetes.Template{"python": template(t, 1)}
	first := open(t, a, "server-1", kinds)
	deadline := time.Now().Add(time.Hour).Truncate(time.Second)
	req := request(first, "sb-1")
	req.Deadline = deadline
	start(t, first, req)
	first.Close()
	second := open(t, a, "server-2", kinds)
	list, err := second.List(t.Context())
	if err != nil || len(list) != 1 || list[0].ID != "sb-1" || list[0].Tenant != "acme" || list[0].Owner != "server-1" || !list[0].Deadline.Equal(deadline) {
		t.Fatalf("%+v, %v", list, err)
	}
	if _, err := agent(second, "sb-1").Hello(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := second.Stop(t.Context(), "sb-1", sandbox.CauseIdle); err != nil {
		t.Fatal(err)
	}
	if e := awaitEnd(t, second, "sb-1"); e.Cause != sandbox.CauseIdle {
		t.Errorf("%+v", e)
	}
}

func TestAnEndWhileNobodyWatchedIsToldAndForgotten(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	newKubelet(t, a)
	kinds := map[string]kubernetes.Template{"python": template(t, 0)}
	first := open(t, a, "server-1", kinds)
	req := request(first, "sb-1")
	req.Deadline = time.Now().Add(time.Hour)
	start(t, first, req)
	soon := time.Now().Add(5 * time.Second)
	if err := first.Change(t.Context(), "sb-1", sandbox.Change{Deadline: &soon}); err != nil {
		t.Fatal(err)
	}
	first.Close() // and no server is there when its time has come
	eventually(t, "the Pod's own end", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		for _, o := range a.objects {
			if status, ok := o["status"].(object); ok && status["phase"] == "Failed" {
				return true
			}
		}
		return false
	})
	second := open(t, a, "server-2", kinds)
	if e := awaitEnd(t, second, "sb-1"); e.Cause != sandbox.CauseExpired {
		t.Errorf("%+v", e)
	}
	if err := second.Forget(t.Context(), "sb-1"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no Pod", func() bool { return a.pods("claimed") == 0 })
}

func TestAPodThatSomebodyDeletesIsToldSo(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	newKubelet(t, a)
	d := open(t, a, "server-1", map[string]kubernetes.Template{"python": template(t, 0)})
	start(t, d, request(d, "sb-1"))
	a.mu.Lock()
	for key, o := range a.objects {
		if name, isPod := strings.CutPrefix(key, "pods/"); isPod {
			gone := clone(o)
			gone["metadata"].(object)["deletionTimestamp"] = time.Now().UTC().Format(time.RFC3339)
			a.put("pods", name, gone, "MODIFIED")
		}
	}
	a.mu.Unlock()
	if e := awaitEnd(t, d, "sb-1"); e.Cause != sandbox.CauseDeleted || e.Message == "" {
		t.Errorf("%+v", e)
	}
	if _, err := d.Dial(t.Context(), "sb-1"); !fault.Is(err, fault.NotFound) {
		t.Errorf("%v", err)
	}
}

func TestAStartThatComesToNothingLeavesNothing(t *testing.T) {
	t.Parallel()
	pull := object{"phase": "Pending", "containerStatuses": []any{object{
		"name": "sandbox", "image": "img", "state": object{"waiting": object{"reason": "ImagePullBackOff", "message": "no such manifest"}},
	}}}
	full := object{"phase": "Pending", "conditions": []any{object{
		"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available: Insufficient memory",
	}}}
	init := object{"phase": "Failed", "initContainerStatuses": []any{object{
		"name": "install", "state": object{"terminated": object{"exitCode": 128, "reason": "StartError", "message": "not a directory"}},
	}}}
	gone := object{"phase": "Failed", "reason": "Evicted", "message": "the node was low on memory"}
	for name, c := range map[string]struct {
		status object
		patch  func(*sandbox.StartRequest)
		kind   fault.Kind
		want   string
	}{
		"an image that is not there":   {pull, nil, fault.Unavailable, "no such manifest"},
		"no room":                      {full, nil, fault.Exhausted, "Insufficient memory"},
		"an init container that fails": {init, nil, fault.Unavailable, "not a directory"},
		"a node that throws it out":    {gone, nil, fault.Unavailable, "low on memory"},
		"an id that no label can have": {full, func(r *sandbox.StartRequest) { r.ID = "sb/1" }, fault.Invalid, "cannot name"},
		"a mount":                      {full, func(r *sandbox.StartRequest) { r.Mounts = make([]sandbox.Mount, 1) }, fault.Unsupported, "mounts"},
		"another template":             {full, func(r *sandbox.StartRequest) { r.Template = &domain.Template{Name: "other"} }, fault.NotFound, "no such template"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newAPI(t)
			a.finish(t, c.status)
			d := open(t, a, "server-1", map[string]kubernetes.Template{"python": {Image: "img"}})
			req := request(d, "sb-1")
			if c.patch != nil {
				c.patch(&req)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			err := d.Start(ctx, req)
			if !fault.Is(err, c.kind) || !strings.Contains(fault.Message(err), c.want) {
				t.Errorf("%v (%s)", err, fault.KindOf(err))
			}
			eventually(t, "no Pod", func() bool { return a.pods("claimed") == 0 })
			if list, err := d.List(t.Context()); err != nil || len(list) != 0 {
				t.Errorf("%v, %v", list, err)
			}
		})
	}
}

func TestACallerWhoLeavesLeavesNothing(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	a.finish(t, object{"phase": "Pending"})
	d := open(t, a, "server-1", map[string]kubernetes.Template{"python": {Image: "img"}})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Start(ctx, request(d, "sb-1")) }()
	eventually(t, "a Pod", func() bool { return a.pods("claimed") == 1 })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	eventually(t, "no Pod", func() bool { return a.pods("claimed") == 0 })
}

func TestAnAPIServerThatFailsIsSaid(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	a.finish(t, ready)
	d := open(t, a, "server-1", map[string]kubernetes.Template{"python": {Image: "img", Pool: 1}})
	eventually(t, "a full pool", func() bool { return a.pods("idle") == 1 })
	if err := d.Prepare(t.Context(), "acme", d.Templates()[0]); err != nil {
		t.Fatal(err)
	}
	a.mu.Lock()
	a.refuse = func(r *http.Request) int {
		if r.Method == http.MethodPatch {
			return http.StatusForbidden
		}
		return 0
	}
	a.mu.Unlock()
	if err := d.Start(t.Context(), request(d, "sb-1")); !fault.Is(err, fault.Unavailable) {
		t.Errorf("%v", err)
	}
	a.mu.Lock()
	a.refuse = nil
	a.mu.Unlock()
	if name, err := d.Claim(t.Context(), "python", "sb-2"); err != nil || name == "" {
		t.Errorf("the Pod is lost: %q, %v", name, err)
	}
}

func TestOtherLimitsMakeAPodOfTheirOwn(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	newKubelet(t, a)
	d := open(t, a, "server-1", map[string]kubernetes.Template{"python": template(t, 1)})
	eventually(t, "a full pool", func() bool { return a.pods("idle") == 1 })
	req := request(d, "sb-1")
	req.Limits.MemoryBytes = 1 << 30
	req.Network = policy.Network{Mode: policy.List, Allow: prefixes("203.0.113.0/24")}
	start(t, d, req)
	if n := a.pods("idle"); n != 1 {
		t.Errorf("%d wait", n)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	own := 0
	for key, o := range a.objects {
		if strings.HasPrefix(key, "networkpolicies/cove-python-") && o["metadata"].(object)["ownerReferences"] != nil {
			own++
		}
	}
	if own != 1 {
		t.Errorf("%d policies of its own", own)
	}
}
