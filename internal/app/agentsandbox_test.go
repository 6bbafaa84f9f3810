package app_test

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/config"
)

// kube is a client of the façade, as a kubeconfig makes it.
type kube struct {
	*http.Client
	access client.KubernetesAccess
	key    string
}

func startFacade(t *testing.T, cfg config.Config) (*app.Server, kube) {
	t.Helper()
	s, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	c, err := client.New(s.URL, string(s.Key))
	if err != nil {
		t.Fatal(err)
	}
	access, err := c.Kubernetes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM([]byte(access.CertificateAuthority)) {
		t.Fatalf("no authority in %+v", access)
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true}
	t.Cleanup(transport.CloseIdleConnections)
	return s, kube{&http.Client{Transport: transport}, *access, string(s.Key)}
}

func (k kube) ask(t *testing.T, method, url, body, key string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := k.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

func TestAClaimIsReachedThroughTheRouter(t *testing.T) {
	s, k := startFacade(t, testConfig(t))
	claims := k.access.Server + "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default/sandboxclaims"
	if code, body := k.ask(t, "POST", claims, `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxClaim","metadata":{"name":"one"},"spec":{"warmPoolRef":{"name":"python-3.12"}}}`, k.key); code != 201 {
		t.Fatalf("%d %s", code, body)
	}
	code, body := k.ask(t, "GET", claims+"?watch=True&timeoutSeconds=30&fieldSelector=metadata.name%3Done&resourceVersion=0", "", k.key+"x")
	if code != 401 {
		t.Errorf("with a wrong key: %d %s", code, body)
	}
	ready := func() bool {
		_, body := k.ask(t, "GET", claims+"/one", "", k.key)
		return strings.Contains(body, "DependenciesReady")
	}
	for deadline := time.Now().Add(3 * time.Minute); !ready(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the claim is never ready")
		}
	}
	req, err := http.NewRequestWithContext(t.Context(), "POST", s.URL+k.access.RouterPath+"/execute", strings.NewReader(`{"command":"echo hi"}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Sandbox-ID", "one")
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var out struct {
		Stdout string `json:"stdout"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil || resp.StatusCode != 200 || out.Stdout != "hi\n" {
		t.Errorf("%d %+v %v", resp.StatusCode, out, err)
	}
	if code, body := k.ask(t, "GET", k.access.Server+"/healthz", "", ""); code != 200 {
		t.Errorf("%d %s", code, body)
	}
}

func TestGuestsUseTheFacadeToo(t *testing.T) {
	cfg := testConfig(t)
	cfg.Auth.Anonymous = true
	_, k := startFacade(t, cfg)
	if code, body := k.ask(t, "GET", k.access.Server+"/apis", "", ""); code != 200 {
		t.Errorf("%d %s", code, body)
	}
}

func TestTheFacadeMayBeOff(t *testing.T) {
	cfg := testConfig(t)
	cfg.AgentSandbox.Listen = config.AgentSandboxOff
	s, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c, err := client.New(s.URL, string(s.Key))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Kubernetes(t.Context()); client.KindOf(err) != client.Unsupported {
		t.Errorf("%v", err)
	}
}

func TestTheFacadesCertificateIsForFurtherNames(t *testing.T) {
	dir, now := filepath.Join(t.TempDir(), "tls"), time.Now()
	first, _, err := app.OwnCertificate(dir, "cove.test", now)
	if err != nil {
		t.Fatal(err)
	}
	pair, file, err := app.OwnCertificate(dir, "cove.test", now, "cove.cove-system.svc", "10.1.2.3")
	if err != nil {
		t.Fatal(err)
	}
	authority, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority)
	for name, ok := range map[string]bool{
		"cove.cove-system.svc": true, "10.1.2.3": true, "localhost": true, "127.0.0.1": true, "10.1.2.4": false, "other.cove-system.svc": false,
	} {
		if _, err := pair.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots}); (err == nil) != ok {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := first.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots}); err == nil {
			t.Errorf("the first one is good for %s with the authority of the second", name)
		}
	}
	again, _, err := app.OwnCertificate(dir, "cove.test", now, "cove.cove-system.svc", "10.1.2.3")
	if err != nil || again.Leaf.SerialNumber.Cmp(pair.Leaf.SerialNumber) != 0 {
		t.Errorf("another one for the same names: %v", err)
	}
}
