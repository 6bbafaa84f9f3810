package e2e_test

import (
	"testing"

	"github.com/covehq/cove/client"
)

// TestQuickStart runs one file of every suite, so that `make test` meets each dialect with the SDK that people use.
func TestQuickStart(t *testing.T) {
	t.Run("e2b", func(t *testing.T) {
		t.Parallel()
		packages := packagesOf(t, e2bPython)
		s := newServer(t)
		runSuite(t, pytest(t, packages, "e2b/python", "test_commands.py"), append(s.e2b(), "E2B_SUITE_FOREIGN_KEY="+foreignKey(t, s)))
	})
	t.Run("opensandbox", func(t *testing.T) {
		t.Parallel()
		packages := packagesOf(t, openSandboxPython)
		w := newOpenSandboxWorld(t)
		runSuite(t, pytest(t, packages, "opensandbox/python", "test_commands.py"), w.suite(t))
	})
	t.Run("agent-sandbox", func(t *testing.T) {
		t.Parallel()
		packages := packagesOf(t, agentSandboxPython)
		w := newAgentSandboxWorld(t)
		runSuite(t, pytest(t, packages, "agentsandbox/python", "test_files.py"), append(w.suite(t), "AGENT_SANDBOX_CLIENT=newest"))
	})
	t.Run("python package", func(t *testing.T) {
		t.Parallel()
		packages := packagesOf(t, pythonPackages)
		s := newServer(t)
		runSuite(t, pythonSuite(t, packages, "tests/client"), append(s.python(""), "COVE_TEST_FOREIGN_KEY="+foreignKey(t, s)))
	})
}

// packagesOf installs the packages of a lock file, once for each process.
func packagesOf(t *testing.T, install func() (string, error)) string {
	t.Helper()
	dir, err := install()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// foreignKey makes a key of a second tenant.
func foreignKey(t *testing.T, s *server) string {
	t.Helper()
	key, err := s.CreateKey(t.Context(), client.KeyRequest{Tenant: "foreign", Name: "another tenant's"})
	if err != nil {
		t.Fatal(err)
	}
	return key.Secret
}
