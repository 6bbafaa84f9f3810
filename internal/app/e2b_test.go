package app_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/config"
)

// e2bServer is a server, and a client for which every name leads to it.
type e2bServer struct {
	*app.Server
	client *http.Client
}

func startE2B(t *testing.T, cfg config.Config, roots *x509.CertPool) e2bServer {
	t.Helper()
	s, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	if s.CAFile != "" {
		text, err := os.ReadFile(s.CAFile)
		if err != nil {
			t.Fatal(err)
		}
		roots = x509.NewCertPool()
		roots.AppendCertsFromPEM(text)
	}
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			_, port, _ := net.SplitHostPort(address)
			return new(net.Dialer).DialContext(ctx, network, "127.0.0.1:"+port)
		},
	}
	t.Cleanup(transport.CloseIdleConnections)
	return e2bServer{s, &http.Client{Transport: transport}}
}

func (s e2bServer) ask(t *testing.T, method, url, body string, headers map[string]string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for name, value := range headers {
		req.Header.Set(name, value)
	}
	resp, err := s.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

type e2bSandbox struct {
	ID     string `json:"sandboxID"`
	Token  string `json:"envdAccessToken"`
	Domain string `json:"domain"`
}

func (s e2bServer) create(t *testing.T, api string) (sb e2bSandbox) {
	t.Helper()
	resp, body := s.ask(t, "POST", api+"/sandboxes", `{"templateID":"base","timeout":60,"secure":true}`, map[string]string{"X-API-Key": string(s.Key)})
	if err := json.Unmarshal([]byte(body), &sb); err != nil || resp.StatusCode != 201 || sb.Token == "" {
		t.Fatalf("create: %d %s", resp.StatusCode, body)
	}
	return sb
}

func TestSandboxesHaveHostNamesOverTLS(t *testing.T) {
	cfg := testConfig(t)
	cfg.TLS.Domain = "cove.test"
	s := startE2B(t, cfg, nil)
	if !strings.HasPrefix(s.Domain, "cove.test:") {
		t.Fatalf("the domain is %q", s.Domain)
	}
	sb := s.create(t, "https://api."+s.Domain)
	if sb.Domain != s.Domain {
		t.Errorf("the SDKs are told %q, not %q", sb.Domain, s.Domain)
	}
	resp, body := s.ask(t, "GET", "https://49983-"+sb.ID+"."+s.Domain+"/health", "", nil)
	if resp.StatusCode != 204 || resp.ProtoMajor != 2 {
		t.Errorf("envd: %s %d %s", resp.Proto, resp.StatusCode, body)
	}
	resp, body = s.ask(t, "POST", "https://49983-"+sb.ID+"."+s.Domain+"/process.Process/List", "{}", map[string]string{"X-Access-Token": sb.Token})
	if resp.StatusCode != 200 {
		t.Errorf("rpc: %d %s", resp.StatusCode, body)
	}
	inside, err := net.Listen("tcp", "127.0.0.1:0") // the inproc driver's sandboxes have the host's ports
	if err != nil {
		t.Fatal(err)
	}
	page := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "a page") })}
	go page.Serve(inside)
	defer page.Close()
	_, port, _ := net.SplitHostPort(inside.Addr().String())
	if resp, body = s.ask(t, "GET", "https://"+port+"-"+sb.ID+"."+s.Domain+"/", "", nil); body != "a page" {
		t.Errorf("port: %d %s", resp.StatusCode, body)
	}
	resp, body = s.ask(t, "GET", "https://49999-sbnone."+s.Domain+"/health", "", nil)
	if resp.StatusCode != 502 || body != `{"sandboxId":"sbnone","message":"The sandbox was not found","code":502}` {
		t.Errorf("nobody: %d %s", resp.StatusCode, body)
	}
}

func TestOnePlainListenerServesBothPlanes(t *testing.T) {
	cfg := testConfig(t)
	s := startE2B(t, cfg, nil)
	sb := s.create(t, s.URL)
	route := map[string]string{"E2b-Sandbox-Id": sb.ID, "E2b-Sandbox-Port": "49983", "X-Access-Token": sb.Token}
	for _, c := range []struct {
		method, path string
		headers      map[string]string
		want         int
	}{
		{"GET", "/health", route, 204},
		{"GET", "/metrics", route, 200},
		{"GET", "/metrics", nil, 200},
		{"GET", "/healthz", nil, 200},
		{"POST", "/process.Process/List", route, 200},
		{"GET", "/kruise/api/sandboxes/" + sb.ID, map[string]string{"X-API-Key": string(s.Key)}, 200},
		{"GET", "/kruise/" + sb.ID + "/49983/health", nil, 204},
		{"GET", "/cove/v1/sandboxes/" + sb.ID, map[string]string{"X-API-Key": string(s.Key)}, 200},
		{"DELETE", "/sandboxes/" + sb.ID, map[string]string{"X-API-Key": string(s.Key)}, 204},
		{"GET", "/health", route, 502},
	} {
		if resp, body := s.ask(t, c.method, s.URL+c.path, "{}", c.headers); resp.StatusCode != c.want {
			t.Errorf("%s %s: %d %s", c.method, c.path, resp.StatusCode, body)
		}
	}
}

func TestTokensHoldOverARestart(t *testing.T) {
	cfg := testConfig(t)
	first, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(cfg.DataDir, "server", "e2b_secret")
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the secret is %v, %v", info.Mode(), err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	startE2B(t, cfg, nil)
	if after, err := os.ReadFile(file); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the secret changed: %v", err)
	}
}

func TestAGivenCertificateIsUsedAsItIs(t *testing.T) {
	dir := t.TempDir()
	_, ca, err := app.OwnCertificate(dir, "given.test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(ca)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(text)
	cfg := testConfig(t)
	cfg.TLS = config.TLS{Domain: "given.test", Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem")}
	s := startE2B(t, cfg, roots)
	if s.CAFile != "" {
		t.Errorf("an authority was made: %s", s.CAFile)
	}
	if resp, body := s.ask(t, "GET", "https://api."+s.Domain+"/health", "", nil); resp.StatusCode/100 != 2 {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	cfg = testConfig(t)
	cfg.TLS = config.TLS{Domain: "given.test", Cert: "/no/such", Key: "/no/such"}
	if _, err := app.Start(t.Context(), cfg, quiet, func(string) {}); err == nil || !strings.Contains(err.Error(), "/no/such") {
		t.Errorf("a certificate that is not there: %v", err)
	}
}

// TestAKillCutsStreams: the end of a stream must not look like the end of its command, and by then the sandbox is gone.
func TestAKillCutsStreams(t *testing.T) {
	s := startE2B(t, testConfig(t), nil)
	sb := s.create(t, s.URL)
	start := `{"process":{"cmd":"/bin/sh","args":["-c","sleep 60"]}}`
	frame := append([]byte{0, 0, 0, 0, byte(len(start))}, start...)
	req, err := http.NewRequestWithContext(t.Context(), "POST", s.URL+"/process.Process/Start", bytes.NewReader(frame))
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{
		"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1",
		"E2b-Sandbox-Id": sb.ID, "E2b-Sandbox-Port": "49983", "X-Access-Token": sb.Token,
	} {
		req.Header.Set(name, value)
	}
	resp, err := s.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	first := make([]byte, 5)
	if _, err := io.ReadFull(resp.Body, first); err != nil || resp.StatusCode != 200 || first[0] != 0 {
		t.Fatalf("%d %v, %v", resp.StatusCode, first, err)
	}
	if resp, body := s.ask(t, "DELETE", s.URL+"/sandboxes/"+sb.ID, "", map[string]string{"X-API-Key": string(s.Key)}); resp.StatusCode != 204 {
		t.Fatalf("kill: %d %s", resp.StatusCode, body)
	}
	rest, err := io.ReadAll(resp.Body)
	if err == nil || bytes.Contains(rest, []byte("end")) {
		t.Errorf("the stream ended with %q, %v", rest, err)
	}
	route := map[string]string{"E2b-Sandbox-Id": sb.ID, "E2b-Sandbox-Port": "49983"}
	if resp, body := s.ask(t, "GET", s.URL+"/health", "", route); resp.StatusCode != 502 {
		t.Errorf("health: %d %s", resp.StatusCode, body)
	}
}
