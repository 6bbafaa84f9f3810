package app_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/app"
)

type endpoint struct {
	Endpoint string            `json:"endpoint"`
	Headers  map[string]string `json:"headers"`
}

func (s e2bServer) createOpen(t *testing.T, image string, headers map[string]string) (id string) {
	t.Helper()
	resp, body := s.ask(t, "POST", s.URL+"/v1/sandboxes", `{"image":{"uri":"`+image+`"},"entrypoint":["tail","-f","/dev/null"],"timeout":60}`, headers)
	var sb struct {
		ID string `json:"id"`
	}
	if err := json.Unmarshal([]byte(body), &sb); err != nil || resp.StatusCode != 202 || sb.ID == "" {
		t.Fatalf("create: %d %s", resp.StatusCode, body)
	}
	return sb.ID
}

func TestOpenSandboxAndE2BShareOneListener(t *testing.T) {
	s := startE2B(t, testConfig(t), nil)
	key := map[string]string{"OPEN-SANDBOX-API-KEY": string(s.Key)}
	for _, image := range []string{"python:3.12-slim", "opensandbox/code-interpreter:v1.0.1", "python"} { // none of them is pulled
		id := s.createOpen(t, image, key)
		resp, body := s.ask(t, "GET", s.URL+"/v1/sandboxes/"+id+"/endpoints/44772", "", key)
		var ep endpoint
		if err := json.Unmarshal([]byte(body), &ep); err != nil || resp.StatusCode != 200 || !strings.HasSuffix(ep.Endpoint, "/sandboxes/"+id+"/proxy/44772") {
			t.Fatalf("endpoint: %d %s", resp.StatusCode, body)
		}
		if resp, body := s.ask(t, "GET", "http://"+ep.Endpoint+"/ping", "", ep.Headers); resp.StatusCode != 200 || body != "" {
			t.Errorf("ping: %d %s", resp.StatusCode, body)
		}
		if resp, body := s.ask(t, "POST", "http://"+ep.Endpoint+"/command", `{"command":"echo hi"}`, ep.Headers); resp.StatusCode != 200 || !strings.Contains(body, `"hi"`) {
			t.Errorf("command: %d %s", resp.StatusCode, body)
		}
		if resp, body := s.ask(t, "GET", s.URL+"/sandboxes/"+id, "", map[string]string{"X-API-Key": string(s.Key)}); resp.StatusCode != 200 || !strings.Contains(body, `"sandboxID"`) {
			t.Errorf("E2B's own path: %d %s", resp.StatusCode, body)
		}
	}
	e2b := s.create(t, s.URL)
	resp, body := s.ask(t, "GET", s.URL+"/v1/sandboxes/"+e2b.ID, "", key)
	if resp.StatusCode != 200 || !strings.Contains(body, `"uri":"base"`) || resp.Header.Get("X-Request-Id") == "" {
		t.Errorf("E2B's sandbox: %d %s", resp.StatusCode, body)
	}
	if resp, body := s.ask(t, "GET", s.URL+"/health", "", nil); resp.StatusCode != 200 || !strings.Contains(body, "healthy") {
		t.Errorf("health: %d %s", resp.StatusCode, body)
	}
	if resp, body := s.ask(t, "GET", s.URL+"/v1/sandboxes", "", nil); resp.StatusCode != 401 || !strings.Contains(body, "MISSING_API_KEY") {
		t.Errorf("without a key: %d %s", resp.StatusCode, body)
	}
}

func TestASignedEndpointIsNotInTheLog(t *testing.T) {
	var log bytes.Buffer
	cfg := testConfig(t)
	server, err := app.Start(t.Context(), cfg, slog.New(slog.NewTextHandler(&log, nil)), func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	s := e2bServer{server, http.DefaultClient}
	key := map[string]string{"OPEN-SANDBOX-API-KEY": string(s.Key)}
	id := s.createOpen(t, "base", key)
	_, body := s.ask(t, "GET", s.URL+"/v1/sandboxes/"+id+"/endpoints/44772?expires=99999999999", "", key)
	var ep endpoint
	if err := json.Unmarshal([]byte(body), &ep); err != nil {
		t.Fatal(err)
	}
	if resp, body := s.ask(t, "GET", "http://"+ep.Endpoint+"/ping", "", nil); resp.StatusCode != 200 {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(ep.Endpoint, "~")
	signature, _, _ := strings.Cut(parts[2], "/")
	if text := log.String(); strings.Contains(text, signature) || !strings.Contains(text, id+"~signed/proxy/44772/ping") {
		t.Errorf("the log says\n%s", text)
	}
}

func TestGuestsAreTheLocalAdminsTenant(t *testing.T) {
	cfg := testConfig(t)
	cfg.Auth.Anonymous = true
	s := startE2B(t, cfg, nil)
	id := s.createOpen(t, "base", nil)
	if resp, body := s.ask(t, "GET", s.URL+"/sandboxes/"+id, "", nil); resp.StatusCode != 200 { // E2B's
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	if resp, body := s.ask(t, "GET", s.URL+"/v1/sandboxes/"+id, "", map[string]string{"OPEN-SANDBOX-API-KEY": string(s.Key)}); resp.StatusCode != 200 {
		t.Errorf("the admin does not see it: %d %s", resp.StatusCode, body)
	}
	for name, headers := range map[string]map[string]string{
		"a page": {"Origin": "http://evil.test"}, "a wrong key": {"OPEN-SANDBOX-API-KEY": "e2b_0000000000000000000000000000000000000000"},
	} {
		if resp, body := s.ask(t, "GET", s.URL+"/v1/sandboxes/"+id, "", headers); resp.StatusCode != 403 && resp.StatusCode != 401 {
			t.Errorf("%s: %d %s", name, resp.StatusCode, body)
		}
	}
	if resp, body := s.ask(t, "GET", s.URL+"/cove/v1/keys", "", nil); resp.StatusCode != 403 {
		t.Errorf("a guest manages keys: %d %s", resp.StatusCode, body)
	}
}

func TestATakenPortSaysWhatToDo(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cfg := testConfig(t)
	cfg.Listen = l.Addr().String()
	if _, err := app.Start(t.Context(), cfg, quiet, func(string) {}); err == nil || !strings.Contains(err.Error(), "choose another with --listen") {
		t.Errorf("%v", err)
	}
}
