package runtime_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"net/textproto"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/agentsandbox/runtime"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

// The runtime is tested with a real Manager and a real agent; only what lets requests in is a double.

type world struct {
	*httptest.Server
	t       testing.TB
	manager *sandbox.Manager
	runtime *runtime.Runtime
	driver  *breakable
	box     sandbox.Sandbox
	home    string // where commands start
	away    string // a directory elsewhere
}

var acme = auth.Principal{Tenant: "acme"}

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
	between := &breakable{Driver: driver}
	m := sandbox.NewManager(sandbox.Config{}, between, store, catalogue{}, sandbox.NopObserver{}, log)
	if err := m.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	w := &world{t: t, manager: m, driver: between, home: filepath.Join(t.TempDir(), "app"), away: t.TempDir()}
	if w.box, _, err = m.Create(t.Context(), acme, sandbox.Spec{Template: "base", Env: map[string]string{"TMPDIR": t.TempDir()}}); err != nil {
		t.Fatal(err)
	}
	w.runtime = runtime.New(m, log).At(w.home)
	t.Cleanup(w.runtime.Close)
	if err := w.runtime.Prepare(t.Context(), acme, w.box.ID); err != nil {
		t.Fatal(err)
	}
	w.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.runtime.Serve(rw, r, acme, w.box.ID)
	}))
	w.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	t.Cleanup(w.Close)
	w.Start()
	return w
}

// breakable is a driver whose connections to agents can break, as those to another host do.
type breakable struct {
	sandbox.Driver
	gone atomic.Bool // nobody is reached
	deaf atomic.Bool // what is said to agents arrives, and nothing comes back

	mu    sync.Mutex
	conns []net.Conn
	heard []byte // what the server has read and handled
}

// hasHeard reports whether the server has handled a text of an agent.
func (b *breakable) hasHeard(text string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Contains(b.heard, []byte(text))
}

func (b *breakable) Dial(ctx context.Context, id string) (net.Conn, error) {
	if b.gone.Load() {
		return nil, fault.New(fault.Unavailable, "no route")
	}
	conn, err := b.Driver.Dial(ctx, id)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.conns = append(b.conns, conn)
	return &deafConn{Conn: conn, of: b}, nil
}

// cut breaks all connections.
func (b *breakable) cut() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, conn := range b.conns {
		conn.Close()
	}
	b.conns = nil
}

type deafConn struct {
	net.Conn
	of   *breakable
	last []byte // what the reader got last; its next read says that it has handled that
}

func (c *deafConn) Read(p []byte) (int, error) {
	c.of.mu.Lock()
	c.of.heard = append(c.of.heard, c.last...)
	c.of.mu.Unlock()
	n, err := c.Conn.Read(p)
	c.last = bytes.Clone(p[:n])
	if c.of.deaf.Load() {
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

// in is the same world for a test within another.
func (w *world) in(t testing.TB) *world {
	inner := *w
	inner.t = t
	return &inner
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

func (w *world) ask(method, path, body string, headers ...string) answer {
	w.t.Helper()
	resp, err := w.send(w.t.Context(), method, path, strings.NewReader(body), headers...)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, string(text)}
}

func (w *world) send(ctx context.Context, method, path string, body io.Reader, headers ...string) (*http.Response, error) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, w.URL+path, body)
	if err != nil {
		return nil, err
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return w.Client().Do(req)
}

// result is the answer to a command.
type result struct {
	Stdout   string `json:"stdout"`
	Stderr   string `json:"stderr"`
	ExitCode int    `json:"exit_code"`
	TimedOut bool   `json:"timed_out"`
}

func command(text string) string {
	raw, err := json.Marshal(map[string]string{"command": text})
	if err != nil {
		panic(err)
	}
	return string(raw)
}

func (w *world) run(text string, headers ...string) result {
	w.t.Helper()
	return w.decode(w.ask("POST", "/execute", command(text), headers...))
}

func (w *world) decode(a answer) (r result) {
	w.t.Helper()
	if a.status != http.StatusOK {
		w.t.Fatalf("%d %s", a.status, a.body)
	}
	if err := json.Unmarshal([]byte(a.body), &r); err != nil {
		w.t.Fatalf("%s: %v", a.body, err)
	}
	return r
}

// upload sends a form as Python's clients write it: the filename as it is, but for quotes.
func (w *world) upload(name, content string) answer {
	w.t.Helper()
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	part, err := form.CreatePart(textproto.MIMEHeader{
		"Content-Disposition": {`form-data; name="file"; filename="` + strings.ReplaceAll(name, `"`, "%22") + `"`},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	_, _ = io.WriteString(part, content)
	form.Close()
	return w.ask("POST", "/upload", body.String(), "Content-Type", form.FormDataContentType())
}

func (w *world) write(name, content string) {
	w.t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
		w.t.Fatal(err)
	}
}

// read is the content of a file; empty: there is none.
func (w *world) read(name string) string {
	w.t.Helper()
	content, err := os.ReadFile(name)
	if err != nil && !os.IsNotExist(err) {
		w.t.Fatal(err)
	}
	return string(content)
}

// until waits for something to become true.
func (w *world) until(what string, is func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("not in time: %s", what)
		}
	}
}
