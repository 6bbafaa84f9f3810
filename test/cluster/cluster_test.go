package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

// running is the cluster that COVE_TEST_CLUSTER names; tests of it are not for machines without one.
func running(t *testing.T) *cluster {
	t.Helper()
	dir := os.Getenv("COVE_TEST_CLUSTER")
	if dir == "" {
		t.Skip("needs a cluster: make test-cluster")
	}
	c, err := newCluster(dir, false, t.Output(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// namespaceOf makes a namespace that ends with the test.
func namespaceOf(t *testing.T, c *cluster) string {
	t.Helper()
	var b [4]byte
	_, _ = rand.Read(b[:])
	name := "test-" + hex.EncodeToString(b[:])
	c.must(t, "create", "namespace", name)
	t.Cleanup(func() { remains(t, c, "namespace", name) })
	return name
}

// remains removes something at the end of a test, whose own context is over by then.
func remains(t *testing.T, c *cluster, kind, name string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if out, err := exec.CommandContext(ctx, filepath.Join(c.bin, "kubectl"), "--kubeconfig", c.path("kubeconfig"),
		"delete", kind, name, "--ignore-not-found", "--timeout=50s").CombinedOutput(); err != nil {
		t.Errorf("remove %s %s: %v: %s", kind, name, err, out)
	}
}

// mustApply gives the cluster objects.
func (c *cluster) mustApply(t *testing.T, text string) {
	t.Helper()
	if err := c.apply(t.Context(), text); err != nil {
		t.Fatal(err)
	}
}

func (c *cluster) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.kubectl(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

const listener = `{apiVersion: v1, kind: Pod, metadata: {name: %s, labels: {app: %[1]s}}, spec: {
 terminationGracePeriodSeconds: 0, automountServiceAccountToken: false, dnsPolicy: Default,
 containers: [{name: c, image: "localhost/cove-sandbox:test", imagePullPolicy: Never, command: [python3, -m, http.server, "8000"],
  resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 256Mi}}, readinessProbe: {tcpSocket: {port: 8000}, periodSeconds: 1}}]}}`

func TestClusterRunsPods(t *testing.T) {
	c := running(t)
	ns := namespaceOf(t, c)
	c.mustApply(t, strings.Replace(fmt.Sprintf(listener, "web"), "{name: web,", "{namespace: "+ns+", name: web,", 1))
	c.must(t, "wait", "-n", ns, "--for=condition=Ready", "pod/web", "--timeout=60s")
	if out := c.must(t, "exec", "-n", ns, "web", "--", "python3", "-c", "import pandas; print(pandas.DataFrame({'a': [1, 2]}).a.sum())"); strings.TrimSpace(out) != "3" {
		t.Errorf("pandas says %q", out)
	}
	address := c.must(t, "get", "pod", "-n", ns, "web", "-o", "jsonpath={.status.podIP}")
	if err := reach(t.Context(), net.JoinHostPort(address, "8000")); err != nil {
		t.Errorf("from the host to a Pod: %v", err)
	}
	c.must(t, "expose", "pod", "-n", ns, "web", "--port=80", "--target-port=8000")
	service := c.must(t, "get", "service", "-n", ns, "web", "-o", "jsonpath={.spec.clusterIP}")
	if err := until(t.Context(), 10*time.Second, "from the host to a Service", func(ctx context.Context) (bool, error) {
		err := reach(ctx, net.JoinHostPort(service, "80"))
		return err == nil, err
	}); err != nil {
		t.Error(err)
	}
}

func TestClusterOfAnAPIAlone(t *testing.T) {
	running(t)
	c, err := newCluster(filepath.Join(t.TempDir(), "api"), true, t.Output(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second meets the first, whose database was ended behind its back
		if err := up(t.Context(), c, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := tell(t.Context(), filepath.Join(c.bin, "kubectl"), "--kubeconfig", c.path("kubeconfig"), "get", "namespace", "default"); err != nil {
			t.Error(err)
		}
		if err := killPart(t.Context(), c, []string{"etcd"}); err != nil {
			t.Error(err)
		}
	}
	if err := c.down(t.Context()); err != nil || !missing(c.dir) {
		t.Errorf("it is not gone: %v", err)
	}
}

func reach(ctx context.Context, address string) error {
	conn, err := (&net.Dialer{Timeout: 2 * time.Second}).DialContext(ctx, "tcp", address)
	if err == nil {
		conn.Close()
	}
	return err
}

func TestClusterEnforcesPolicies(t *testing.T) {
	c := running(t)
	ns := namespaceOf(t, c)
	for _, name := range []string{"web", "friend", "stranger"} {
		c.mustApply(t, strings.Replace(fmt.Sprintf(listener, name), "{name: "+name+",", "{namespace: "+ns+", name: "+name+",", 1))
	}
	c.must(t, "wait", "-n", ns, "--for=condition=Ready", "pod", "--all", "--timeout=60s")
	address := c.must(t, "get", "pod", "-n", ns, "web", "-o", "jsonpath={.status.podIP}")
	reaches := func(from string) bool {
		_, err := c.kubectl(t.Context(), "exec", "-n", ns, from, "--", "python3", "-c",
			fmt.Sprintf("import socket; socket.create_connection((%q, 8000), 1)", address))
		return err == nil
	}
	if !reaches("friend") || !reaches("stranger") {
		t.Fatal("without a policy somebody does not reach the Pod")
	}
	c.mustApply(t, `{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {namespace: `+ns+`, name: friends}, spec: {
 podSelector: {matchLabels: {app: web}}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {matchLabels: {app: friend}}}]}]}}`)
	if err := until(t.Context(), 20*time.Second, "the policy", func(context.Context) (bool, error) { return !reaches("stranger"), nil }); err != nil {
		t.Error(err)
	}
	if !reaches("friend") {
		t.Error("who is allowed does not reach the Pod")
	}
}

// database makes an empty one on a server in the cluster's network.
func database(t *testing.T, c *cluster) {
	t.Helper()
	if err := c.start(t.Context(), c.parts()["postgres"]); err != nil {
		t.Fatal(err)
	}
	for _, sql := range []string{"DROP DATABASE IF EXISTS cove WITH (FORCE)", "CREATE DATABASE cove"} {
		if _, err := tell(t.Context(), filepath.Join(postgresBin(), "psql"), "-h", nodeAddress, "-U", "cove", "-d", "postgres", "-c", sql); err != nil {
			t.Fatal(err)
		}
	}
}

// volume is a directory of this machine as the volume that both servers have.
func volume(t *testing.T, c *cluster) {
	t.Helper()
	dir, err := os.MkdirTemp("", "cove-volume")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		remains(t, c, "persistentvolume", "cove")
		os.RemoveAll(dir)
	})
	c.mustApply(t, `{apiVersion: v1, kind: PersistentVolume, metadata: {name: cove}, spec: {
 capacity: {storage: 10Gi}, accessModes: [ReadWriteMany], persistentVolumeReclaimPolicy: Retain, hostPath: {path: `+dir+`}}}`)
}

// deployed is Cove inside the cluster, from its chart.
type deployed struct {
	cluster *cluster
	key     string
	api     *client.Client
}

// deploy takes more values as YAML.
func deploy(t *testing.T, c *cluster, more string) *deployed {
	t.Helper()
	if os.Getenv(rendererVariable) == "" {
		t.Skip("needs the chart's renderer and Cove's image: make test-cluster")
	}
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(more), 0o600); err != nil {
		t.Fatal(err)
	}
	url, key, err := c.deploy(t.Context(), file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.whyNotServed(context.WithoutCancel(t.Context())))
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if err := c.undeploy(ctx); err != nil {
			t.Error(err)
		}
	})
	d := &deployed{cluster: c, key: key}
	if d.api, err = client.New(url, key); err != nil {
		t.Fatal(err)
	}
	return d
}

// forbidden is what the server was refused: its role must be enough.
func (d *deployed) forbidden(t *testing.T) {
	t.Helper()
	for line := range strings.Lines(d.cluster.must(t, "logs", "-n", "cove", "deployment/cove", "--all-pods", "--tail=-1")) {
		if strings.Contains(strings.ToLower(line), "forbidden") {
			t.Errorf("the server may not do what it needs: %s", line)
		}
	}
}
