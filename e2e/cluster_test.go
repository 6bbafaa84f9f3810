package e2e_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
    code-interpreter: # with the limits that OpenSandbox's SDKs ask for unasked, so that Pods wait for them too
      image: localhost/cove-sandbox:test
      pull_policy: Never
      python: /usr/bin/python3
      preload: [numpy, pandas, matplotlib]
      pool: 4
      cpus: 1
      cpu_request: 0.01
      memory: 2GiB
      memory_request: 64MiB
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
		t.Skip("make test-cluster runs it")
	}
	s := clusterServer(t)
	foreign, err := s.CreateKey(t.Context(), client.KeyRequest{Tenant: "foreign", Name: "another tenant's"})
	if err != nil {
		t.Fatal(err)
	}
	t.Run("E2B", func(t *testing.T) {
		tools := e2bPackages(t)
		env := append(s.e2b(), "E2B_SUITE_DRIVER=kubernetes", "E2B_SUITE_FOREIGN_KEY="+foreign.Secret)
		runOnPods(t, tools.pytest(t, "test_sandbox.py", "test_network.py", "test_refused.py"), env, clusterE2B)
		runOnPods(t, tools.pytest(t, "test_code.py", "test_commands.py", "test_files.py", "test_pty.py"), env, clusterE2B)
	})
	t.Run("OpenSandbox", func(t *testing.T) {
		tools := openSandboxPackages(t)
		w := &openSandboxWorld{server: s, foreign: foreign.Secret, registry: &testRegistry{}}
		env := append(w.suite(t), "OPENSANDBOX_SUITE_DRIVER=kubernetes")
		runOnPods(t, tools.pytest(t, tools.python, "test_lifecycle.py", "test_network.py", "test_refused.py"), env, clusterOpenSandbox)
		runOnPods(t, tools.pytest(t, tools.python, "test_code.py", "test_commands.py", "test_files.py"), env, clusterOpenSandbox)
	})
	t.Run("agent-sandbox", func(t *testing.T) {
		packages, err := agentSandboxPackages()
		if err != nil {
			t.Fatal(err)
		}
		w := agentSandboxWorldOf(t, s, foreign.Secret)
		runOnPods(t, packages.pytest(t, "test_lifecycle.py", "test_commands.py", "test_files.py"), append(w.suite(t), "AGENT_SANDBOX_CLIENT=newest"), nil)
		runOnPods(t, packages.pytest(t, "test_commands.py"), append(w.suite(t), "AGENT_SANDBOX_WAY=tunnel", "AGENT_SANDBOX_CLIENT=v04", "PYTHONPATH="+packages.v04), nil)
	})
}

// What of the suites is not for Pods: the tests, by their full ids.
var (
	clusterE2B = []string{
		// A Pod's memory cannot be kept.
		"test_sandbox.py::test_a_list_filters_by_state",
		// A hardened Pod has one user and no sudo, and nobody writes to its /run and /etc.
		"test_sandbox.py::test_a_sandbox_knows_what_it_is",
		"test_commands.py::test_a_commands_envs_win_over_the_sandboxs_and_stay_out_of_sudo",
		"test_commands.py::test_the_base_template_has_what_people_expect",
		"test_commands.py::test_users",
		"test_files.py::test_users_and_owners",
		// What a Pod has on disk is its node's to know, which looks now and then, and evicts.
		"test_sandbox.py::test_S0_80_metrics_lie_in_the_window_that_was_asked_for",
		"test_files.py::test_S0_69_a_full_disk_is_told",
	}
	clusterOpenSandbox = []string{
		// A Pod's memory cannot be kept, and its files end with it.
		"test_lifecycle.py::test_S3_48_a_pause_keeps_files_and_processes",
		"test_lifecycle.py::test_a_snapshot_starts_sandboxes_with_its_files",
		// It wants to be told of a registry that is asked for an image, and none is: test_refused.py. Where images are on, TestClusterImages is about them.
		"test_lifecycle.py::test_S3_12_a_create_that_fails_raises_and_leaves_nothing",
		// A life of four seconds, which may have passed by the time that a Pod is there when none waits.
		"test_lifecycle.py::test_S3_35_a_client_that_is_killed_before_its_first_use_leaves_nothing_for_long",
		// It wants to see no names of groups; with cgroup v1 a node's runtime shows its own.
		"test_lifecycle.py::test_S3_44_the_processor_limit_is_felt_inside",
		// What a template preloads is in a Pod's own memory, and more than its 64 MiB.
		"test_lifecycle.py::test_a_small_sandbox_works",
		// A hardened Pod has one user and no other.
		"test_commands.py::test_S3_50_where_and_with_what_it_runs",
		"test_files.py::test_files_as_another_user",
		"test_files.py::test_many_files_with_modes_and_owners",
		"test_files.py::test_permissions",
		// The image of the tests has no Node.js.
		"test_code.py::test_bash_and_javascript_keep_state",
		"test_code.py::test_other_languages[javascript-console.log(6 * 7)-42]",
		"test_code.py::test_other_languages[typescript-const x: number = 42; console.log(x)-42]",
	}
)

// runOnPods runs files of a suite without the tests that are not for Pods. A file of which nothing is left would say nothing and pass, and so would a
// test that is left out by a name which it has no more: both fail.
func runOnPods(t *testing.T, command, env, without []string) {
	t.Helper()
	collect := exec.CommandContext(t.Context(), command[0], slices.Concat(command[1:], []string{"--collect-only"})...)
	collect.Env = append(os.Environ(), env...)
	out, err := collect.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(collect.Args, " "), err, out)
	}
	left := map[string][]string{} // tests by their file
	for _, arg := range command {
		if strings.HasSuffix(arg, ".py") {
			left[filepath.Base(arg)] = nil
		}
	}
	for line := range strings.Lines(string(out)) {
		if file, _, ok := strings.Cut(line, "::"); ok {
			left[file] = append(left[file], strings.TrimSpace(line))
		}
	}
	for _, id := range without {
		file, _, _ := strings.Cut(id, "::")
		tests, named := left[file]
		if !named {
			continue // it is of another run of the suite
		}
		left[file] = nil
		for _, test := range tests {
			switch {
			case !strings.HasPrefix(test, id):
				left[file] = append(left[file], test)
			case test != id && !strings.HasPrefix(test, id+"["): // pytest asks for no more than a beginning
				t.Errorf("%s leaves out %s too", id, test)
			}
		}
		if len(left[file]) == len(tests) {
			t.Errorf("%s is left out, and there is no such test", id)
		}
		command = append(command, "--deselect="+id)
	}
	for file, tests := range left {
		if len(tests) == 0 {
			t.Errorf("nothing of %s is run", file)
		}
	}
	runSuite(t, command, env)
}
