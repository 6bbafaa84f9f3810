package e2e_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/slow"
)

// The published clients of agent-sandbox against a server that is no cluster: three generations of k8s-agent-sandbox, straight
// and through kubectl, and the adapter for LangChain. The tests are in agentsandbox/python and agentsandbox/langchain; lock files
// pin everything with hashes.

func TestAgentSandbox(t *testing.T) {
	slow.Test(t)
	t.Parallel() // it has a server of its own
	packages, err := agentSandboxPackages()
	if err != nil {
		t.Fatal(err)
	}
	w := newAgentSandboxWorld(t)
	memory := rss(w.cmd.Process.Pid)
	suite := func(t *testing.T, name string, command []string, env ...string) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			runSuite(t, command, append(w.suite(t), env...))
		})
	}
	t.Run("suites", func(t *testing.T) {
		tunnel := "AGENT_SANDBOX_WAY=tunnel"
		suite(t, "newest", packages.pytest(t), "AGENT_SANDBOX_CLIENT=newest")
		suite(t, "newest-tunnel", packages.pytest(t, "test_lifecycle.py", "test_commands.py", "test_files.py"), "AGENT_SANDBOX_CLIENT=newest", tunnel)
		suite(t, "v05", packages.pytest(t, "test_lifecycle.py", "test_commands.py", "test_files.py", "test_async.py"), "AGENT_SANDBOX_CLIENT=v05", "PYTHONPATH="+packages.v05)
		suite(t, "v05-tunnel", packages.pytest(t, "test_commands.py"), "AGENT_SANDBOX_CLIENT=v05", "PYTHONPATH="+packages.v05, tunnel,
			"KUBECTL_PORT_FORWARD_WEBSOCKETS=false") // SPDY itself, as older programs speak it
		suite(t, "v04", packages.pytest(t, "test_lifecycle.py", "test_commands.py", "test_files.py"), "AGENT_SANDBOX_CLIENT=v04", "PYTHONPATH="+packages.v04)
		suite(t, "v04-tunnel", packages.pytest(t, "test_commands.py"), "AGENT_SANDBOX_CLIENT=v04", "PYTHONPATH="+packages.v04, tunnel)
		t.Run("langchain", func(t *testing.T) {
			t.Parallel()
			langChainAgentSandbox(t, w, packages.v04)
		})
	})
	if grown := rss(w.cmd.Process.Pid) - memory; grown > 256<<20 {
		t.Errorf("the server grew by %d MB", grown>>20)
	}
}

// langChainAgentSandbox runs the adapter for LangChain, which needs a newer Python than the machine may have: with the client that
// pip finds for it, and with the one of its own time.
func langChainAgentSandbox(t *testing.T, w *agentSandboxWorld, old string) {
	t.Helper()
	python, err := newerPython()
	if err != nil {
		t.Run("skipped: "+err.Error(), func(t *testing.T) { t.Skip(err) })
		return
	}
	packages, err := venvBy(python, "agentsandbox-langchain", "agentsandbox/langchain/requirements.lock")
	if err != nil {
		t.Fatal(err)
	}
	command := func(t *testing.T, args ...string) []string {
		return pytest(t, packages, "agentsandbox/langchain", args...)
	}
	env := func(t *testing.T, more ...string) []string {
		return append(append(w.suite(t), "LANGSMITH_TRACING=false", "ANTHROPIC_API_KEY=", "OPENAI_API_KEY="), more...)
	}
	t.Run("newest client", func(t *testing.T) {
		t.Parallel()
		runSuite(t, command(t), env(t, "AGENT_SANDBOX_CLIENT=langchain"))
	})
	t.Run("client of 0.4, through kubectl", func(t *testing.T) {
		t.Parallel()
		runSuite(t, command(t, "test_adapter.py", "-knot tool"), env(t, "AGENT_SANDBOX_WAY=tunnel", "AGENT_SANDBOX_CLIENT=v04", "PYTHONPATH="+old))
	})
}

// agentSandboxTools is where the packages of the suites are: a virtual environment with the newest, and older clients that are laid
// over it. What they need is the same.
type agentSandboxTools struct{ venv, v04, v05 string }

var agentSandboxPackages = sync.OnceValues(func() (tools agentSandboxTools, err error) {
	if tools.venv, err = agentSandboxPython(); err != nil {
		return tools, err
	}
	for into, name := range map[*string]string{&tools.v04: "v04", &tools.v05: "v05"} {
		*into, err = installed("agentsandbox-"+name, "agentsandbox/"+name+"/requirements.lock", func(dir, lock string) [][]string {
			pip := filepath.Join(tools.venv, "bin", "pip")
			return [][]string{{pip, "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps", "--target", dir, "-r", lock}}
		})
		if err != nil {
			return tools, err
		}
	}
	return tools, nil
})

var agentSandboxPython = sync.OnceValues(func() (string, error) {
	return venv("agentsandbox", "agentsandbox/newest/requirements.lock")
})

// pytest is the command that runs tests of agentsandbox/python.
func (a agentSandboxTools) pytest(t *testing.T, args ...string) []string {
	t.Helper()
	return pytest(t, a.venv, "agentsandbox/python", args...)
}

// agentSandboxWorld is a server and what its clients are given to find it.
type agentSandboxWorld struct {
	*server
	router                    string // a URL with a token
	kubeconfig, foreignConfig string
	foreign                   string // another tenant's key
}

func newAgentSandboxWorld(t *testing.T, env ...string) *agentSandboxWorld {
	t.Helper()
	if _, err := exec.LookPath("kubectl"); err != nil {
		t.Fatal("kubectl is missing: install the package kubernetes-client")
	}
	s := newServer(t, append([]string{"COVE_AGENT_SANDBOX_LISTEN=127.0.0.1:0"}, env...)...)
	key, err := s.CreateKey(t.Context(), client.KeyRequest{Tenant: "foreign", Name: "another tenant's"})
	if err != nil {
		t.Fatal(err)
	}
	return agentSandboxWorldOf(t, s, key.Secret)
}

// agentSandboxWorldOf is about a server that runs.
func agentSandboxWorldOf(t *testing.T, s *server, foreign string) *agentSandboxWorld {
	t.Helper()
	w := &agentSandboxWorld{server: s, foreign: foreign}
	dir := t.TempDir()
	w.kubeconfig, w.foreignConfig = filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "foreign")
	w.cove(t, w.key, "kubeconfig", "--out", w.kubeconfig)
	w.cove(t, w.foreign, "kubeconfig", "--out", w.foreignConfig)
	w.router = strings.TrimRight(strings.TrimSpace(w.cove(t, w.key, "kubeconfig", "--router-url")), "/")
	return w
}

// cove runs a command of the program with somebody's key and gives what it printed.
func (w *agentSandboxWorld) cove(t *testing.T, key string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binary.path, args...)
	cmd.Env = append(os.Environ(), "COVE_URL="+w.url, "COVE_API_KEY="+key, "HOME="+t.TempDir())
	var errors strings.Builder
	cmd.Stderr = &errors
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("cove %s: %v\n%s", strings.Join(args, " "), err, &errors)
	}
	return string(out)
}

// suite is the environment of a suite; its home is empty, so that no configuration of this machine's is read.
func (w *agentSandboxWorld) suite(t *testing.T) []string {
	t.Helper()
	return []string{
		"HOME=" + t.TempDir(), "KUBECONFIG=" + w.kubeconfig, "AGENT_SANDBOX_ROUTER_URL=" + w.router, "AGENT_SANDBOX_KEY=" + w.key,
		"AGENT_SANDBOX_FOREIGN_KEY=" + w.foreign, "AGENT_SANDBOX_FOREIGN_KUBECONFIG=" + w.foreignConfig, "AGENT_SANDBOX_WAY=direct",
	}
}
