package e2e_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/client"
)

// The published SDKs against a server in a real cluster, installed from its chart, whose sandboxes are Pods: the same tests as on one machine, but those
// of what a hardened Pod cannot do. `make test-cluster` starts the cluster; faults are in the folder cluster.

// clusterAddress is the Service's, so that the certificate of the façade and the kubeconfig are for it from the start.
const clusterAddress = "10.253.0.80"

const clusterValues = `service: {clusterIP: "` + clusterAddress + `"}
facade: {names: ["` + clusterAddress + `"]}
config:
  agent_sandbox: {url: "https://` + clusterAddress + `:7445"}
sandboxes:
  templates:
    python:
      pool: 6
      cpus: 2
      cpu_request: 0.01
      preload: [numpy, pandas, matplotlib]
`

// clusterServer is a server inside of the cluster.
func clusterServer(t *testing.T) *server {
	t.Helper()
	for _, name := range []string{"COVE_TEST_CLUSTER", "COVE_TEST_KUBECONFIG", "COVE_TEST_RENDER", "COVE_TEST_BIN"} {
		if os.Getenv(name) == "" {
			t.Skipf("no cluster: %s is not set; `make test-cluster` starts one", name)
		}
	}
	program(t) // for its command line
	values := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(values, []byte(clusterValues), 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.Command(name, args...)
		var complaints strings.Builder
		cmd.Stderr = &complaints
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s %v: %v: %s", name, args, err, &complaints)
		}
		return string(out)
	}
	cluster := filepath.Join(os.Getenv("COVE_TEST_BIN"), "cluster")
	said := run(cluster, "deploy", values)
	t.Cleanup(func() { run(cluster, "undeploy") })
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the server's log:\n%s", kubectl(t, "logs", "-n", "cove", "deployment/cove", "--tail=200"))
		}
	})
	s := &server{url: exported(t, said, "COVE_URL"), key: exported(t, said, "COVE_API_KEY")}
	var err error
	if s.Client, err = client.New(s.url, s.key); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Client.Close() })
	kubectl(t, "wait", "-n", "cove-sandboxes", "--for=condition=Ready", "pod", "-l", "cove.dev/state=idle", "--timeout=5m") // what SDKs wait for is not how fast this node is
	return s
}

// exported finds a variable in what a shell would read.
func exported(t *testing.T, text, name string) string {
	t.Helper()
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), "export "+name+"="); ok {
			return strings.Trim(value, `"`)
		}
	}
	t.Fatalf("nobody says %s", name)
	return ""
}

func TestClusterSDKs(t *testing.T) {
	if testing.Short() {
		t.Skip("installs packages and runs for minutes")
	}
	s := clusterServer(t)
	foreign, err := s.CreateKey(t.Context(), client.KeyRequest{Tenant: "foreign", Name: "another tenant's"})
	if err != nil {
		t.Fatal(err)
	}
	t.Run("E2B", func(t *testing.T) {
		tools := e2bPackages(t)
		runSuite(t, tools.pytest(t, "test_code.py", "test_commands.py", "test_files.py", "test_lifecycle.py", "-k="+clusterE2B),
			append(s.e2b(), "E2B_SUITE_FOREIGN_KEY="+foreign.Secret))
	})
	t.Run("OpenSandbox", func(t *testing.T) {
		tools := openSandboxPackages(t)
		w := &openSandboxWorld{server: s, foreign: foreign.Secret, registry: &testRegistry{}}
		runSuite(t, tools.pytest(t, tools.python, "test_code.py", "test_commands.py", "test_files.py", "-k="+clusterOpenSandbox), w.suite(t))
	})
	t.Run("agent-sandbox", func(t *testing.T) {
		packages, err := agentSandboxPackages()
		if err != nil {
			t.Fatal(err)
		}
		w := agentSandboxWorldOf(t, s, foreign.Secret)
		runSuite(t, packages.pytest(t, "test_lifecycle.py", "test_commands.py", "test_files.py", "-k="+clusterAgentSandbox), w.suite(t))
		runSuite(t, packages.pytest(t, "test_commands.py", "-k="+clusterAgentSandbox), append(w.suite(t), "AGENT_SANDBOX_WAY=tunnel", "PYTHONPATH="+packages.v04))
	})
}

// What of the suites is not for Pods, by words in the tests' names. Caps says of the driver that it neither pauses nor forks nor snapshots, and a hardened
// Pod has one user and no other; the image of the tests has neither Node.js nor a file that only root reads.
const (
	clusterE2B = "not pause and not resume and not snapshot and not fork and not woken and not keep_the_files and not full_disk" +
		" and not sudo and not root and not users and not base_template"
	clusterOpenSandbox = "not pause and not resume and not snapshot and not root and not javascript and not typescript and not both_names" +
		" and not S3_50 and not owners and not permissions and not another_user and not cannot_read"
	clusterAgentSandbox = "not suspend and not resume and not as_the_sandboxes_user"
)
