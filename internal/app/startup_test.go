package app_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/config"
)

// TestStartup_AnswersWhileTheDatabaseHangs starts a server whose Postgres accepts connections and never says a word.
func TestStartup_AnswersWhileTheDatabaseHangs(t *testing.T) {
	database, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer database.Close()
	cfg := testConfig(t)
	cfg.Listen = freeAddress(t)
	cfg.AgentSandbox.Listen = freeAddress(t)
	cfg.Database.URL = config.DatabaseURL("postgres://cove:secret@" + database.Addr().String() + "/cove?sslmode=disable")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	done := make(chan error, 1)
	go func() { done <- app.Run(ctx, cfg, io.Discard, io.Discard, false) }()
	conn, err := database.Accept() // from here on the server waits for it
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()

	status, header, body := early(t, "GET", "http://"+cfg.Listen+"/healthz", "")
	if status != 200 || body != "{\"status\":\"ok\"}\n" {
		t.Errorf("/healthz: %d %s", status, body)
	}
	status, header, body = early(t, "GET", "http://"+cfg.Listen+"/readyz", "")
	var readiness struct {
		Status string
		Error  struct{ Kind, Message string }
	}
	if err := json.Unmarshal([]byte(body), &readiness); err != nil || status != 503 || header.Get("Retry-After") == "" ||
		readiness.Status != "starting" || readiness.Error.Kind != "unavailable" || readiness.Error.Message != "the database is being opened" {
		t.Errorf("/readyz: %d %v %s", status, header, body)
	}
	for _, request := range [][2]string{{"GET", "/metrics"}, {"POST", "/cove/v1/sandboxes"}, {"POST", "/sandboxes"}, {"GET", "/anything"}} {
		status, header, body = early(t, request[0], "http://"+cfg.Listen+request[1], `{"template": "python"}`)
		if status != 503 || header.Get("Retry-After") == "" || !strings.Contains(body, "not ready yet: the database is being opened") {
			t.Errorf("%s: %d %v %s", request, status, header, body)
		}
	}
	if strings.Contains(body, "secret") {
		t.Error("a caller without a key reads the database's password")
	}
	// The first start has no certificate yet: a handshake fails at once.
	_, err = tls.DialWithDialer(&net.Dialer{Timeout: time.Minute}, "tcp", cfg.AgentSandbox.Listen, &tls.Config{InsecureSkipVerify: true})
	if err == nil || strings.Contains(err.Error(), "timeout") {
		t.Errorf("TLS without a certificate: %v", err)
	}

	stop()
	if err := <-done; err == nil {
		t.Error("a server that was stopped at its start reports success")
	}
	if c, err := net.Dial("tcp", cfg.Listen); err == nil {
		c.Close()
		t.Error("the listener is still open")
	}
}

// early asks a server that is starting; the listener may open a moment later.
func early(t *testing.T, method, at, body string) (int, http.Header, string) {
	t.Helper()
	var resp *http.Response
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		req, err := http.NewRequestWithContext(t.Context(), method, at, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if resp, err = http.DefaultClient.Do(req); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(text)
}

// freeAddress is an address that nothing listens on. Its host is a random one of the loopback
// network: other programs, which use 127.0.0.1, do not take its port before the server does.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", fmt.Sprintf("127.%d.%d.%d:0", 1+rand.IntN(254), rand.IntN(256), 1+rand.IntN(254)))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}
