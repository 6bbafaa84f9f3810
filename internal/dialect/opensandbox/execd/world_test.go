package execd_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/dialect/opensandbox/execd"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

// Execd is tested with a real Manager and a real agent; only what lets requests in is a double, which gives each its target.

type world struct {
	*httptest.Server
	t       testing.TB
	manager *sandbox.Manager
	box     sandbox.Sandbox
	home    string
	temp    string
}

var acme = auth.Principal{Tenant: "acme"}

func newWorld(t testing.TB) *world { return newWorldWith(t, nil) }

// newWorldWith is one whose sandbox has more in its environment.
func newWorldWith(t testing.TB, more map[string]string) *world {
	t.Helper()
	return newWorldOf(t, sandbox.Config{}, more)
}

// newWorldOf has a Manager with this configuration.
func newWorldOf(t testing.TB, cfg sandbox.Config, more map[string]string) *world {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	store, err := sqlstore.Open(filepath.Join(t.TempDir(), "db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	dir := t.TempDir()
	kernel, err := filepath.Abs("../../../../kernel/kernel.py")
	if err != nil {
		t.Fatal(err)
	}
	driver, err := inproc.New(inproc.Config{Dir: dir, Kernel: kernel})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { driver.Close() })
	m := sandbox.NewManager(cfg, driver, store, catalogue{}, sandbox.NopObserver{}, log)
	if err := m.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	cache, err := os.UserCacheDir() // what is compiled in tests is not compiled for each of them
	if err != nil {
		t.Fatal(err)
	}
	temp := t.TempDir() // the sandbox has no root of its own here: nothing of it is to be left
	env := map[string]string{
		"GREETING": "hello", "GOCACHE": filepath.Join(cache, "go-build"), "TMPDIR": temp, "EXECD_ENVS": filepath.Join(temp, "execd", "envs"),
	}
	maps.Copy(env, more)
	box, _, err := m.Create(t.Context(), acme, sandbox.Spec{Template: "base", Env: env})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, manager: m, box: box, home: filepath.Join(dir, box.ID), temp: temp}
	h := execd.New(m, log)
	t.Cleanup(h.Close)
	w.Server = httptest.NewUnstartedServer(w.letIn(h))
	w.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	t.Cleanup(w.Close)
	w.Start()
	return w
}

// letIn is what stands in front of execd.
func (w *world) letIn(next http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		sb, err := w.manager.Get(r.Context(), acme, w.box.ID)
		if err != nil {
			http.Error(rw, err.Error(), http.StatusNotFound)
			return
		}
		t := &access.Target{Sandbox: sb, Who: acme, Port: access.PortExecd}
		next.ServeHTTP(rw, r.WithContext(access.With(r.Context(), t)))
	})
}

type catalogue struct{}

func (catalogue) Resolve(_ context.Context, _, name string) (*template.Template, error) {
	if name != "base" {
		return nil, fault.New(fault.NotFound, "there is no template %q", name)
	}
	return &template.Template{Name: "base", Digest: "d1"}, nil
}

// answer is what came back.
type answer struct {
	status int
	header http.Header
	body   string
}

// ask sends a request; a body that is no text is sent as JSON.
func (w *world) ask(method, path string, body any, headers ...string) answer {
	w.t.Helper()
	resp := w.send(w.t.Context(), method, path, body, headers...)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, string(text)}
}

func (w *world) send(ctx context.Context, method, path string, body any, headers ...string) *http.Response {
	w.t.Helper()
	var in io.Reader
	switch body := body.(type) {
	case nil:
	case string:
		in = strings.NewReader(body)
	case io.Reader:
		in = body
	default:
		raw, err := json.Marshal(body)
		if err != nil {
			w.t.Fatal(err)
		}
		in = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, w.URL+path, in)
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := w.Client().Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	return resp
}

// event is one of a stream, without its times.
type event struct {
	Type    string
	Text    string
	Count   int                        `json:"execution_count"`
	Took    int64                      `json:"execution_time"`
	Stamp   int64                      `json:"timestamp"`
	Results map[string]json.RawMessage `json:"results"`
	Error   *struct {
		Name      string   `json:"ename"`
		Value     string   `json:"evalue"`
		Traceback []string `json:"traceback"`
	}
}

// nextEvent reads one event: a line of JSON and a blank one.
func nextEvent(t testing.TB, in *bufio.Reader) (e event, more bool) {
	t.Helper()
	line, err := in.ReadString('\n')
	if err == io.EOF && line == "" {
		return e, false
	}
	if err != nil {
		t.Fatalf("stream broke: %v after %q", err, line)
	}
	if err := json.Unmarshal([]byte(line), &e); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	if blank, err := in.ReadString('\n'); err != nil || blank != "\n" {
		t.Fatalf("after %q came %q, not a blank line", line, blank)
	}
	if e.Stamp == 0 {
		t.Fatalf("%q has no timestamp", line)
	}
	return e, true
}

// stream sends a request and gives everything that is told.
func (w *world) stream(path string, body any) []event {
	w.t.Helper()
	resp := w.send(w.t.Context(), "POST", path, body)
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		text, _ := io.ReadAll(resp.Body)
		w.t.Fatalf("%s: %d %s %s", path, resp.StatusCode, resp.Header.Get("Content-Type"), text)
	}
	var list []event
	in := bufio.NewReader(resp.Body)
	for {
		e, more := nextEvent(w.t, in)
		if !more {
			return list
		}
		list = append(list, e)
	}
}

// told is a stream in short: "type text", with the exit of an error; the id of the first is left out.
func told(list []event) []string {
	var out []string
	for _, e := range list {
		switch {
		case e.Type == "init" || e.Type == "execution_complete":
			out = append(out, e.Type)
		case e.Error != nil:
			out = append(out, e.Type+" "+e.Error.Name+" "+e.Error.Value)
		case e.Type == "result":
			out = append(out, e.Type+" "+string(e.Results["text"]))
		case e.Type == "ping", e.Type == "execution_count":
		default:
			out = append(out, e.Type+" "+e.Text)
		}
	}
	return out
}

func (w *world) json(a answer, into any) {
	w.t.Helper()
	if a.status/100 != 2 {
		w.t.Fatalf("%d %s", a.status, a.body)
	}
	if err := json.Unmarshal([]byte(a.body), into); err != nil {
		w.t.Fatalf("%s: %v", a.body, err)
	}
}
