package gateway_test

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/gateway"
)

// ports takes what is below /v1/ and lets in what is below /v1/in/.
type ports struct{ http.Handler }

func (ports) Matches(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, "/v1/") }
func (ports) Enters(r *http.Request) bool  { return strings.HasPrefix(r.URL.Path, "/v1/in/") }

func TestWhoIsAGuest(t *testing.T) {
	tell := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "key "+r.Header.Get("X-Api-Key")) })
	for name, c := range map[string]struct {
		guests  gateway.Guests
		path    string
		host    string
		headers map[string]string
		want    string // what the dialect saw; empty: it was refused
	}{
		"a program on this machine":         {path: "/v1/x", host: "127.0.0.1:8080", want: "key guest"},
		"by name":                           {path: "/v1/x", host: "localhost:8080", want: "key guest"},
		"over IPv6":                         {path: "/v1/x", host: "[::1]:8080", want: "key guest"},
		"with a key of its own":             {path: "/v1/x", host: "a.test", headers: map[string]string{"X-API-Key": "mine"}, want: "key mine"},
		"with a key in other words":         {path: "/v1/x", host: "a.test", headers: map[string]string{"OPEN-SANDBOX-API-KEY": "mine"}, want: "key "},
		"with a bearer":                     {path: "/v1/x", host: "a.test", headers: map[string]string{"Authorization": "Bearer mine"}, want: "key "},
		"with a token":                      {path: "/v1/x", host: "a.test", headers: map[string]string{"OpenSandbox-Secure-Access": "mine"}, want: "key "},
		"a name that was made to lead here": {path: "/v1/x", host: "evil.test:8080"},
		"a name that is ours":               {guests: gateway.Guests{Hosts: []string{"cove.test"}}, path: "/v1/x", host: "Cove.test.:8080", want: "key guest"},
		"a page of another origin":          {path: "/v1/x", host: "127.0.0.1:8080", headers: map[string]string{"Origin": "http://evil.test"}},
		"a page of another port":            {path: "/v1/x", host: "127.0.0.1:8080", headers: map[string]string{"Origin": "http://127.0.0.1:3000"}},
		"a page without an origin":          {path: "/v1/x", host: "127.0.0.1:8080", headers: map[string]string{"Origin": "null"}},
		"a page of our own":                 {path: "/v1/x", host: "127.0.0.1:8080", headers: map[string]string{"Origin": "http://127.0.0.1:8080", "Sec-Fetch-Site": "same-origin"}, want: "key guest"},
		"a link in another page":            {path: "/v1/x", host: "127.0.0.1:8080", headers: map[string]string{"Sec-Fetch-Site": "cross-site"}},
		"a page beside ours":                {path: "/v1/x", host: "127.0.0.1:8080", headers: map[string]string{"Sec-Fetch-Site": "same-site"}},
		"a person who types":                {path: "/v1/x", host: "127.0.0.1:8080", headers: map[string]string{"Sec-Fetch-Site": "none"}, want: "key guest"},
		"through a proxy":                   {path: "/v1/x", host: "127.0.0.1:8080", headers: map[string]string{"X-Forwarded-For": "192.0.2.1"}},
		"through another proxy":             {path: "/v1/x", host: "127.0.0.1:8080", headers: map[string]string{"Forwarded": "for=192.0.2.1"}},
		"everywhere, through a proxy":       {guests: gateway.Guests{Everywhere: true}, path: "/v1/x", host: "box.lan", headers: map[string]string{"X-Forwarded-For": "192.0.2.1"}, want: "key guest"},
		"everywhere":                        {guests: gateway.Guests{Everywhere: true}, path: "/v1/x", host: "box.lan:8080", want: "key guest"},
		"a page everywhere":                 {guests: gateway.Guests{Everywhere: true}, path: "/v1/x", host: "box.lan:8080", headers: map[string]string{"Origin": "http://evil.test"}},
		"a page inside of a sandbox":        {path: "/v1/in/x", host: "127.0.0.1:8080", headers: map[string]string{"Origin": "null"}, want: "key "},
		"a program inside of a sandbox":     {path: "/v1/in/x", host: "127.0.0.1:8080", want: "key guest"},
		"our own API":                       {path: "/cove/v1/x", host: "127.0.0.1:8080", want: "key guest"},
		"our own API, of a page":            {path: "/cove/v1/x", host: "127.0.0.1:8080", headers: map[string]string{"Origin": "http://evil.test"}},
		"whether we are healthy":            {path: "/health", host: "evil.test", want: `{"status":"healthy"}`},
	} {
		t.Run(name, func(t *testing.T) {
			c.guests.Key = "guest"
			s, _ := newServer(t, io.Discard, gateway.Config{
				OpenSandbox: ports{tell}, Guests: &c.guests, Prefixes: map[string]http.Handler{"/cove/v1/": tell},
			})
			req := httptest.NewRequest("GET", s.URL+c.path, nil)
			req.RequestURI, req.Host = "", c.host
			for k, v := range c.headers {
				req.Header.Set(k, v)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			b, _ := io.ReadAll(resp.Body)
			body := strings.TrimSpace(string(b))
			if c.want == "" && (resp.StatusCode != http.StatusForbidden || !strings.Contains(body, `"code":"ANONYMOUS_REFUSED"`)) || c.want != "" && body != strings.TrimSpace(c.want) {
				t.Errorf("%d %q", resp.StatusCode, body)
			}
		})
	}
}

func TestAGuestFromAnotherMachine(t *testing.T) {
	for from, want := range map[string]int{"127.0.0.1:5": http.StatusOK, "[::1]:5": http.StatusOK, "192.0.2.1:5": http.StatusForbidden, "": http.StatusForbidden} {
		g := gateway.New(gateway.Config{
			Guests: &gateway.Guests{Key: "guest"}, Log: slog.New(slog.DiscardHandler),
			Prefixes: map[string]http.Handler{"/cove/v1/": http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})},
		})
		r := httptest.NewRequest("GET", "http://127.0.0.1:8080/cove/v1/x", nil)
		r.RemoteAddr = from
		w := httptest.NewRecorder()
		if g.ServeHTTP(w, r); w.Code != want {
			t.Errorf("%q: %d, want %d", from, w.Code, want)
		}
	}
}
