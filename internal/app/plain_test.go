package app_test

import (
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/app"
	"github.com/covehq/cove/internal/config"
)

// outerAddress is an address of this machine that is not on loopback.
func outerAddress(t *testing.T) net.IP {
	t.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() && n.IP.To4() != nil {
			return n.IP
		}
	}
	t.Skip("this machine has loopback addresses only; TestPlainHTTP of package gateway needs none")
	return nil
}

// A request from another address of this machine to a loopback address stands for another machine's.
func TestPlainHTTP_OfOtherMachines(t *testing.T) {
	outer := outerAddress(t)
	for name, c := range map[string]struct {
		change func(*config.Config)
		status int
	}{
		"is refused":                       {func(*config.Config) {}, http.StatusForbidden},
		"is served where the setting says": {func(c *config.Config) { c.Server.InsecureHTTP = true }, http.StatusOK},
		"is served for a trusted proxy":    {func(c *config.Config) { c.Server.TrustedProxies = []string{outer.String()} }, http.StatusOK},
		"is refused for another proxy":     {func(c *config.Config) { c.Server.TrustedProxies = []string{"198.51.100.7"} }, http.StatusForbidden},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig(t)
			cfg.Listen = "0.0.0.0:0"
			c.change(&cfg)
			s, err := app.Start(t.Context(), cfg, quiet, func(string) {})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			for from, status := range map[string]int{"127.0.0.1": http.StatusOK, outer.String(): c.status} {
				code, body := askFrom(t, from, s.URL+"/cove/v1/sandboxes", string(s.Key))
				if code != status || code == http.StatusForbidden && !strings.Contains(body, "server.insecure_http") {
					t.Errorf("from %s: %d %s", from, code, body)
				}
			}
		})
	}
}

// A health check that names a sandbox must not reach the program in it.
func TestPlainHTTP_HealthOfSandboxes(t *testing.T) {
	outer := outerAddress(t)
	cfg := testConfig(t)
	cfg.Listen = "0.0.0.0:0"
	s, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for name, c := range map[string]struct {
		method, host string
		headers      []string
		status       int
	}{
		"the server's own": {"GET", "", nil, 200},
		"by POST":          {"POST", "", nil, 403},
		"by host":          {"GET", "8000-sb1.localhost", nil, 403},
		"by host and POST": {"POST", "8000-sb1.localhost", nil, 403},
		"by headers":       {"GET", "", []string{"E2b-Sandbox-Id", "sb1", "E2b-Sandbox-Port", "8000"}, 403},
	} {
		for _, path := range []string{"/healthz", "/readyz"} {
			r, err := http.NewRequestWithContext(t.Context(), c.method, s.URL+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Host = c.host
			for i := 0; i < len(c.headers); i += 2 {
				r.Header.Set(c.headers[i], c.headers[i+1])
			}
			if code, body := sendFrom(t, outer.String(), r); code != c.status {
				t.Errorf("%s, %s: %d %s, want %d", name, path, code, body, c.status)
			}
		}
	}
}

func askFrom(t *testing.T, address, at, key string) (status int, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, at, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-API-Key", key)
	return sendFrom(t, address, req)
}

// sendFrom sends a request from an address of this machine.
func sendFrom(t *testing.T, address string, req *http.Request) (status int, body string) {
	t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	transport := &http.Transport{DialContext: dialer.DialContext}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Do(req)
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

func TestPlainHTTP_WithADomainStaysOnLoopback(t *testing.T) {
	outer := outerAddress(t)
	cfg := testConfig(t)
	cfg.Listen, cfg.TLS.Domain = "0.0.0.0:0", "cove.test"
	s, err := app.Start(t.Context(), cfg, quiet, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if s.PlainRefused {
		t.Error("it says that other machines are refused, and they cannot connect")
	}
	plain, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(s.Domain)
	if err != nil {
		t.Fatal(err)
	}
	for address, open := range map[string]bool{
		"127.0.0.1:" + plain.Port():                    true,
		net.JoinHostPort(outer.String(), plain.Port()): false,
		net.JoinHostPort(outer.String(), port):         true, // TLS
	} {
		c, err := net.Dial("tcp", address)
		if err == nil {
			c.Close()
		}
		if (err == nil) != open {
			t.Errorf("%s: %v", address, err)
		}
	}
}
