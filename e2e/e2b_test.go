package e2e_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/test/slow"
)

// The published E2B packages against a server: the tests are in e2b/python and e2b/js, their lock files pin everything
// with hashes, Node.js included, so that a machine needs no more than Python and a package index.

func TestE2B(t *testing.T) {
	slow.Test(t)
	tools := e2bPackages(t)
	registry := startRegistry(t)
	s := newServer(t)
	t.Cleanup(func() { removeImages(t, s) })
	memory := rss(s.cmd.Process.Pid)
	foreign, err := s.CreateKey(t.Context(), client.KeyRequest{Tenant: "foreign", Name: "another tenant's"})
	if err != nil {
		t.Fatal(err)
	}
	env := append(s.e2b(), "E2B_SUITE_FOREIGN_KEY="+foreign.Secret, "E2B_SUITE_REGISTRY="+registry.host,
		"E2B_SUITE_REGISTRY_USER="+registryUser, "E2B_SUITE_REGISTRY_PASSWORD="+registryPassword)
	t.Run("suites", func(t *testing.T) {
		for _, suite := range []struct {
			name    string
			command []string
		}{
			{"python", tools.pytest(t, "--ignore-glob=*test_async*")},
			{"python-async", tools.pytest(t, "test_async_sandbox.py", "test_async_inside.py")},
			{"javascript", tools.node(t, "sandbox.test.mjs", "inside.test.mjs")},
			{"cli", tools.node(t, "cli.test.mjs")},
		} {
			t.Run(suite.name, func(t *testing.T) {
				t.Parallel()
				runSuite(t, suite.command, env)
			})
		}
	})
	// Files of a hundred megabytes and a million lines went through it.
	if grown := rss(s.cmd.Process.Pid) - memory; grown > 256<<20 {
		t.Errorf("the server grew by %d MB", grown>>20)
	}
}

func TestE2BByName(t *testing.T) {
	slow.Test(t)
	tools := e2bPackages(t)
	s := newServer(t, "COVE_TLS_DOMAIN=cove.test")
	names := startNames(t, "cove.test")
	domain, ca := s.domain(t)
	env := []string{"E2B_DOMAIN=" + domain, "E2B_API_KEY=" + s.key, "SSL_CERT_FILE=" + ca, "NODE_EXTRA_CA_CERTS=" + ca}
	runSuite(t, names.within(tools.pytest(t, "tls")), env)
	runSuite(t, names.within(tools.node(t, "tls.test.mjs")), env)
}

// TestE2BCompatibilityPage writes the tables of docs/compatibility.md from the report of the tests above: `make compat` asks for it.
func TestE2BCompatibilityPage(t *testing.T) {
	report := os.Getenv("E2B_SUITE_REPORT")
	if report == "" {
		t.Skip("make compat runs it")
	}
	tools := e2bPackages(t)
	cmd := exec.Command(filepath.Join(tools.python, "bin", "python"), "-B", "e2b/compat.py", report, tools.modules, "../docs/compatibility.md")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// A token and a signature hold after a crash, for a sandbox that lived through it.
func TestE2BAfterARestart(t *testing.T) {
	s := newServer(t)
	var made struct{ SandboxID, EnvdAccessToken string }
	s.e2bCall(t, http.StatusCreated, &made, "POST", "/v2/sandboxes", `{"templateID":"base","timeout":120,"metadata":{"k":"v"}}`)
	inside := []string{"E2b-Sandbox-Id", made.SandboxID, "E2b-Sandbox-Port", "49983", "X-Access-Token", made.EnvdAccessToken}
	var dir struct{ Entry struct{ Owner string } }
	s.e2bCall(t, http.StatusOK, &dir, "POST", "/filesystem.Filesystem/MakeDir", `{"path":"kept"}`, inside...)
	s.crash(t)
	s.start(t)
	s.e2bCall(t, http.StatusOK, &dir, "POST", "/filesystem.Filesystem/Stat", `{"path":"kept"}`, inside...)
	if dir.Entry.Owner != "user" {
		t.Errorf("%+v", dir)
	}
	var again struct {
		State    string
		Metadata map[string]string
	}
	s.e2bCall(t, http.StatusOK, &again, "GET", "/sandboxes/"+made.SandboxID, "")
	if again.State != "running" || again.Metadata["k"] != "v" {
		t.Errorf("%+v", again)
	}
	s.e2bCall(t, http.StatusNoContent, nil, "DELETE", "/sandboxes/"+made.SandboxID, "")
	s.e2bCall(t, http.StatusBadGateway, nil, "GET", "/health", "", inside...)
}

// e2bCall is one request of the protocol, with the key and pairs of headers.
func (s *server) e2bCall(t *testing.T, want int, answer any, method, path, body string, headers ...string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-API-Key", s.key)
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != want {
		t.Fatalf("%s %s: %s, want %d\n%s%v", method, path, resp.Status, want, text, err)
	}
	if answer != nil {
		if err := json.Unmarshal(text, answer); err != nil {
			t.Fatalf("%s %s: %v\n%s", method, path, err, text)
		}
	}
}

// e2b is what the SDKs need to know.
func (s *server) e2b() []string {
	return []string{"E2B_API_URL=" + s.url, "E2B_SANDBOX_URL=" + s.url, "E2B_API_KEY=" + s.key}
}

// e2bTools is where the packages of the suites are.
type e2bTools struct {
	python  string // a virtual environment
	modules string // node_modules
}

// e2bPackages installs the packages once for each content of the lock files, where the tests keep their templates too.
func e2bPackages(t *testing.T) e2bTools {
	t.Helper()
	tools, err := installE2B()
	if err != nil {
		t.Fatal(err)
	}
	return tools
}

var installE2B = sync.OnceValues(func() (tools e2bTools, err error) {
	if tools.python, err = e2bPython(); err != nil {
		return tools, err
	}
	tools.modules, err = nodeModules("e2b-js", "e2b/js/package-lock.json", tools.python)
	return tools, err
})

var e2bPython = sync.OnceValues(func() (string, error) {
	return venv("e2b-python", "e2b/python/requirements.lock")
})

// pytest is the command that runs tests of e2b/python.
func (e e2bTools) pytest(t *testing.T, args ...string) []string {
	t.Helper()
	return pytest(t, e.python, "e2b/python", args...)
}

// node is the command that runs tests of e2b/js.
func (e e2bTools) node(t *testing.T, files ...string) []string {
	t.Helper()
	return nodeTests(t, e.python, e.modules, "e2b/js", files...)
}

// removeSnapshots takes away the templates that the suites left in the folder that all tests share.
func removeSnapshots(t *testing.T, s *server) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	all, err := s.Templates(ctx)
	if err != nil {
		t.Logf("list templates: %v", err)
		return
	}
	for _, each := range all {
		if each.Source == "snapshot" {
			_ = s.RemoveTemplate(ctx, each.Name) // it may have gone with its build
		}
	}
}

// domain is the name, with its port, below which a server has its sandboxes, and the file with the authority to trust.
func (s *server) domain(t *testing.T) (name, ca string) {
	t.Helper()
	text, err := os.ReadFile(s.readyFile())
	if err != nil {
		t.Fatal(err)
	}
	var ready struct {
		Domain string `json:"domain"`
		CAFile string `json:"ca_file"`
	}
	if err := json.Unmarshal(text, &ready); err != nil {
		t.Fatal(err)
	}
	return ready.Domain, ready.CAFile
}
