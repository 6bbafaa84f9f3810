package router_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/agentsandbox/router"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

// The router is tested with a real Manager and a real agent; names and the runtime are doubles.

var (
	acme   = auth.Principal{Tenant: "acme", KeyID: "k1"}
	globex = auth.Principal{Tenant: "globex", KeyID: "k2"}
)

const acmeKey = "e2b_1111111111111111111111111111111111111111"

type keys struct{}

func (keys) Known(_ context.Context, digits string) bool { return "e2b_"+digits == acmeKey }

func (keys) Authenticate(_ context.Context, presented string) (auth.Principal, error) {
	if presented == acmeKey {
		return acme, nil
	}
	return auth.Principal{}, fault.New(fault.Unauthed, "the API key is not valid")
}

// names knows one sandbox, acme's default/box.
type names struct{ id string }

func (n names) Find(_ context.Context, p auth.Principal, namespace, name string) (string, error) {
	if p.Tenant == "acme" && namespace == "default" && name == "box" {
		return n.id, nil
	}
	return "", fault.New(fault.NotFound, "no such thing")
}

// inside tells what it was asked.
type inside struct{}

func (inside) Serve(w http.ResponseWriter, r *http.Request, p auth.Principal, id string) {
	fmt.Fprintf(w, "%s %s of %s for %s, wait %s", r.Method, r.URL.EscapedPath(), id, p.Tenant, r.Header.Get("X-Sandbox-Timeout"))
}

type world struct {
	*httptest.Server
	t      testing.TB
	router *router.Router
	id     string
	logged *sync.Map // paths that somebody could log after an answer
}

func newWorld(t testing.TB) *world {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	store, err := sqlstore.Open(filepath.Join(t.TempDir(), "db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	driver, err := inproc.New(inproc.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { driver.Close() })
	m := sandbox.NewManager(sandbox.Config{}, driver, store, catalogue{}, sandbox.NopObserver{}, log)
	if err := m.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	box, _, err := m.Create(t.Context(), acme, sandbox.Spec{Template: "base"})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, id: box.ID, logged: &sync.Map{}}
	w.router = router.New(router.Config{Secret: []byte(strings.Repeat("s", 32))}, names{box.ID}, keys{}, inside{}, m, log)
	t.Cleanup(w.router.Close)
	w.Server = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		defer func() { w.logged.Store(r.URL.String(), true) }()
		w.router.ServeHTTP(rw, r)
	}))
	t.Cleanup(w.Close)
	return w
}

type catalogue struct{}

func (catalogue) Resolve(context.Context, string, string) (*template.Template, error) {
	return &template.Template{Name: "base", Digest: "d1"}, nil
}

func (w *world) ask(path string, headers ...string) (status int, body string) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), "GET", w.URL+path, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	resp, err := w.Client().Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

func TestRoutes(t *testing.T) {
	w := newWorld(t)
	mine, theirs := w.router.Prefix(acme), w.router.Prefix(globex)
	key := []string{"Authorization", "Bearer " + acmeKey}
	box := []string{"X-Sandbox-ID", "box"}
	for _, tc := range []struct {
		name, path string
		headers    []string
		status     int
		body       string
	}{
		{"a key in Authorization", "/execute", append(key, box...), 200, "GET /execute of " + w.id + " for acme, wait "},
		{"a key in X-API-Key", "/execute", append([]string{"X-API-Key", acmeKey}, box...), 200, "for acme"},
		{"a token in the path", mine + "/execute", box, 200, "GET /execute of " + w.id + " for acme"},
		{"a path is passed on as it is written", mine + "/exists/%2Fa%20b//c/../%2e%2e", box, 200, "GET /exists/%2Fa%20b//c/../%2e%2e of"},
		{"the root below a token", mine, box, 200, "GET / of"},
		{"a timeout is passed on", "/x", append(append(key, box...), "X-Sandbox-Timeout", "2.5"), 200, "wait 2.5"},
		{"namespace and port may be said", "/x", append(append(key, box...), "X-Sandbox-Namespace", "default", "X-Sandbox-Port", "8888", "X-Sandbox-Pod-IP", "127.0.0.1"), 200, "GET /x"},
		{"health needs nobody", "/healthz", box, 200, `{"status":"ok"}`},
		{"health below a token", mine + "/healthz", nil, 200, `{"status":"ok"}`},
		{"health below a wrong token", "/agents/acme." + strings.Repeat("0", 64) + "/healthz", nil, 401, "not valid"},
		{"no key", "/execute", box, 401, "who is asking"},
		{"a wrong key", "/execute", append([]string{"X-API-Key", "e2b_0"}, box...), 401, "not valid"},
		{"a wrong token", "/agents/acme." + strings.Repeat("0", 64) + "/execute", box, 401, "not valid"},
		{"a wrong token with a key", "/agents/x/execute", append(key, box...), 401, "not valid"},
		{"no token where one belongs", "/agents//execute", append(key, box...), 401, "not valid"},
		{"another tenant's token", theirs + "/execute", box, 404, `there is no sandbox \"box\" in namespace \"default\"`},
		{"a token is of its tenant only", strings.Replace(theirs, "globex", "acme", 1) + "/execute", box, 401, "not valid"},
		{"another namespace", "/execute", append(append(key, box...), "X-Sandbox-Namespace", "other"), 404, "there is no sandbox"},
		{"no name", mine + "/execute", nil, 400, "is missing"},
		{"two names", "/execute", append(append(key, box...), "X-Sandbox-ID", "box2"), 400, "more than one"},
		{"a name that is a path", "/execute", append(key, "X-Sandbox-ID", "../box"), 400, "not the name of a sandbox"},
		{"a name that is too long", "/execute", append(key, "X-Sandbox-ID", strings.Repeat("a", 64)), 400, "not the name of a sandbox"},
		{"a namespace in capitals", "/execute", append(append(key, box...), "X-Sandbox-Namespace", "Default"), 400, "not the name of a namespace"},
		{"a port of zero", "/execute", append(append(key, box...), "X-Sandbox-Port", "0"), 400, "not a port"},
		{"a port beyond all", "/execute", append(append(key, box...), "X-Sandbox-Port", "65536"), 400, "not a port"},
		{"a port that is text", "/execute", append(append(key, box...), "X-Sandbox-Port", "http"), 400, "not a port"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, body := w.ask(tc.path, tc.headers...)
			if status != tc.status || !strings.Contains(body, tc.body) {
				t.Errorf("%d %s", status, body)
			}
			if status >= 400 {
				var e struct{ Detail string }
				if err := json.Unmarshal([]byte(body), &e); err != nil || e.Detail == "" {
					t.Errorf("%s: %v", body, err)
				}
			}
		})
	}
	t.Run("nobody who logs a request learns a token", func(t *testing.T) {
		w.logged.Range(func(path, _ any) bool {
			if strings.Contains(path.(string), "acme.") || strings.Contains(path.(string), "globex.") {
				t.Errorf("%s can be logged", path)
			}
			return true
		})
	})
}

// listen is a server of the sandbox's: the sandboxes of these tests share the network of the test.
func listen(t testing.TB, h http.Handler) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	_, port, err := net.SplitHostPort(s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

func TestPorts(t *testing.T) {
	w := newWorld(t)
	var seen http.Header
	port := listen(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		seen = r.Header.Clone()
		rw.Header().Set("Set-Cookie", "a=b")
		fmt.Fprint(rw, r.URL.RequestURI())
	}))
	t.Run("a port gets the request without what would let it act for its caller", func(t *testing.T) {
		status, body := w.ask(w.router.Prefix(acme)+"/a%2Fb?c=%20d", "X-Sandbox-ID", "box", "X-Sandbox-Port", port, "X-Sandbox-Namespace", "default",
			"X-Sandbox-Pod-IP", "10.0.0.1", "X-Sandbox-Timeout", "3", "X-API-Key", acmeKey, "Authorization", "Bearer "+acmeKey,
			"Referer", w.URL+w.router.Prefix(acme)+"/x", "X-Own", "kept")
		if status != 200 || body != "/a%2Fb?c=%20d" {
			t.Fatalf("%d %s", status, body)
		}
		for _, name := range []string{"Accept-Encoding", "User-Agent", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
			seen.Del(name)
		}
		if diff := cmp.Diff(http.Header{"X-Own": {"kept"}, "X-Sandbox-Timeout": {"3"}}, seen); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("a port that nobody listens on is told", func(t *testing.T) {
		status, body := w.ask("/", "Authorization", "Bearer "+acmeKey, "X-Sandbox-ID", "box", "X-Sandbox-Port", "1")
		if status != http.StatusBadGateway || !strings.Contains(body, "nothing listens on its port 1") {
			t.Errorf("%d %s", status, body)
		}
	})
	t.Run("a WebSocket passes", func(t *testing.T) {
		port := listen(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			c, err := websocket.Accept(rw, r, nil)
			if err != nil {
				return
			}
			defer c.CloseNow()
			kind, data, err := c.Read(r.Context())
			if err == nil {
				_ = c.Write(r.Context(), kind, append([]byte("echo "), data...))
			}
		}))
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		c, _, err := websocket.Dial(ctx, w.URL+w.router.Prefix(acme)+"/ws", &websocket.DialOptions{HTTPHeader: http.Header{
			"X-Sandbox-Id": {"box"}, "X-Sandbox-Port": {port}, "Origin": {"http://elsewhere.example"},
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer c.CloseNow()
		if err := c.Write(ctx, websocket.MessageText, []byte("hi")); err != nil {
			t.Fatal(err)
		}
		if _, data, err := c.Read(ctx); string(data) != "echo hi" || err != nil {
			t.Errorf("%q, %v", data, err)
		}
	})
}

func TestDial(t *testing.T) {
	w := newWorld(t)
	t.Run("whoever comes through a tunnel needs no key", func(t *testing.T) {
		c, err := w.router.Dial(t.Context(), acme)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		in := bufio.NewReader(c)
		for _, path := range []string{"/one", "/two"} { // on one connection
			fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\nX-Sandbox-ID: box\r\n\r\n", path)
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatal(err)
			}
			if body, err := io.ReadAll(resp.Body); !strings.HasPrefix(string(body), "GET "+path+" of "+w.id+" for acme") || err != nil {
				t.Errorf("%d %s, %v", resp.StatusCode, body, err)
			}
		}
	})
	t.Run("another tenant's tunnel does not find it", func(t *testing.T) {
		c, err := w.router.Dial(t.Context(), globex)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\nX-Sandbox-ID: box\r\n\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || resp.StatusCode != http.StatusNotFound {
			t.Errorf("%+v, %v", resp, err)
		}
	})
	t.Run("a closed router refuses", func(t *testing.T) {
		w.router.Close()
		if _, err := w.router.Dial(t.Context(), acme); !fault.Is(err, fault.Unavailable) {
			t.Errorf("%v", err)
		}
	})
}

func TestMatches(t *testing.T) {
	w := newWorld(t)
	for _, tc := range []struct {
		path   string
		header string
		want   bool
	}{
		{"/execute", "box", true},
		{"/v1/sandboxes", "box", true},
		{"/agents/x/y", "", true},
		{"/agents", "", false},
		{"/execute", "", false},
		{"/v1/agents/x", "", false},
	} {
		r := httptest.NewRequest("GET", tc.path, nil)
		if tc.header != "" {
			r.Header.Set("X-Sandbox-ID", tc.header)
		}
		if got := w.router.Matches(r); got != tc.want || w.router.Enters(r) != tc.want {
			t.Errorf("%s with %q: %v", tc.path, tc.header, got)
		}
	}
}

func TestExecutes(t *testing.T) {
	for _, tc := range []struct {
		method, path, port string
		want               bool
	}{
		{"POST", "/execute", "", true},
		{"POST", "/execute", "8888", true},
		{"POST", "/execute/", "", true},
		{"POST", "/agents/acme.token/execute", "", true},
		{"GET", "/execute", "", false},
		{"POST", "/execute", "3000", false},
		{"POST", "/upload/execute", "", false},
		{"POST", "/executed", "", false},
		{"POST", "/agents/execute", "", false},
	} {
		r := httptest.NewRequest(tc.method, tc.path, nil)
		r.Header.Set("X-Sandbox-ID", "box")
		if tc.port != "" {
			r.Header.Set("X-Sandbox-Port", tc.port)
		}
		if got := router.Executes(r); got != tc.want {
			t.Errorf("%+v: %v", tc, got)
		}
	}
	if r := httptest.NewRequest("POST", "/execute", nil); router.Executes(r) {
		t.Error("a request that names no sandbox")
	}
}

func FuzzRoute(f *testing.F) {
	w := newWorld(f)
	f.Add("box", "default", "8888", "/execute")
	f.Add("../x", "", "0", "/agents/acme.0/x")
	f.Add("", "\xff", "99999999999999999999", "/agents//")
	f.Fuzz(func(t *testing.T, name, namespace, port, path string) {
		r := httptest.NewRequest("GET", "/", nil)
		r.URL.Path = "/" + strings.TrimPrefix(path, "/")
		r.Header = http.Header{"X-Sandbox-Id": {name}, "X-Sandbox-Namespace": {namespace}, "X-Sandbox-Port": {port}, "X-Api-Key": {acmeKey}}
		rec := httptest.NewRecorder()
		if port != "" && port != "8888" {
			r.Header.Set("X-Sandbox-Id", name+"-") // no port of this machine is to be reached
		}
		w.router.ServeHTTP(rec, r)
		if rec.Code >= 500 || rec.Code == 0 {
			t.Fatalf("%d %s", rec.Code, rec.Body)
		}
	})
}
