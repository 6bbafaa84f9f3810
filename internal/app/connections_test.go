package app_test

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/client"
)

// begin sends a request's head, which promises a body, and none of it.
func begin(t *testing.T, conn net.Conn, head string, headers ...string) (*http.Response, string) {
	t.Helper()
	conn.SetDeadline(time.Now().Add(25 * time.Second)) // less than the shortest time that a body may take
	headers = append(headers, "Host: cove.test", "Content-Type: application/json", "Content-Length: 100")
	if _, err := fmt.Fprintf(conn, "%s HTTP/1.1\r\n%s\r\n\r\n", head, strings.Join(headers, "\r\n")); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatalf("%s: no answer before the body: %v", head, err)
	}
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Errorf("%s: %v", head, err)
	}
	if _, err := in.ReadByte(); err != io.EOF {
		t.Errorf("%s: the connection goes on: %v", head, err)
	}
	return resp, string(text)
}

func TestNoKey_AnswerDoesNotWaitForBody(t *testing.T) {
	s, k := startFacade(t, testConfig(t))
	address := strings.TrimPrefix(s.URL, "http://")
	for _, c := range []struct {
		head    string
		headers []string
	}{
		{"POST /cove/v1/sandboxes", nil}, {"PUT /cove/v1/sandboxes/x/files?path=a", nil}, {"POST /cove/v1/nothing", nil}, {"POST /nothing", nil},
		{"POST /sandboxes", nil}, {"POST /v3/templates", nil}, {"POST /v1/sandboxes", nil}, {"POST /v1/sandboxes/x/renew-expiration", nil},
		{"POST /v1/sandboxes/x/proxy/44772/command", nil}, {"POST /sandboxes/x/proxy/8080/", nil}, {"POST /agents/x/execute", nil},
		{"POST /artifacts/x", nil}, {"POST /execute", []string{"X-Sandbox-Id: x"}},
		{"POST /execute", []string{"E2b-Sandbox-Id: x", "E2b-Sandbox-Port: 49999"}},
		{"POST /process.Process/Start", []string{"E2b-Sandbox-Id: x", "E2b-Sandbox-Port: 49983"}},
	} {
		t.Run(c.head+strings.Join(c.headers, " "), func(t *testing.T) {
			t.Parallel()
			conn, err := net.Dial("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if resp, text := begin(t, conn, c.head, c.headers...); resp.StatusCode < 400 {
				t.Errorf("%d %s", resp.StatusCode, text)
			}
		})
	}
	t.Run("the Kubernetes API", func(t *testing.T) {
		t.Parallel()
		conn, err := tls.Dial("tcp", strings.TrimPrefix(k.access.Server, "https://"), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if resp, text := begin(t, conn, "POST /apis/agents.x-k8s.io/v1alpha1/namespaces/default/sandboxes"); resp.StatusCode != 401 {
			t.Errorf("%d %s", resp.StatusCode, text)
		}
	})
}

func TestOwnPages_AnswerDoesNotWaitForBody(t *testing.T) {
	s, _ := startFacade(t, testConfig(t))
	for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if resp, text := begin(t, conn, "GET "+path); resp.StatusCode != 200 && resp.StatusCode != 503 {
				t.Errorf("%d %s", resp.StatusCode, text)
			}
		})
	}
}

func TestSilentConnections_LeaveRoom(t *testing.T) {
	cfg := testConfig(t)
	cfg.Server.MaxConnections, cfg.TLS.Domain = 100, "cove.test"
	s, k := startFacade(t, cfg)
	addresses := []string{strings.TrimPrefix(s.URL, "http://"), strings.TrimPrefix(k.access.Server, "https://"), ""}
	_, port, _ := net.SplitHostPort(s.Domain)
	addresses[2] = "127.0.0.1:" + port
	// A silent connection ends by itself after ten seconds. A client that is served before the
	// first one does had no need to wait for that; one that waits does so at every try. On a
	// machine under load the first try may take too long.
	const tries = 10
	for try := range tries {
		took := betweenSilent(t, addresses, func() {
			c, err := client.New(s.URL, string(s.Key))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := c.Templates(t.Context()); err != nil {
				t.Errorf("a client between silent connections: %v", err)
			}
			if status, text := k.ask(t, "GET", k.access.Server+"/api", "", k.key); status != 200 {
				t.Errorf("the Kubernetes API: %d %s", status, text)
			}
		})
		if took < 9*time.Second {
			return
		}
		t.Logf("try %d took %v", try, took)
	}
	t.Errorf("at none of %d tries were they served before the silent connections ended", tries)
}

// betweenSilent does something while 600 connections say nothing, and is how long that took since
// the first of them.
func betweenSilent(t *testing.T, addresses []string, do func()) time.Duration {
	t.Helper()
	begun := time.Now()
	for i := range 600 {
		conn, err := net.Dial("tcp", addresses[i%len(addresses)])
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	do()
	return time.Since(begun)
}
