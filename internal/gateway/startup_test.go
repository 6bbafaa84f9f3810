package gateway_test

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/covehq/cove/internal/gateway"
)

func TestStartup(t *testing.T) {
	startup := gateway.NewStartup(nil)
	s := httptest.NewServer(startup)
	defer s.Close()
	startup.Say("template python is being built: packages 12/46")
	if resp, body := get(t, s.URL+"/healthz"); resp.StatusCode != 200 {
		t.Errorf("/healthz: %d %s", resp.StatusCode, body)
	}
	want := `{"status":"starting","checks":{},"error":{"kind":"unavailable","message":"template python is being built: packages 12/46"}}`
	if resp, body := get(t, s.URL+"/readyz"); resp.StatusCode != 503 || strings.TrimSpace(body) != want || resp.Header.Get("Retry-After") == "" {
		t.Errorf("/readyz: %d %s", resp.StatusCode, body)
	}
	startup.Serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "served "+r.URL.Path) }))
	for _, path := range []string{"/healthz", "/readyz", "/else"} {
		if resp, body := get(t, s.URL+path); resp.StatusCode != 200 || body != "served "+path {
			t.Errorf("%s after the start: %d %s", path, resp.StatusCode, body)
		}
	}
}

func TestStartup_DoesNotWaitForABody(t *testing.T) {
	s := httptest.NewServer(gateway.NewStartup(nil))
	defer s.Close()
	c, err := net.Dial("tcp", s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(c, "POST /cove/v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{")
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil || resp.StatusCode != 503 {
		t.Fatal(resp, err)
	}
	resp.Body.Close()
}
