package envd_test

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"connectrpc.com/connect"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/envd"
	"github.com/covehq/cove/internal/dialect/e2b/envd/envdpb/envdpbconnect"
	"github.com/covehq/cove/internal/dialect/e2b/target"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

// Envd is tested with a real Manager, a real agent and real Connect clients; only the edge in front is a double, which
// gives each request its target.

type world struct {
	*httptest.Server
	manager *sandbox.Manager
	box     sandbox.Sandbox
	home    string
	tokens  target.Tokens

	mu      sync.Mutex
	options target.Options
	lines   []target.Line
}

var acme = auth.Principal{Tenant: "acme"}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := newUnstarted(t)
	w.Start()
	return w
}

// newWorld2 is one that is reached over HTTP/2.
func newWorld2(t testing.TB) *world {
	t.Helper()
	w := newUnstarted(t)
	w.EnableHTTP2 = true
	w.StartTLS()
	return w
}

func newUnstarted(t testing.TB) *world {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	store, err := sqlstore.Open(filepath.Join(t.TempDir(), "db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	dir := t.TempDir()
	driver, err := inproc.New(inproc.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { driver.Close() })
	m := sandbox.NewManager(sandbox.Config{}, driver, store, catalogue{}, sandbox.NopObserver{}, log)
	if err := m.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	box, _, err := m.Create(t.Context(), acme, sandbox.Spec{Template: "base", Env: map[string]string{"GREETING": "hello"}})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{manager: m, box: box, home: filepath.Join(dir, box.ID), tokens: target.NewTokens([]byte("0123456789abcdef0123456789abcdef"))}
	h := envd.New(m, w.tokens, log)
	t.Cleanup(h.Close)
	w.Server = httptest.NewUnstartedServer(w.edge(h))
	w.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	t.Cleanup(w.Close)
	return w
}

// edge is what stands in front of envd.
func (w *world) edge(next http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		sb, err := w.manager.Get(r.Context(), acme, w.box.ID)
		if err != nil || sb.State != sandbox.StateRunning {
			http.Error(rw, `{"message":"The sandbox was not found","code":502}`, http.StatusBadGateway)
			return
		}
		w.mu.Lock()
		options := w.options
		w.mu.Unlock()
		t := &target.Target{Sandbox: sb, Who: acme, Options: options, Log: w.note}
		next.ServeHTTP(rw, r.WithContext(target.With(r.Context(), t)))
	})
}

func (w *world) note(l target.Line) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lines = append(w.lines, l)
}

func (w *world) logged() []target.Line {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.lines)
}

func (w *world) secure() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.options.Secure = true
}

func (w *world) processes(opts ...connect.ClientOption) envdpbconnect.ProcessClient {
	return envdpbconnect.NewProcessClient(w.Client(), w.URL, opts...)
}

func (w *world) files(opts ...connect.ClientOption) envdpbconnect.FilesystemClient {
	return envdpbconnect.NewFilesystemClient(w.Client(), w.URL, opts...)
}

// codecs are the ways in which a client may speak.
var codecs = map[string][]connect.ClientOption{
	"json":     {connect.WithProtoJSON()},
	"protobuf": nil,
}

type catalogue struct{}

func (catalogue) Resolve(_ context.Context, _, name string) (*template.Template, error) {
	if name != "base" {
		return nil, fault.New(fault.NotFound, "there is no template %q", name)
	}
	return &template.Template{Name: "base", Digest: "d1"}, nil
}
