package gateway_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/covehq/cove/internal/gateway"
)

func newServer(t *testing.T, log io.Writer, cfg gateway.Config) (*httptest.Server, *gateway.Gateway) {
	t.Helper()
	cfg.Log = slog.New(slog.NewTextHandler(log, nil))
	cfg.Metrics = http.NotFoundHandler()
	g := gateway.New(cfg)
	s := httptest.NewServer(g)
	t.Cleanup(s.Close)
	return s, g
}

func get(t *testing.T, url string) (*http.Response, string) {
	t.Helper()
	req, _ := http.NewRequest(http.MethodGet, url, nil)
	req.Header.Set("X-API-Key", "e2b_secret")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp, string(b)
}

func TestTheLongestPrefixAnswersAndTheRestIsNamed(t *testing.T) {
	say := func(text string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, text) })
	}
	s, _ := newServer(t, io.Discard, gateway.Config{Prefixes: map[string]http.Handler{"/a/": say("a"), "/a/b/": say("b")}})
	for path, want := range map[string]string{"/a/x": "a", "/a/b/x": "b", "/a/b": "b", "/a": "a"} {
		if _, got := get(t, s.URL+path); got != want {
			t.Errorf("%s went to %s", path, got)
		}
	}
	resp, body := get(t, s.URL+"/ab")
	if resp.StatusCode != 404 || !strings.Contains(body, "/a/b/, /a/, /healthz") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

// inside takes what has a certain header.
type inside struct{ http.Handler }

func (inside) Matches(r *http.Request) bool { return r.Header.Get("X-API-Key") != "" }
func (inside) ByHost(r *http.Request) bool  { return strings.HasPrefix(r.Host, "80-") }

func TestSandboxesComeFirstAndTheRestLast(t *testing.T) {
	say := func(text string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, text) })
	}
	s, _ := newServer(t, io.Discard, gateway.Config{
		Inside: inside{say("inside")}, Prefixes: map[string]http.Handler{"/a/": say("a")}, Else: say("else"),
	})
	for _, path := range []string{"/a/x", "/healthz", "/metrics", "/x"} {
		if _, got := get(t, s.URL+path); got != "inside" {
			t.Errorf("%s for a sandbox went to %s", path, got)
		}
	}
	for path, want := range map[string]string{"/a/x": "a", "/healthz": "{\"status\":\"ok\"}\n", "/x": "else", "/": "else", "/health": "else"} {
		resp, err := http.Get(s.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if string(b) != want {
			t.Errorf("%s went to %q", path, b)
		}
	}
}

// router takes what names a sandbox.
type router struct{ http.Handler }

func (router) Matches(r *http.Request) bool { return r.Header.Get("X-Sandbox-Id") != "" }
func (router) Enters(r *http.Request) bool  { return r.Header.Get("X-Sandbox-Id") != "" }

func TestTheRouterComesBeforePaths(t *testing.T) {
	say := func(text string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, text+r.Header.Get("X-Api-Key")) })
	}
	s, _ := newServer(t, io.Discard, gateway.Config{
		Router: router{say("router ")}, Prefixes: map[string]http.Handler{"/a/": say("a ")}, OpenSandbox: ports{say("open ")},
		Else: say("else "), Guests: &gateway.Guests{Key: "guest"},
	})
	for _, c := range []struct {
		path, want string
		headers    map[string]string
	}{
		{"/a/x", "router guest", map[string]string{"X-Sandbox-ID": "box"}},
		{"/v1/x", "router guest", map[string]string{"X-Sandbox-ID": "box"}},
		{"/healthz", "router ", map[string]string{"X-Sandbox-ID": "box"}},
		{"/x", "router guest", map[string]string{"X-Sandbox-ID": "box"}},
		{"/x", "router k", map[string]string{"X-Sandbox-ID": "box", "X-API-Key": "k"}},
		{"/x", "router ", map[string]string{"X-Sandbox-ID": "box", "Origin": "http://evil.test"}}, // it has guards of its own
		{"/a/x", "a guest", nil},
	} {
		req, _ := http.NewRequest(http.MethodGet, s.URL+c.path, nil)
		for name, value := range c.headers {
			req.Header.Set(name, value)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if string(b) != c.want {
			t.Errorf("%s with %v went to %q", c.path, c.headers, b)
		}
	}
}

// A header of another dialect must not change who answers for Cove's own paths.
func TestNativePath_WithForeignHeaders(t *testing.T) {
	say := func(text string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, text+r.Header.Get("X-Api-Key")) })
	}
	s, _ := newServer(t, io.Discard, gateway.Config{
		Native: "/cove/v1/", Prefixes: map[string]http.Handler{"/cove/v1/": say("native "), "/artifacts/": say("links ")},
		Inside: inside{say("inside ")}, Router: router{say("router ")}, Guests: &gateway.Guests{Key: "guest"},
	})
	for name, c := range map[string]struct {
		path, host, want string
		headers          map[string]string
	}{
		"header of E2B":            {path: "/cove/v1/x", headers: map[string]string{"X-API-Key": "k"}, want: "native k"},
		"header of agent-sandbox":  {path: "/cove/v1/x", headers: map[string]string{"X-Sandbox-ID": "box"}, want: "native guest"},
		"without a slash":          {path: "/cove/v1", headers: map[string]string{"X-Sandbox-ID": "box"}, want: "native guest"},
		"host of a sandbox":        {path: "/cove/v1/x", host: "80-box.localhost", headers: map[string]string{"X-API-Key": "k"}, want: "inside k"},
		"path that only begins so": {path: "/cove/v11/x", headers: map[string]string{"X-Sandbox-ID": "box"}, want: "inside guest"},
		"links come after headers": {path: "/artifacts/x", headers: map[string]string{"X-Sandbox-ID": "box"}, want: "inside guest"},
		"page of another origin":   {path: "/cove/v1/x", headers: map[string]string{"X-Sandbox-ID": "box", "Origin": "http://evil.test"}, want: ""},
	} {
		t.Run(name, func(t *testing.T) {
			req, _ := http.NewRequest(http.MethodGet, s.URL+c.path, nil)
			if c.host != "" {
				req.Host = c.host
			}
			for name, value := range c.headers {
				req.Header.Set(name, value)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if c.want == "" && resp.StatusCode != http.StatusForbidden || c.want != "" && string(b) != c.want {
				t.Errorf("%d %q, want %q", resp.StatusCode, b, c.want)
			}
		})
	}
}

func TestTheLogHasNoSecrets(t *testing.T) {
	var log bytes.Buffer
	s, g := newServer(t, &log, gateway.Config{})
	get(t, s.URL+"/x?token=hunter2")
	g.Wait()
	if strings.Contains(log.String(), "secret") || strings.Contains(log.String(), "hunter2") || !strings.Contains(log.String(), "path=/x") {
		t.Error(log.String())
	}
}

func TestAPanicFailsOneRequest(t *testing.T) {
	boom := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("boom") })
	s, _ := newServer(t, io.Discard, gateway.Config{Prefixes: map[string]http.Handler{"/boom/": boom}})
	if resp, body := get(t, s.URL+"/boom/"); resp.StatusCode != 500 || strings.Contains(body, "boom") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	if resp, _ := get(t, s.URL+"/healthz"); resp.StatusCode != 200 {
		t.Errorf("and the server goes on: %d", resp.StatusCode)
	}
}

func TestS4_129_D17_ReadinessTellsWhichPartFailsAndNotWhy(t *testing.T) {
	var not error
	var logged bytes.Buffer
	s, g := newServer(t, &logged, gateway.Config{ReadyFor: time.Nanosecond, Checks: gateway.Checks{
		"database": func(context.Context) error { return not }, "driver": func(context.Context) error { return nil },
	}})
	want := func(claim string, status int, body string) {
		t.Helper()
		resp, got := get(t, s.URL+"/readyz")
		if resp.StatusCode != status || strings.TrimSpace(got) != body {
			t.Errorf("%s: %d %s", claim, resp.StatusCode, got)
		}
		if retry := resp.Header.Get("Retry-After"); (retry != "") != (status == 503) {
			t.Errorf("%s: %d with Retry-After %q", claim, resp.StatusCode, retry)
		}
	}
	want("all is well", 200, `{"status":"ready","checks":{"database":"ok","driver":"ok"}}`)
	not = errors.New("open /secret/place: hunter2")
	want("without a database", 503, `{"status":"unavailable","checks":{"database":"failed","driver":"ok"},`+
		`"error":{"kind":"unavailable","message":"not ready: database; the server's log says why"}}`)
	not = nil
	g.Drain()
	want("while it drains", 503, `{"status":"draining","checks":{"database":"ok","driver":"ok"},"error":{"kind":"unavailable","message":"the server is shutting down"}}`)
	s.Close() // so that nobody logs any more
	if !strings.Contains(logged.String(), "hunter2") {
		t.Errorf("the operator is told %s", &logged)
	}
}

func TestWhoeverAsksForReadinessAsksThePartsRarely(t *testing.T) {
	var logged bytes.Buffer
	asked := 0
	s, _ := newServer(t, &logged, gateway.Config{ReadyFor: time.Hour, Checks: gateway.Checks{
		"database": func(ctx context.Context) error { asked++; return errors.Join(ctx.Err(), errors.New("no")) },
	}})
	for range 20 {
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // who hangs up ends no check
		req, _ := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+"/readyz", nil)
		if resp, err := http.DefaultClient.Do(req); err == nil {
			resp.Body.Close()
		}
		if resp, _ := get(t, s.URL+"/readyz"); resp.StatusCode != 503 {
			t.Fatal(resp.Status)
		}
	}
	s.Close()
	if told := strings.Count(logged.String(), "not ready"); asked != 1 || told != 1 || strings.Contains(logged.String(), "canceled") {
		t.Errorf("asked %d times, told %d times: %s", asked, told, &logged)
	}
}

func TestOnlyAChangeOfReadinessIsLogged(t *testing.T) {
	var logged bytes.Buffer
	var not error
	s, _ := newServer(t, &logged, gateway.Config{ReadyFor: time.Nanosecond, Checks: gateway.Checks{"driver": func(context.Context) error { return not }}})
	for _, now := range []error{nil, errors.New("no"), errors.New("no"), nil, nil} {
		not = now
		get(t, s.URL+"/readyz")
	}
	s.Close()
	if failed, again := strings.Count(logged.String(), "not ready"), strings.Count(logged.String(), "ready again"); failed != 1 || again != 1 {
		t.Error(logged.String())
	}
}

func TestAPartThatHangsHasFailed(t *testing.T) {
	var asked atomic.Int32
	free := make(chan struct{})
	s, g := newServer(t, io.Discard, gateway.Config{ReadyFor: time.Nanosecond, Checks: gateway.Checks{
		"files": func(context.Context) error { asked.Add(1); <-free; return nil },
	}})
	for range 2 {
		if resp, body := get(t, s.URL+"/readyz"); resp.StatusCode != 503 || !strings.Contains(body, `"files":"failed"`) {
			t.Error(resp.Status, body)
		}
	}
	if asked.Load() != 1 {
		t.Errorf("while it hangs it was asked %d times", asked.Load())
	}
	close(free)
	if resp, _ := get(t, s.URL+"/readyz"); resp.StatusCode != 200 {
		t.Error("when it has come back:", resp.Status)
	}
	g.Wait()
}

// TestReadiness_OldFailureIsNotTold has a check that hangs, fails at last and is well again.
func TestReadiness_OldFailureIsNotTold(t *testing.T) {
	asked := 0
	free := make(chan struct{})
	s, g := newServer(t, io.Discard, gateway.Config{ReadyFor: time.Nanosecond, Checks: gateway.Checks{"driver": func(context.Context) error {
		if asked++; asked > 1 {
			return nil
		}
		<-free
		return errors.New("the maker is gone")
	}}})
	if resp, body := get(t, s.URL+"/readyz"); resp.StatusCode != 503 {
		t.Error("while it hangs:", resp.Status, body)
	}
	close(free)
	if resp, body := get(t, s.URL+"/readyz"); resp.StatusCode != 200 {
		t.Error("after it has recovered:", resp.Status, body)
	}
	g.Wait()
}

func TestAHarmlessRequestIDIsKept(t *testing.T) {
	s, _ := newServer(t, io.Discard, gateway.Config{})
	for given, kept := range map[string]bool{"abc-1": true, "a b": false, strings.Repeat("x", 65): false} {
		req, _ := http.NewRequest(http.MethodGet, s.URL+"/healthz", nil)
		req.Header.Set("X-Request-Id", given)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if got := resp.Header.Get("X-Request-Id"); (got == given) != kept || got == "" {
			t.Errorf("%q became %q", given, got)
		}
	}
}

func TestWhoCountsIsToldWhatBecameOfARequest(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /a/{id}", func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusCreated)
		io.CopyN(w, r.Body, 3)
	})
	var seen []string
	s, g := newServer(t, io.Discard, gateway.Config{
		Prefixes: map[string]http.Handler{"/a/": mux},
		Served: func(r *http.Request, a gateway.Answer) {
			seen = append(seen, fmt.Sprint(r.Pattern, " ", a.Request != "", " ", a.Status, " ", a.Received > 0, " ", a.Sent))
		},
	})
	resp, err := http.Post(s.URL+"/a/1", "text/plain", strings.NewReader("hello"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	g.Wait()
	get(t, s.URL+"/a/1")
	g.Wait()
	want := []string{"POST /a/{id} true 201 true 3", " true 405 false 19"}
	if !slices.Equal(seen, want) {
		t.Errorf("told %q, want %q", seen, want)
	}
}

func TestReadiness_TellsPublicReasons(t *testing.T) {
	s, _ := newServer(t, io.Discard, gateway.Config{
		Notes: func() []string { return []string{"template base is being built again; the earlier one serves"} },
		Checks: gateway.Checks{
			"database":  func(context.Context) error { return errors.New("hunter2") },
			"templates": func(context.Context) error { return gateway.Public("template python is damaged") },
		},
	})
	want := `{"status":"unavailable","checks":{"database":"failed","templates":"failed"},` +
		`"notes":["template base is being built again; the earlier one serves"],` +
		`"error":{"kind":"unavailable","message":"not ready: database, templates; template python is damaged; the server's log says why"}}`
	for range 2 { // asked, and from memory
		if resp, body := get(t, s.URL+"/readyz"); resp.StatusCode != 503 || strings.TrimSpace(body) != want {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
	}
}
