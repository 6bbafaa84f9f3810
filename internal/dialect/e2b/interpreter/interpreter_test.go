package interpreter_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/interpreter"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

var acme = auth.Principal{Tenant: "acme"}

// host is this host's Python, without isolation.
type host struct{ python string }

func (h host) Resolve(context.Context, string, string) (*template.Template, error) {
	return &template.Template{Name: "python", Digest: "host", User: "user", Python: template.Python{Executable: h.python}}, nil
}

// world is a sandbox whose port is served, by a real Manager over a real agent.
type world struct {
	handler *interpreter.Interpreter
	*httptest.Server
	manager *sandbox.Manager
	id      string
	home    string

	mu  sync.Mutex
	log []target.Line
}

func newWorld(t *testing.T) *world { return newWorldWith(t, nil) }

// newWorldWith is one whose sandbox has more in its environment.
func newWorldWith(t *testing.T, more map[string]string) *world {
	t.Helper()
	store, err := sqlstore.Open(filepath.Join(t.TempDir(), "db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	kernel, err := filepath.Abs("../../../../kernel/kernel.py")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	driver, err := inproc.New(inproc.Config{Dir: dir, Kernel: kernel})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { driver.Close() })
	log := slog.New(slog.DiscardHandler)
	m := sandbox.NewManager(sandbox.Config{}, driver, store, host{python(t)}, sandbox.NopObserver{}, log)
	if err := m.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	env := map[string]string{"GLOBAL": "here"}
	maps.Copy(env, more)
	sb, _, err := m.Create(t.Context(), acme, sandbox.Spec{Template: "python", Env: env})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{manager: m, id: sb.ID, home: filepath.Join(dir, sb.ID)}
	w.handler = interpreter.New(m, log)
	w.Server = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		t := &target.Target{Sandbox: sb, Who: acme, Log: w.note}
		w.handler.ServeHTTP(rw, r.WithContext(target.With(r.Context(), t)))
	}))
	t.Cleanup(w.Close)
	return w
}

func (w *world) note(l target.Line) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log = append(w.log, l)
}

func python(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"/usr/bin/python3", "python3"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	t.Skip("these tests need python3")
	return ""
}

type object = map[string]any

func (w *world) do(t *testing.T, method, path string, body any) (int, string) {
	t.Helper()
	raw, ok := body.(string)
	if !ok && body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		raw = string(b)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, w.URL+path, strings.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// run is a whole execution; every line must be plain ASCII and the last one the end.
func (w *world) run(t *testing.T, req object) execution {
	t.Helper()
	status, body := w.do(t, http.MethodPost, "/execute", req)
	if status != http.StatusOK {
		t.Fatalf("%d %s", status, body)
	}
	return parse(t, body)
}

func parse(t *testing.T, body string) (e execution) {
	t.Helper()
	ended := false
	for line := range strings.Lines(body) {
		if i := strings.IndexFunc(line, func(r rune) bool { return r > 126 }); i >= 0 || ended || line == "\n" {
			t.Fatalf("bad line %q", line)
		}
		var o object
		if err := json.Unmarshal([]byte(line), &o); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		ended = e.add(t, o)
	}
	if !ended {
		t.Errorf("no end in %q", body)
	}
	return e
}

// execution is what an SDK makes of the lines.
type execution struct {
	stdout, stderr string
	outputs        []string // stdout's pieces
	results        []object
	err            object
	count          int
	other          []object
}

func (e *execution) add(t *testing.T, o object) (end bool) {
	t.Helper()
	text, _ := o["text"].(string)
	switch o["type"] {
	case "stdout", "stderr":
		if _, err := time.Parse(time.RFC3339Nano, o["timestamp"].(string)); err != nil {
			t.Error(err)
		}
		if o["type"] == "stdout" {
			e.stdout += text
			e.outputs = append(e.outputs, text)
		} else {
			e.stderr += text
		}
	case "result":
		delete(o, "type")
		e.results = append(e.results, o)
	case "error":
		delete(o, "type")
		e.err = o
	case "number_of_executions":
		e.count = int(o["execution_count"].(float64))
	case "end_of_execution":
		return true
	default:
		e.other = append(e.other, o)
	}
	return false
}

func (e *execution) text() string {
	for _, r := range e.results {
		if r["is_main_result"] == true {
			return r["text"].(string)
		}
	}
	return ""
}

func TestPython(t *testing.T) {
	w := newWorld(t)
	t.Run("state is kept and counted", func(t *testing.T) {
		w.run(t, object{"code": "x = 20"})
		if e := w.run(t, object{"code": "x + 1", "context_id": nil, "language": nil, "env_vars": nil}); e.text() != "21" || e.count != 2 {
			t.Errorf("%+v", e)
		}
		if e := w.run(t, object{"code": "x", "language": "python"}); e.text() != "20" || e.count != 3 {
			t.Errorf("%+v", e)
		}
	})
	t.Run("stdout and stderr come in the order in which they were written", func(t *testing.T) {
		_, body := w.do(t, http.MethodPost, "/execute", object{"code": "import sys\nfor i in range(200):\n    print(i, file=sys.stderr if i % 3 else sys.stdout)"})
		var heard []string
		for line := range strings.Lines(body) {
			var o struct{ Type, Text string }
			if err := json.Unmarshal([]byte(line), &o); err != nil {
				t.Fatal(err)
			}
			if o.Type == "stdout" || o.Type == "stderr" {
				heard = append(heard, strings.Fields(o.Text)...)
			}
		}
		var want []string
		for i := range 200 {
			want = append(want, strconv.Itoa(i))
		}
		if !slices.Equal(heard, want) {
			t.Errorf("%q", heard)
		}
	})
	t.Run("output is told as it is, in characters that nothing can cut", func(t *testing.T) {
		e := w.run(t, object{"code": "import sys, os; print('grün 🌊'); print('oh', file=sys.stderr)\nos.write(1, b'\\xff\\n')"})
		if e.stdout != "grün 🌊\n\uFFFD\n" || e.stderr != "oh\n" {
			t.Errorf("%+v", e)
		}
	})
	t.Run("a text loses its quotes", func(t *testing.T) {
		for code, want := range map[string]string{`'a'`: "a", `"it's"`: "it's", `''`: "", `['a']`: "['a']", `b'x'`: "b'x'"} {
			if e := w.run(t, object{"code": code}); e.text() != want {
				t.Errorf("%s is shown as %q", code, e.text())
			}
		}
	})
	t.Run("every type has its place", func(t *testing.T) {
		e := w.run(t, object{"code": `display({"text/html": "<b>", "image/png": "aGk=", "application/json": {"a": [1]}, "x/y": "z", "text/plain": "'q'"}, raw=True)`})
		want := object{"html": "<b>", "png": "aGk=", "json": object{"a": []any{1.0}}, "extra": object{"x/y": "z"}, "text": "q", "is_main_result": false}
		if got := e.results; len(got) != 1 || !same(got[0], want) {
			t.Errorf("%v", got)
		}
	})
	t.Run("a list is JSON as well", func(t *testing.T) {
		if e := w.run(t, object{"code": `[1, {"a": None}]`}); len(e.results) != 1 || !same(e.results[0]["json"], []any{1.0, object{"a": nil}}) {
			t.Errorf("%+v", e)
		}
	})
	t.Run("an exception is told with its traceback", func(t *testing.T) {
		e := w.run(t, object{"code": "def f():\n  return 1 / 0\nf()"})
		trace, _ := e.err["traceback"].(string)
		if e.err["name"] != "ZeroDivisionError" || e.err["value"] != "division by zero" || !strings.Contains(trace, "in f") {
			t.Errorf("%+v", e)
		}
	})
	t.Run("variables of a run end with it", func(t *testing.T) {
		code := "import os; (os.environ.get('GLOBAL'), os.environ.get('MINE'))"
		if e := w.run(t, object{"code": code, "env_vars": object{"GLOBAL": "other", "MINE": "1"}}); e.text() != "('other', '1')" {
			t.Errorf("%+v", e)
		}
		if e := w.run(t, object{"code": code}); e.text() != "('here', None)" {
			t.Errorf("%+v", e)
		}
	})
	t.Run("exit is told, and the next run works", func(t *testing.T) {
		e := w.run(t, object{"code": "print('before'); exit(3)"})
		if e.stdout != "before\n" || e.err["name"] != "ContextRestarting" || !strings.Contains(e.err["value"].(string), "status 3") {
			t.Errorf("%+v", e)
		}
		if e := w.run(t, object{"code": "'x' in globals()"}); e.text() != "False" || e.err != nil || e.count != 1 {
			t.Errorf("%+v", e)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if len(w.log) != 2 || w.log[0].Logger != "interpreter" {
			t.Errorf("the sandbox's log has %+v", w.log)
		}
	})
}

func same(a, b any) bool {
	x, _ := json.Marshal(a)
	y, _ := json.Marshal(b)
	return bytes.Equal(x, y)
}

func TestContexts(t *testing.T) {
	w := newWorld(t)
	list := func() (all []map[string]string) {
		t.Helper()
		_, body := w.do(t, http.MethodGet, "/contexts", nil)
		if err := json.Unmarshal([]byte(body), &all); err != nil {
			t.Fatal(err, body)
		}
		return all
	}
	if all := list(); len(all) != 2 || all[0]["language"] != "python" || all[1]["language"] != "javascript" || all[0]["cwd"] != w.home {
		t.Errorf("at the start there are %v", all)
	}
	make := func(body any) (made map[string]string) {
		t.Helper()
		status, answer := w.do(t, http.MethodPost, "/contexts", body)
		if err := json.Unmarshal([]byte(answer), &made); err != nil || status != http.StatusOK {
			t.Fatal(status, answer)
		}
		return made
	}
	one, two := make(object{}), make(object{"language": "python", "cwd": "/usr"})
	if one["cwd"] != w.home || two["cwd"] != "/usr" || one["id"] >= two["id"] {
		t.Errorf("%v, %v", one, two)
	}
	for _, c := range []map[string]string{one, two} {
		if e := w.run(t, object{"code": "import os; mine = os.getcwd(); mine", "context_id": c["id"]}); e.text() != c["cwd"] || e.count != 1 {
			t.Errorf("%+v", e)
		}
	}
	if all := list(); len(all) != 4 || all[2]["id"] != one["id"] || all[3]["id"] != two["id"] {
		t.Errorf("%v", all)
	}
	if status, body := w.do(t, http.MethodPost, "/contexts/"+two["id"]+"/restart", nil); status != http.StatusOK || body != "null\n" {
		t.Error(status, body)
	}
	if e := w.run(t, object{"code": "import os; ('mine' in globals(), os.getcwd())", "context_id": two["id"]}); e.text() != "(False, '/usr')" {
		t.Errorf("after its restart: %+v", e)
	}
	if status, body := w.do(t, http.MethodDelete, "/contexts/"+one["id"], nil); status != http.StatusOK || body != "null\n" {
		t.Error(status, body)
	}
	if all := list(); len(all) != 3 {
		t.Errorf("%v", all)
	}
}

func TestRefusals(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		method, path string
		body         any
		status       int
		says         string
	}{
		"health":                      {"GET", "/health", nil, 200, `"OK"`},
		"no code":                     {"POST", "/execute", object{}, 422, `"loc":["body","code"]`},
		"no JSON":                     {"POST", "/execute", "{", 422, "json_invalid"},
		"nothing":                     {"POST", "/execute", "", 422, "Field required"},
		"code that is no text":        {"POST", "/execute", object{"code": 1}, 422, `"loc":["body","code"]`},
		"a variable that is no text":  {"POST", "/execute", object{"code": "1", "env_vars": object{"A": 1}}, 422, "env_vars"},
		"a variable without value":    {"POST", "/execute", object{"code": "1", "env_vars": object{"A": nil}}, 422, "env_vars"},
		"a variable nobody can have":  {"POST", "/execute", object{"code": "1", "env_vars": object{"A=": "x"}}, 400, "environment"},
		"context and language":        {"POST", "/execute", object{"code": "1", "context_id": "a", "language": "python"}, 400, "Only one of"},
		"an unknown context":          {"POST", "/execute", object{"code": "1", "context_id": "../x"}, 404, "Context ../x not found"},
		"an unknown language":         {"POST", "/execute", object{"code": "1", "language": "cobol"}, 501, `no kernel for the language "cobol"`},
		"a context of that language":  {"POST", "/contexts", object{"language": "cobol"}, 501, "cobol"},
		"a directory that is not":     {"POST", "/contexts", object{"cwd": "/no/such"}, 500, "/no/such"},
		"delete of an unknown one":    {"DELETE", "/contexts/abc", nil, 404, "Context abc not found"},
		"restart of an unknown one":   {"POST", "/contexts/abc/restart", nil, 404, "Context abc not found"},
		"delete of one never used":    {"DELETE", "/contexts/javascript", nil, 200, "null"},
		"another path":                {"GET", "/nothing", nil, 404, `{"detail":"Not Found"}`},
		"another method":              {"GET", "/execute", nil, 405, `{"detail":"Method Not Allowed"}`},
		"code that is far too long":   {"POST", "/execute", object{"code": strings.Repeat("x", sandbox.MaxCode+1)}, 413, "too long"},
		"a body that is far too long": {"POST", "/execute", strings.Repeat(" ", 6*sandbox.MaxCode+1<<20+1), 413, "too large"},
	} {
		t.Run(name, func(t *testing.T) {
			if status, body := w.do(t, c.method, c.path, c.body); status != c.status || !strings.Contains(body, c.says) {
				t.Errorf("%d %.300s", status, body)
			}
		})
	}
}

func TestAnyOriginMayAsk(t *testing.T) {
	w := newWorld(t)
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodOptions, w.URL+"/execute", nil)
	req.Header.Set("Origin", "https://example.org")
	req.Header.Set("Access-Control-Request-Method", "POST")
	req.Header.Set("Access-Control-Request-Headers", "x-access-token")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if h := resp.Header; resp.StatusCode != 200 || h.Get("Access-Control-Allow-Origin") != "*" || h.Get("Access-Control-Allow-Headers") != "x-access-token" {
		t.Errorf("%d %v", resp.StatusCode, h)
	}
}

// begin starts an execution and gives its stream once a line of output has come.
func (w *world) begin(t *testing.T, ctx context.Context, req object) io.Closer {
	t.Helper()
	body, _ := json.Marshal(req)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, w.URL+"/execute", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(resp.Body)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(line, "stdout") {
			return &running{resp.Body, lines}
		}
	}
}

type running struct {
	io.Closer
	lines *bufio.Reader
}

func TestLeavingInterrupts(t *testing.T) {
	w := newWorld(t)
	w.run(t, object{"code": "kept = 1"})
	for _, code := range []string{"print('go'); import time; time.sleep(600)", "print('go')\nwhile True: pass"} {
		ctx, leave := context.WithCancel(t.Context())
		w.begin(t, ctx, object{"code": code})
		leave()
		begun := time.Now()
		if e := w.run(t, object{"code": "kept"}); e.text() != "1" || time.Since(begun) > time.Minute {
			t.Errorf("%+v after %v", e, time.Since(begun))
		}
	}
}

func TestARunEndsWithItsSandbox(t *testing.T) {
	w := newWorld(t)
	r := w.begin(t, t.Context(), object{"code": "print('go'); import time; time.sleep(600)"}).(*running)
	defer r.Close()
	if _, err := w.manager.Kill(t.Context(), acme, w.id); err != nil && !fault.Is(err, fault.Gone) {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(r.lines); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%q, %v", rest, err)
	}
	if status, body := w.do(t, http.MethodPost, "/execute", object{"code": "1"}); status != http.StatusBadGateway || !strings.Contains(body, "The sandbox was not found") {
		t.Errorf("%d %s", status, body)
	}
}

func FuzzExecution(f *testing.F) {
	for _, seed := range []string{`{"code":"1"}`, `{"code":"1","context_id":"x","env_vars":{"A":"b"}}`, `{`, `[]`, `null`, `{"code":null,"language":"js"}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(_ *testing.T, body []byte) { interpreter.DecodeExecution(body) })
}
