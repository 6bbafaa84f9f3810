package gateway_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/gateway"
)

func TestPlainHTTP(t *testing.T) {
	proxies := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::7/128")}
	served := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	g := gateway.New(gateway.Config{
		Inside: inside{served}, Router: router{served}, Else: served, Metrics: served, Log: slog.New(slog.DiscardHandler),
	})
	for name, c := range map[string]struct {
		peer, local, path string
		trusted           []netip.Prefix
		ok                bool
	}{
		"loopback":                       {"127.0.0.1:5000", "127.0.0.1:8080", "/cove/v1/sandboxes", nil, true},
		"loopback of IPv6":               {"[::1]:5000", "[::1]:8080", "/cove/v1/sandboxes", nil, true},
		"loopback, mapped":               {"[::ffff:127.0.0.1]:5000", "[::]:8080", "/", nil, true},
		"the server's own address":       {"192.0.2.2:5000", "192.0.2.2:8080", "/", nil, true},
		"the server's own link-local":    {"[fe80::1%eth0]:5000", "[fe80::1%eth0]:8080", "/", nil, true},
		"another machine":                {"192.0.2.3:5000", "192.0.2.2:8080", "/cove/v1/sandboxes", nil, false},
		"another machine over IPv6":      {"[fd00::3]:5000", "[fd00::2]:8080", "/", nil, false},
		"another machine, E2B":           {"192.0.2.3:5000", "192.0.2.2:8080", "/sandboxes", nil, false},
		"another machine, metrics":       {"192.0.2.3:5000", "192.0.2.2:8080", "/metrics", nil, false},
		"a proxy":                        {"10.1.2.3:5000", "10.0.0.1:8080", "/", proxies, true},
		"a proxy of IPv6":                {"[fd00::7]:5000", "[fd00::2]:8080", "/", proxies, true},
		"another machine beside a proxy": {"192.0.2.3:5000", "192.0.2.2:8080", "/", proxies, false},
		"a peer without an address":      {"@", "192.0.2.2:8080", "/", nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := httptest.NewRequest(http.MethodPost, c.path, strings.NewReader("{}"))
			r.RemoteAddr = c.peer
			local := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(c.local))
			r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, net.Addr(local)))
			r.Header.Set("X-Forwarded-For", "127.0.0.1") // any client can say so
			w := httptest.NewRecorder()
			gateway.PlainHTTP(g, c.trusted).ServeHTTP(w, r)
			if c.ok {
				if w.Code != http.StatusNoContent {
					t.Errorf("%d %s", w.Code, w.Body)
				}
				return
			}
			wantRefused(t, w)
		})
	}
}

func wantRefused(t *testing.T, w *httptest.ResponseRecorder) {
	t.Helper()
	var told struct {
		Code, Message string
		Error         struct{ Kind, Message string }
	}
	if err := json.Unmarshal(w.Body.Bytes(), &told); err != nil || w.Code != http.StatusForbidden {
		t.Fatalf("%d %s, %v", w.Code, w.Body, err)
	}
	if told.Code != "PLAIN_HTTP_REFUSED" || told.Error.Kind != "denied" || told.Message != told.Error.Message ||
		!strings.Contains(told.Message, "server.insecure_http = true") {
		t.Errorf("it says %s", w.Body)
	}
}

func TestPlainHTTP_HealthOfOtherMachines(t *testing.T) {
	served := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	elsewhere := func(r *http.Request) http.Handler {
		if r.Header.Get("E2b-Sandbox-Id") == "" {
			return nil
		}
		return served
	}
	g := gateway.New(gateway.Config{
		Elsewhere: elsewhere, Inside: inside{served}, Router: router{served}, Metrics: served, Log: slog.New(slog.DiscardHandler),
	})
	starting, started := gateway.NewStartup(nil), gateway.NewStartup(nil)
	started.Serve(g)
	for name, c := range map[string]struct {
		via            http.Handler
		method, target string
		headers        []string
		status         int
	}{
		"liveness":                   {started, "GET", "/healthz", nil, 200},
		"liveness by HEAD":           {started, "HEAD", "/healthz", nil, 200},
		"liveness while starting":    {starting, "GET", "/healthz", nil, 200},
		"readiness":                  {started, "GET", "/readyz", nil, 200},
		"readiness while starting":   {starting, "GET", "/readyz", nil, 503},
		"readiness by POST":          {started, "POST", "/readyz", nil, 403},
		"liveness by DELETE":         {started, "DELETE", "/healthz", nil, 403},
		"a POST while starting":      {starting, "POST", "/readyz", nil, 403},
		"a POST to a sandbox's host": {started, "POST", "http://80-box.localhost/readyz", []string{"X-Api-Key", "k"}, 403},
		"a GET to a sandbox's port":  {started, "GET", "/healthz", []string{"X-Api-Key", "k"}, 403},
		"a GET to another server's":  {started, "GET", "/healthz", []string{"E2b-Sandbox-Id", "box"}, 403},
		"a GET to the router":        {started, "GET", "/readyz", []string{"X-Sandbox-Id", "box"}, 403},
	} {
		t.Run(name, func(t *testing.T) {
			r := httptest.NewRequest(c.method, c.target, nil)
			r.RemoteAddr = "192.0.2.3:5000"
			for i := 0; i < len(c.headers); i += 2 {
				r.Header.Set(c.headers[i], c.headers[i+1])
			}
			w := httptest.NewRecorder()
			gateway.PlainHTTP(c.via, nil).ServeHTTP(w, r)
			if w.Code != c.status {
				t.Fatalf("%d %s, want %d", w.Code, w.Body, c.status)
			}
			if c.status == http.StatusForbidden {
				wantRefused(t, w)
			}
		})
	}
}
