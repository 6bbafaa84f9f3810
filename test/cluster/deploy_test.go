package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

func TestClusterServesCoveFromItsChart(t *testing.T) {
	c := running(t)
	d := deploy(t, c, "")
	d.use(t)
	d.claim(t)
	d.apart(t)
	d.forbidden(t)
	if policy := c.must(t, "get", "namespace", "cove-sandboxes", "-o", `jsonpath={.metadata.labels.pod-security\.kubernetes\.io/enforce}`); policy != "restricted" {
		t.Errorf("sandboxes' namespace enforces %q", policy)
	}
}

func TestClusterServesCoveFromTwoServers(t *testing.T) {
	c := running(t)
	database(t, c)
	volume(t, c)
	d := deploy(t, c, "replicas: 2\ndatabase: {existingSecret: cove-database}\npersistence: {enabled: true}\n")
	for range 3 { // whichever server answers
		d.use(t)
	}
	kept, err := d.api.Create(t.Context(), client.CreateRequest{Template: "python"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kept.Run(t.Context(), client.RunRequest{Code: "x = 41"}); err != nil {
		t.Fatal(err)
	}
	for _, server := range strings.Fields(c.must(t, "get", "pods", "-n", "cove", "-o", "name")) {
		c.must(t, "delete", "-n", "cove", server, "--grace-period=0", "--force")
		if err := until(t.Context(), 40*time.Second, "the sandbox after its server's end", func(ctx context.Context) (bool, error) {
			out, err := kept.Run(ctx, client.RunRequest{Code: "print(x + 1)"})
			return err == nil && strings.TrimSpace(out.Stdout) == "42", err
		}); err != nil {
			t.Error(err)
		}
		c.must(t, "--request-timeout=2m", "rollout", "status", "-n", "cove", "deployment/cove", "--timeout=90s")
	}
	d.use(t)
	d.claim(t)
	d.forbidden(t)
}

func TestClusterTakesThePlainManifests(t *testing.T) {
	c := running(t)
	for _, name := range []string{"cove", "cove-sandboxes"} {
		c.must(t, "create", "namespace", name)
		t.Cleanup(func() { remains(t, c, "namespace", name) })
	}
	for _, file := range []string{"cove.yaml", "cove-ha.yaml"} {
		c.must(t, "apply", "--dry-run=server", "--validate=strict", "-f", filepath.Join(c.repo, "deploy/manifests", file))
	}
}

// use is what a person tries first: a sandbox, a cell that needs pandas, a command, a file, the end.
func (d *deployed) use(t *testing.T) {
	t.Helper()
	sandbox, err := d.api.Create(t.Context(), client.CreateRequest{Template: "python"})
	if err != nil {
		t.Fatal(err)
	}
	out, err := sandbox.Run(t.Context(), client.RunRequest{Code: "import pandas\nprint(pandas.DataFrame({'a': [20, 22]}).a.sum())"})
	if err != nil || strings.TrimSpace(out.Stdout) != "42" {
		t.Errorf("the cell says %+v, %v", out, err)
	}
	out, err = sandbox.Exec(t.Context(), client.ExecRequest{Command: "id -u; test -e /var/run/secrets/kubernetes.io || echo no token"})
	if err != nil || out.Stdout != "1000\nno token\n" {
		t.Errorf("the command says %+v, %v", out, err)
	}
	if err := sandbox.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := until(t.Context(), 30*time.Second, "the Pod's end", gone(d.cluster, sandbox.ID)); err != nil {
		t.Error(err)
	}
}

// claim is what a client of agent-sandbox does: an object through the façade, and requests through the router's Service.
func (d *deployed) claim(t *testing.T) {
	t.Helper()
	address := d.cluster.must(t, "get", "service", "-n", "cove", "cove", "-o", "jsonpath={.spec.clusterIP}")
	facade := func(args ...string) string {
		t.Helper()
		out, err := tell(t.Context(), filepath.Join(d.cluster.bin, "kubectl"), append([]string{"--kubeconfig", "/dev/null", "--server", "https://" + address + ":7445",
			"--token", d.key, "--insecure-skip-tls-verify", "--request-timeout=60s"}, args...)...)
		if err != nil {
			t.Fatal(strings.ReplaceAll(err.Error(), d.key, "KEY"))
		}
		return out
	}
	file := filepath.Join(t.TempDir(), "claim.json")
	object := `{"apiVersion": "extensions.agents.x-k8s.io/v1alpha1", "kind": "SandboxClaim", "metadata": {"name": "first"}, "spec": {"sandboxTemplateRef": {"name": "python"}}}`
	if err := os.WriteFile(file, []byte(object), 0o600); err != nil {
		t.Fatal(err)
	}
	facade("create", "-f", file, "--validate=false")
	facade("wait", "--for=condition=Ready", "sandboxclaim/first", "--timeout=60s")

	router := d.cluster.must(t, "get", "service", "-n", "cove", "sandbox-router-svc", "-o", "jsonpath={.spec.clusterIP}")
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+router+":8080/execute", strings.NewReader(`{"command": "echo from $(id -un)"}`))
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{
		"X-Sandbox-ID": "first", "X-Sandbox-Namespace": "default", "X-Sandbox-Port": "8888", "Authorization": "Bearer " + d.key, "Content-Type": "application/json",
	} {
		request.Header.Set(name, value)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var said struct {
		Stdout   string `json:"stdout"`
		ExitCode int    `json:"exit_code"`
	}
	if err := json.NewDecoder(response.Body).Decode(&said); err != nil || response.StatusCode != http.StatusOK || strings.TrimSpace(said.Stdout) != "from user" {
		t.Errorf("the router says %s, %+v, %v", response.Status, said, err)
	}
	facade("delete", "sandboxclaim", "first", "--timeout=30s")
}

// apart is what sandboxes reach, and who reaches them. The host's end of the cluster's link plays the internet.
func (d *deployed) apart(t *testing.T) {
	t.Helper()
	listen := func(address string) string {
		l, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l.Addr().String()
	}
	outside, inside := listen(outsideAddress), listen(hostAddress)
	start := func(network *client.Network) (*client.Sandbox, string) {
		sandbox, err := d.api.Create(t.Context(), client.CreateRequest{Template: "python", Network: network})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = sandbox.Kill(context.WithoutCancel(t.Context())) })
		return sandbox, d.cluster.must(t, "get", "pods", "-n", "cove-sandboxes", "-l", "cove.dev/sandbox="+sandbox.ID, "-o", "jsonpath={.items[0].status.podIP}")
	}
	open, address := start(nil)
	closed, other := start(&client.Network{Mode: "none"})
	agent := func(pod string) string { return net.JoinHostPort(pod, "7070") } // where the server reaches it, with every command of these tests

	for name, c := range map[string]struct {
		from *client.Sandbox
		to   string
		want bool
	}{
		"the internet":                         {open, outside, true},
		"a private network":                    {open, inside, false},
		"the API server":                       {open, nodeAddress + ":6443", false},
		"the API server's Service":             {open, serviceAddress + ":443", false},
		"another sandbox":                      {open, agent(other), false},
		"the internet, without any network":    {closed, outside, false},
		"another sandbox, without any network": {closed, agent(address), false},
	} {
		if got := reaches(t, c.from, c.to); got != c.want {
			t.Errorf("a sandbox reaches %s: %v", name, got)
		}
	}
	if err := reach(t.Context(), agent(address)); err == nil {
		t.Error("a program outside the cluster reaches a sandbox's agent")
	}
}

// reaches asks until the answer settles: a policy takes a moment to hold for a Pod that has just been claimed.
func reaches(t *testing.T, from *client.Sandbox, address string) bool {
	t.Helper()
	host, port, _ := net.SplitHostPort(address)
	code := fmt.Sprintf("import socket\ntry:\n    socket.create_connection((%q, %s), 2).close(); print('yes')\nexcept OSError as e:\n    print('no')", host, port)
	said, same := "", 0
	err := until(t.Context(), 30*time.Second, "one answer three times", func(ctx context.Context) (bool, error) {
		out, err := from.Run(ctx, client.RunRequest{Code: code})
		if err != nil {
			return false, err
		}
		if out.Stdout != said {
			said, same = out.Stdout, 0
		}
		same++
		return same == 3, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	switch strings.TrimSpace(said) {
	case "yes":
		return true
	case "no":
		return false
	}
	t.Fatalf("whether %s is reached is not told: %q", address, said)
	return false
}

// gone tells that no Pod is of a sandbox any more.
func gone(c *cluster, sandbox string) func(context.Context) (bool, error) {
	return func(ctx context.Context) (bool, error) {
		left, err := c.kubectl(ctx, "get", "pods", "-n", "cove-sandboxes", "-l", "cove.dev/sandbox="+sandbox, "-o", "name")
		return err == nil && strings.TrimSpace(left) == "", err
	}
}
