package kubernetes_test

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/driver/drivertest"
	"github.com/covehq/cove/internal/driver/kubernetes"
	"github.com/covehq/cove/internal/driver/kubernetes/podapi"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
)

// cluster is a real one. What starts it says in the environment where it is: COVE_TEST_KUBECONFIG, COVE_TEST_NAMESPACE ("default"), COVE_TEST_IMAGE
// (Cove's own), COVE_TEST_POD_IMAGE (with sh, python3 and pandas), COVE_TEST_SERVER_RANGE (where this process connects from)
// and COVE_TEST_OUTSIDE (an address of this machine that is the internet's to sandboxes).
type cluster struct {
	rest      *rest.Config
	core      *rest.RESTClient
	namespace string
}

func realCluster(t *testing.T) *cluster {
	t.Helper()
	file := os.Getenv("COVE_TEST_KUBECONFIG")
	if file == "" {
		skip(t, "no cluster, make test-cluster starts one")
	}
	config, err := clientcmd.BuildConfigFromFlags("", file)
	if err != nil {
		t.Fatal(err)
	}
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	its := rest.CopyConfig(config)
	its.APIPath, its.GroupVersion, its.NegotiatedSerializer, its.QPS = "/api", &corev1.SchemeGroupVersion, serializer.NewCodecFactory(scheme).WithoutConversion(), -1
	core, err := rest.RESTClientFor(its)
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{config, core, cmp.Or(os.Getenv("COVE_TEST_NAMESPACE"), "default")}
	c.clear(t)
	t.Cleanup(func() { c.clear(t) }) // after whoever was opened later is closed
	return c
}

// template is one for real Pods.
func (c *cluster) template(t *testing.T, pool int) kubernetes.Template {
	t.Helper()
	image := os.Getenv("COVE_TEST_POD_IMAGE")
	if image == "" || os.Getenv("COVE_TEST_IMAGE") == "" {
		skip(t, "no images, make test-cluster brings them")
	}
	return kubernetes.Template{
		Image: image, PullPolicy: "Never", Pool: pool, Python: "/usr/bin/python3", Preload: []string{"decimal"}, CPUs: 2, CPURequest: 0.01,
		Memory: 512 << 20, MemRequest: 32 << 20, Disk: 512 << 20,
	}
}

func (c *cluster) open(t *testing.T, owner string, kinds map[string]kubernetes.Template) *kubernetes.Driver {
	t.Helper()
	config := kubernetes.Config{
		Namespace: c.namespace, Image: cmp.Or(os.Getenv("COVE_TEST_IMAGE"), "cove"), PullPolicy: "Never", Owner: owner, Templates: kinds, Policies: true,
		Servers: map[string]string{"app.kubernetes.io/name": "cove"}, Rest: rest.CopyConfig(c.rest), Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	}
	if text := os.Getenv("COVE_TEST_SERVER_RANGE"); text != "" {
		config.ServerRanges = []netip.Prefix{netip.MustParsePrefix(text)}
	}
	d, err := kubernetes.New(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

const ours = "app.kubernetes.io/managed-by=cove"

// clear removes every Pod of ours, and waits until they are gone.
func (c *cluster) clear(t *testing.T) {
	t.Helper()
	pods := func(ctx context.Context) []corev1.Pod {
		var list corev1.PodList
		if err := c.core.Get().Namespace(c.namespace).Resource("pods").Param("labelSelector", ours).Do(ctx).Into(&list); err != nil {
			t.Fatal(err)
		}
		return list.Items
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // also after the test's own has ended
	defer cancel()
	zero := int64(0)
	for _, pod := range pods(ctx) {
		options := &metav1.DeleteOptions{}
		if pod.Spec.NodeName == "" {
			options.GracePeriodSeconds = &zero // no kubelet confirms
		}
		_ = c.core.Delete().Namespace(c.namespace).Resource("pods").Name(pod.Name).Body(options).Do(ctx).Error() // it may be gone
	}
	for len(pods(ctx)) > 0 {
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			t.Fatal("Pods are left")
		}
	}
}

// TestClusterDriver runs the contract on real Pods.
func TestClusterDriver(t *testing.T) {
	c := realCluster(t)
	kinds := map[string]kubernetes.Template{"python": c.template(t, 4)}
	d := c.open(t, "drivertest", kinds)
	drivertest.Run(t, func(*testing.T) drivertest.Subject {
		return drivertest.Subject{Driver: d, Tenant: "t1", Template: d.Templates()[0]}
	})
}

// TestClusterNoPodIsClaimedTwice needs only the API server: the test writes the status of Pods that nobody runs.
func TestClusterNoPodIsClaimedTwice(t *testing.T) {
	const servers, pods = 4, 1000
	c := realCluster(t)
	before := c.open(t, "racer", map[string]kubernetes.Template{"python": {Image: "none"}})
	template, err := before.Pod("python")
	if err != nil {
		t.Fatal(err)
	}
	before.Close()
	c.fakePods(t, template, pods)
	var all []*kubernetes.Driver
	for i := range servers {
		all = append(all, c.open(t, fmt.Sprintf("racer-%d", i), map[string]kubernetes.Template{"python": {Image: "none", Pool: pods}}))
	}
	begun := time.Now()
	race(t, all, pods)
	t.Logf("%d claims by %d servers in %v", pods, servers, time.Since(begun))
	ids := map[string]string{}
	for _, d := range all[:1] {
		list, err := d.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range list {
			if ids[i.ID] != "" {
				t.Errorf("%s has two Pods", i.ID)
			}
			ids[i.ID] = i.Owner
		}
	}
	var list corev1.PodList
	if err := c.core.Get().Namespace(c.namespace).Resource("pods").Param("labelSelector", ours+",cove.dev/state=claimed").Do(t.Context()).Into(&list); err != nil {
		t.Fatal(err)
	}
	seen := map[string]string{}
	for _, pod := range list.Items {
		id := pod.Labels["cove.dev/sandbox"]
		if seen[id] != "" {
			t.Errorf("%s has %s and %s", id, seen[id], pod.Name)
		}
		seen[id] = pod.Name
	}
	if len(seen) != pods {
		t.Errorf("%d sandboxes", len(seen))
	}
}

// fakePods makes Pods that no scheduler takes and says that they are ready.
func (c *cluster) fakePods(t *testing.T, template *corev1.Pod, n int) {
	t.Helper()
	slots := make(chan struct{}, 16)
	failed := make(chan error, n)
	for i := range n {
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			pod := template.DeepCopy()
			pod.Name, pod.Spec.SchedulerName = fmt.Sprintf("cove-fake-%d", i), "nobody"
			pod.Annotations = map[string]string{"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}
			failed <- c.fakePod(t.Context(), pod)
		}()
	}
	for range n {
		if err := <-failed; err != nil {
			t.Fatal(err)
		}
	}
}

func (c *cluster) fakePod(ctx context.Context, pod *corev1.Pod) error {
	if err := c.core.Post().Namespace(c.namespace).Resource("pods").Body(pod).Do(ctx).Error(); err != nil {
		return err
	}
	status, err := json.Marshal(map[string]any{"status": corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: "192.0.2.1", PodIPs: []corev1.PodIP{{IP: "192.0.2.1"}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
	}})
	if err != nil {
		return err
	}
	return c.core.Patch(types.MergePatchType).Namespace(c.namespace).Resource("pods").Name(pod.Name).SubResource("status").Body(status).Do(ctx).Error()
}

// TestClusterFirstCell is what a user waits for first: claim, and a cell that uses a library. It takes a small part of what a kernel takes that has to be
// started, in the same Pod.
func TestClusterFirstCell(t *testing.T) {
	c := realCluster(t)
	kind := c.template(t, 2)
	kind.Preload = []string{"pandas"}
	d := c.open(t, "first-cell", map[string]kubernetes.Template{"python": kind})
	if err := d.Prepare(t.Context(), "t1", d.Templates()[0]); err != nil {
		t.Fatal(err)
	}
	sum := func(kernel string, warm bool) {
		t.Helper()
		if k, err := agent(d, "sb-first").KernelWait(t.Context(), agentapi.KernelParams{Kernel: kernel}); err != nil || k.Warm != warm {
			t.Fatalf("kernel %s is %+v, %v", kernel, k, err)
		}
		stream, err := agent(d, "sb-first").Run(t.Context(), agentapi.RunParams{Kernel: kernel, Code: "import pandas; print(pandas.DataFrame({'a': [20, 22]}).a.sum())"})
		if err != nil {
			t.Fatal(err)
		}
		if out := said(t, stream); out != "42\n" {
			t.Fatalf("kernel %s says %q", kernel, out)
		}
	}
	begun := time.Now()
	start(t, d, request(d, "sb-first"))
	claimed := time.Since(begun)
	sum(agentapi.DefaultKernel, true)
	warm := time.Since(begun)

	begun = time.Now()
	if _, err := agent(d, "sb-first").KernelStart(t.Context(), agentapi.KernelStartParams{Kernel: "cold"}); err != nil {
		t.Fatal(err)
	}
	sum("cold", false)
	cold := time.Since(begun)
	t.Logf("claim %v, first cell after %v; of a kernel that was started after %v", claimed, warm, cold)
	if 3*warm > cold {
		t.Errorf("a claim and its first cell take %v, a kernel that is started and its first cell %v", warm, cold)
	}
}

// said is all that a run printed.
func said(t *testing.T, stream *agentapi.Stream) string {
	t.Helper()
	var out strings.Builder
	for e, err := range stream.Events() {
		if err != nil {
			t.Fatal(err)
		}
		out.Write(e.Data)
	}
	return out.String()
}

// TestClusterEnds has Pods end in ways that only a real node knows.
func TestClusterEnds(t *testing.T) {
	c := realCluster(t)
	kind := c.template(t, 0)
	kind.Memory, kind.Preload = 128<<20, nil
	d := c.open(t, "ends", map[string]kubernetes.Template{"python": kind})
	for name, end := range map[string]struct {
		do   func(t *testing.T, id string)
		want []sandbox.Cause
	}{
		"deleted": {func(t *testing.T, id string) {
			if err := c.core.Delete().Namespace(c.namespace).Resource("pods").Name(c.podOf(t, id)).Do(t.Context()).Error(); err != nil {
				t.Fatal(err)
			}
		}, []sandbox.Cause{sandbox.CauseDeleted}},
		"a deadline": {func(t *testing.T, id string) {
			soon := time.Now().Add(time.Second)
			if err := d.Change(t.Context(), id, sandbox.Change{Deadline: &soon}); err != nil {
				t.Fatal(err)
			}
		}, []sandbox.Cause{sandbox.CauseExpired}},
		"evicted": {func(t *testing.T, id string) {
			body := fmt.Sprintf(`{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":%q}}`, c.podOf(t, id))
			err := c.core.Post().Namespace(c.namespace).Resource("pods").Name(c.podOf(t, id)).SubResource("eviction").
				SetHeader("Content-Type", "application/json").Body([]byte(body)).Do(t.Context()).Error()
			if err != nil {
				t.Fatal(err)
			}
		}, []sandbox.Cause{sandbox.CauseEvicted}},
	} {
		t.Run(name, func(t *testing.T) {
			id := "sb-" + strings.ReplaceAll(name, " ", "-")
			start(t, d, request(d, id))
			end.do(t, id)
			if e := awaitEnd(t, d, id); e.Cause != end.want[0] {
				t.Errorf("%+v", e)
			}
		})
	}
}

func (c *cluster) podOf(t *testing.T, id string) string {
	t.Helper()
	var list corev1.PodList
	err := c.core.Get().Namespace(c.namespace).Resource("pods").Param("labelSelector", "cove.dev/sandbox="+id).Do(t.Context()).Into(&list)
	if err != nil || len(list.Items) != 1 {
		t.Fatalf("%d Pods, %v", len(list.Items), err)
	}
	return list.Items[0].Name
}

func (c *cluster) sh(t *testing.T, d *kubernetes.Driver, id, script string) string {
	t.Helper()
	stream, err := agent(d, id).Exec(t.Context(), agentapi.ExecParams{Argv: []string{"sh", "-c", script}})
	if err != nil {
		t.Fatal(err)
	}
	return said(t, stream)
}

// TestClusterSandboxesReachNobody needs a network that enforces policies, and an address outside of it (COVE_TEST_OUTSIDE) that sandboxes with a network
// reach: else one that reaches nothing at all would pass.
func TestClusterSandboxesReachNobody(t *testing.T) {
	c := realCluster(t)
	if os.Getenv("COVE_TEST_OUTSIDE") == "" {
		skip(t, "nowhere to listen outside of the cluster, make test-cluster says where")
	}
	outside, err := net.Listen("tcp", net.JoinHostPort(os.Getenv("COVE_TEST_OUTSIDE"), "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	kind := c.template(t, 0)
	kind.Preload = nil
	d := c.open(t, "network", map[string]kubernetes.Template{"python": kind})
	start(t, d, request(d, "sb-listens"))
	var pod corev1.Pod
	if err := c.core.Get().Namespace(c.namespace).Resource("pods").Name(c.podOf(t, "sb-listens")).Do(t.Context()).Into(&pod); err != nil {
		t.Fatal(err)
	}
	another := net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(podapi.Port)) // where this process has just reached it
	api := strings.TrimPrefix(strings.TrimPrefix(c.rest.Host, "https://"), "http://")
	for name, n := range map[string]struct {
		network policy.Network
		want    map[string]bool
	}{
		"none":     {policy.Network{Mode: policy.None}, map[string]bool{outside.Addr().String(): false, another: false, api: false}},
		"internet": {policy.Network{Mode: policy.Internet}, map[string]bool{outside.Addr().String(): true, another: false, api: false}},
	} {
		t.Run(name, func(t *testing.T) {
			req := request(d, "sb-"+name)
			req.Network = n.network
			start(t, d, req)
			for address, want := range n.want {
				if got := c.reaches(t, d, req.ID, address); got != want {
					t.Errorf("it reaches %s: %v", address, got)
				}
			}
		})
	}
}

// reaches asks until the answer has settled: a policy takes a moment to hold for a Pod that is new.
func (c *cluster) reaches(t *testing.T, d *kubernetes.Driver, id, address string) bool {
	t.Helper()
	host, port, _ := net.SplitHostPort(address)
	script := fmt.Sprintf("python3 -c \"import socket; s = socket.socket(); s.settimeout(2); print('reached', s.connect_ex(('%s', %s)) == 0)\"", host, port)
	answer, same := "", 0
	eventually(t, "one answer three times", func() bool {
		got := strings.TrimSpace(c.sh(t, d, id, script))
		if got != "reached True" && got != "reached False" {
			t.Fatalf("whether %s is reached is not told: %s", address, got)
		}
		if got != answer {
			answer, same = got, 0
		}
		same++
		return same == 3
	})
	return answer == "reached True"
}

// TestClusterALooserPodHasSudo is what a template may choose that trusts its sandboxes more.
func TestClusterALooserPodHasSudo(t *testing.T) {
	c := realCluster(t)
	kind := c.template(t, 0)
	kind.Looser = true
	d := c.open(t, "looser", map[string]kubernetes.Template{"python": kind})
	start(t, d, request(d, "sb-looser"))
	if out := c.sh(t, d, "sb-looser", "id -u; sudo id -u; sudo sh -c 'echo x > /etc/written' && cat /etc/written; cat /proc/1/environ 2>&1 | head -c 20"); !strings.HasPrefix(out, "1000\n0\nx\n") ||
		strings.Contains(out, "COVE") {
		t.Error(out)
	}
	k, err := agent(d, "sb-looser").KernelWait(t.Context(), agentapi.KernelParams{Kernel: agentapi.DefaultKernel})
	if err != nil || !k.Warm {
		t.Errorf("%+v, %v", k, err)
	}
}

// TestClusterLimitsChange needs a cluster that resizes Pods in place (Kubernetes 1.33).
func TestClusterLimitsChange(t *testing.T) {
	c := realCluster(t)
	kind := c.template(t, 0)
	kind.Preload = nil
	d := c.open(t, "limits", map[string]kubernetes.Template{"python": kind})
	start(t, d, request(d, "sb-limits"))
	limits := d.Templates()[0].Limits
	limits.MemoryBytes = 768 << 20
	if err := d.Change(t.Context(), "sb-limits", sandbox.Change{Limits: &limits}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new limit", func() bool {
		out := c.sh(t, d, "sb-limits", "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null")
		return strings.Contains(out, fmt.Sprint(768<<20))
	})
	u, err := d.Usage(t.Context(), "sb-limits")
	if err != nil || u.MemoryBytes == 0 || u.CPUMS == 0 {
		t.Errorf("%+v, %v", u, err)
	}
	begun := time.Now()
	const times = 50
	for range times {
		if _, err := agent(d, "sb-limits").Hello(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("an operation takes %v", time.Since(begun)/times)
}
