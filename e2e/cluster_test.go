package e2e_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/covehq/cove/client"
)

// The published SDKs against a server whose sandboxes are Pods of a real cluster: the same tests as on one machine, but those of what a hardened Pod
// cannot do. `make test-cluster` starts the cluster; faults are in the folder cluster.

const clusterConfig = `driver = "kubernetes"
[sandbox]
default_template = "python"
[kubernetes]
kubeconfig = %q
namespace = %q
image = %q
pull_policy = "Never"
name = "e2e"
server_ranges = [%q]
[kubernetes.templates.python]
image = %q
pull_policy = "Never"
pool = 6
python = "/usr/bin/python3"
preload = ["numpy", "pandas", "matplotlib"]
cpus = 2
cpu_request = 0.01
memory = "512MiB"
memory_request = "64MiB"
`

// clusterServer is beside the cluster and has a namespace of its own in it.
func clusterServer(t *testing.T, env ...string) *server {
	t.Helper()
	for _, name := range []string{"COVE_TEST_KUBECONFIG", "COVE_TEST_IMAGE", "COVE_TEST_POD_IMAGE", "COVE_TEST_SERVER_RANGE"} {
		if os.Getenv(name) == "" {
			t.Skipf("no cluster: %s is not set; `make test-cluster` starts one", name)
		}
	}
	program(t)
	kubectl := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("kubectl", append([]string{"--kubeconfig", os.Getenv("COVE_TEST_KUBECONFIG")}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("kubectl %v: %v: %s", args, err, out)
		}
	}
	namespace := fmt.Sprintf("e2e-sdk-%d", os.Getpid())
	dir := t.TempDir()
	kubectl("create", "namespace", namespace)
	t.Cleanup(func() { kubectl("delete", "namespace", namespace, "--timeout=2m") })
	file := filepath.Join(dir, "cove.toml")
	text := fmt.Sprintf(clusterConfig, os.Getenv("COVE_TEST_KUBECONFIG"), namespace, os.Getenv("COVE_TEST_IMAGE"), os.Getenv("COVE_TEST_SERVER_RANGE"), os.Getenv("COVE_TEST_POD_IMAGE"))
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &server{dir: filepath.Join(dir, "data"), env: append([]string{"COVE_CONFIG=" + file, "COVE_AGENT_SANDBOX_LISTEN=127.0.0.1:0"}, env...)}
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	s.start(t)
	kubectl("wait", "-n", namespace, "--for=condition=Ready", "pod", "-l", "cove.dev/state=idle", "--timeout=5m") // what SDKs wait for is not how fast this node is
	return s
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
