package e2e_test

import (
	"cmp"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/slow"
)

// TestOpenAPI has schemathesis send what the OpenAPI document allows, and what it does not, to a server: nothing that is
// allowed is refused, nothing else is taken, and each answer is as described. COVE_OPENAPI_SEED picks other requests,
// COVE_OPENAPI_EXAMPLES more of them, COVE_OPENAPI_ARGS adds arguments.
func TestOpenAPI(t *testing.T) {
	slow.Test(t)
	t.Parallel() // it has a server of its own
	packages, err := venv("openapi", "openapi/requirements.lock")
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(t)
	t.Cleanup(func() { removeSnapshots(t, s) })
	sb := s.create(t, client.CreateRequest{TimeoutSeconds: 3600})
	if _, err := s.OpenSession(t.Context(), "openapi", client.SessionRequest{TimeoutSeconds: 3600, IdleTimeoutSeconds: -1}); err != nil {
		t.Fatal(err)
	}
	key, err := s.CreateKey(t.Context(), client.KeyRequest{Name: "schemathesis", Admin: true})
	if err != nil {
		t.Fatal(err)
	}
	keys, err := s.Keys(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	var spared []string
	for i := range keys {
		spared = append(spared, keys[i].ID)
	}
	suite, err := filepath.Abs("openapi")
	if err != nil {
		t.Fatal(err)
	}
	command := []string{
		"env", "--chdir=" + t.TempDir(), // it leaves a folder of what it sent
		filepath.Join(packages, "bin", "schemathesis"), "--config-file", filepath.Join(suite, "schemathesis.toml"), "run",
		s.url + client.Prefix + "/openapi.json", "--header", "X-API-Key: " + key.Secret, "--no-color",
		"--seed", cmp.Or(os.Getenv("COVE_OPENAPI_SEED"), "20"), "--max-examples", cmp.Or(os.Getenv("COVE_OPENAPI_EXAMPLES"), "15"),
	}
	command = append(command, strings.Fields(os.Getenv("COVE_OPENAPI_ARGS"))...)
	runSuite(t, command, []string{
		"COVE_TEST_SANDBOX=" + sb.ID, "COVE_TEST_SESSION=openapi", "COVE_TEST_KEYS=" + strings.Join(spared, ","), "PYTHONDONTWRITEBYTECODE=1", "PYTHONPATH=" + suite, "SCHEMATHESIS_HOOKS=hooks",
	})
	if got, err := s.Get(t.Context(), sb.ID); err != nil || got.State != "running" {
		t.Errorf("the sandbox that requests were about is %+v, %v: most of them saw only that it has ended", got, err)
	}
}
