package opensandbox_test

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/agentapi"
	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/opensandbox"
	"github.com/covehq/cove/internal/dialect/opensandbox/access"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

// The dialect is tested with a real Manager, a real store, real keys and real agents. Doubles are the images, which come
// when a test lets them, execd, and what the inproc driver cannot do: pauses and snapshots.

type world struct {
	*httptest.Server
	t       *testing.T
	api     *opensandbox.API
	manager *sandbox.Manager
	store   *sqlstore.Store
	images  *images
	driver  *pausable
	cfg     opensandbox.Config
	keys    map[string]string // by tenant
}

func newWorld(t *testing.T, change ...func(*opensandbox.Config)) *world {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	store, err := sqlstore.Open(filepath.Join(t.TempDir(), "db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	inner, err := inproc.New(inproc.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { inner.Close() })
	w := &world{t: t, store: store, images: &images{}, driver: &pausable{Driver: inner}, keys: map[string]string{}}
	w.manager = sandbox.NewManager(sandbox.Config{MaxLifetime: 0}, w.driver, store, w.driver, sandbox.NopObserver{}, log)
	if err := w.manager.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.manager.Close() })
	keys := auth.NewKeys(store)
	for _, tenant := range []string{"acme", "globex"} {
		key, _, err := keys.Create(t.Context(), tenant, "", false)
		if err != nil {
			t.Fatal(err)
		}
		w.keys[tenant] = string(key)
	}
	w.cfg = opensandbox.Config{Secret: []byte("0123456789abcdef0123456789abcdef"), RetryFor: -1, Hold: 5 * time.Second}
	for _, f := range change {
		f(&w.cfg)
	}
	w.api = opensandbox.New(w.cfg, w.manager, keys, w.images, store, echo("execd"), echo("egress"), log)
	t.Cleanup(w.api.Close)
	w.Server = httptest.NewServer(w.api)
	t.Cleanup(w.Server.Close)
	return w
}

// echo is who answers for a port of the server's own: it tells what it was asked.
func echo(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t := access.From(r.Context())
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Content-Type", "text/plain")
		io.WriteString(w, strings.Join([]string{name, r.Method, r.URL.EscapedPath(), r.URL.RawQuery, t.Sandbox.ID, t.Who.Tenant, string(body)}, "|"))
	})
}

// images are names of templates; one that begins with "slow" comes when it is let, others not at all.
type images struct {
	mu    sync.Mutex
	gate  chan struct{}
	asked []template.PullRequest
}

func (i *images) hold() (let func()) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.gate = make(chan struct{})
	return sync.OnceFunc(func() { close(i.gate) })
}

func (i *images) Ensure(ctx context.Context, _ string, r template.PullRequest) (*template.Template, error) {
	i.mu.Lock()
	i.asked = append(i.asked, r)
	gate := i.gate
	i.mu.Unlock()
	if strings.HasPrefix(r.Reference, "slow") {
		select {
		case <-gate:
		case <-ctx.Done():
			return nil, fault.Wrap(fault.Unavailable, ctx.Err(), "the pull was given up")
		}
	}
	for part, kind := range map[string]fault.Kind{
		"missing": fault.NotFound, "denied": fault.Denied, "unreachable": fault.Unavailable, "full": fault.Exhausted, "late": fault.Timeout, "bad": fault.Invalid,
	} {
		if strings.HasSuffix(r.Reference, part) {
			return nil, fault.New(kind, "the image %s is %s", r.Reference, part)
		}
	}
	return &template.Template{Name: "base"}, nil
}

// pausable is the inproc driver with what it cannot do.
type pausable struct {
	*inproc.Driver

	mu        sync.Mutex
	snapshots map[string]bool
	gate      chan struct{} // a snapshot waits for it; nil: it does not
	links     links
	volumes   map[string]bool
	refusal   error // of RemoveVolume
}

func (d *pausable) Caps() sandbox.Caps {
	c := d.Driver.Caps()
	c.Pause, c.Snapshot, c.Network, c.Mounts = true, true, true, true
	return c
}

func (d *pausable) Pause(context.Context, string) error                  { return nil }
func (d *pausable) Resume(context.Context, string) error                 { return nil }
func (d *pausable) Change(context.Context, string, sandbox.Change) error { return nil }

func (d *pausable) Snapshot(ctx context.Context, req sandbox.SnapshotRequest) (*template.Template, error) {
	d.mu.Lock()
	gate := d.gate
	d.mu.Unlock()
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.snapshots == nil {
		d.snapshots = map[string]bool{}
	}
	d.snapshots[req.Name] = true
	return &template.Template{Name: req.Name, Tenant: req.Tenant}, nil
}

func (d *pausable) RemoveTemplate(_ context.Context, _, name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.snapshots, name)
	return nil
}

func (d *pausable) Resolve(_ context.Context, tenant, name string) (*template.Template, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if name != "base" && !d.snapshots[name] {
		return nil, fault.New(fault.NotFound, "there is no template %q", name)
	}
	t := &template.Template{Name: name, Digest: "d1"}
	if name != "base" {
		t.Tenant = tenant
	}
	return t, nil
}

// reply is an answer, read to its end.
type reply struct {
	status int
	header http.Header
	body   string
}

func (r reply) json(t *testing.T) map[string]any {
	t.Helper()
	var v map[string]any
	if err := json.Unmarshal([]byte(r.body), &v); err != nil {
		t.Fatalf("%d %q: %v", r.status, r.body, err)
	}
	return v
}

// ask makes a request of acme's; header pairs may replace its key.
func (w *world) ask(method, path, body string, headers ...string) reply {
	w.t.Helper()
	req, err := http.NewRequest(method, w.URL+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("OPEN-SANDBOX-API-KEY", w.keys["acme"])
	for i := 0; i+1 < len(headers); i += 2 {
		if headers[i+1] == "" {
			req.Header.Del(headers[i])
			continue
		}
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return reply{resp.StatusCode, resp.Header, string(text)}
}

const idle = `"entrypoint":["tail","-f","/dev/null"]`

// create makes a sandbox with these fields and gives its id.
func (w *world) create(fields ...string) string {
	w.t.Helper()
	body := `{"image":{"uri":"python:3.12"},` + idle
	for _, f := range fields {
		body += "," + f
	}
	got := w.ask("POST", "/v1/sandboxes", body+"}")
	if got.status != http.StatusAccepted {
		w.t.Fatalf("create: %d %s", got.status, got.body)
	}
	return got.json(w.t)["id"].(string)
}

// state is where a sandbox is; empty: nowhere.
func (w *world) state(id string) (state, message string) {
	w.t.Helper()
	got := w.ask("GET", "/v1/sandboxes/"+id, "")
	if got.status == http.StatusNotFound {
		return "", ""
	}
	status := got.json(w.t)["status"].(map[string]any)
	message, _ = status["message"].(string)
	return status["state"].(string), message
}

// eventually waits for what happens in the background.
func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if ok() {
			return
		}
		if time.Now().After(end) {
			w.t.Fatalf("never: %s", what)
		}
	}
}

func wantFault(t *testing.T, got reply, status int, code string) {
	t.Helper()
	body := got.json(t)
	if got.status != status || body["code"] != code || body["message"] == "" || body["message"] == nil {
		t.Errorf("want %d %s, got %d %s", status, code, got.status, got.body)
	}
}

func (w *world) who() auth.Principal { return auth.Principal{Tenant: "acme"} }

// again puts another server in front of the same sandboxes.
func (w *world) again(change ...func(*opensandbox.Config)) {
	w.t.Helper()
	w.Server.Close()
	w.api.Close()
	for _, f := range change {
		f(&w.cfg)
	}
	w.api = opensandbox.New(w.cfg, w.manager, auth.NewKeys(w.store), w.images, w.store, echo("execd"), echo("egress"), slog.New(slog.DiscardHandler))
	w.api.Open()
	w.t.Cleanup(w.api.Close)
	w.Server = httptest.NewServer(w.api)
	w.t.Cleanup(w.Server.Close)
}

// exec runs a line of shell, which may be the last that its sandbox does.
func (w *world) exec(client *agentapi.Client, line string) {
	w.t.Helper()
	stream, err := client.Exec(w.t.Context(), agentapi.ExecParams{Argv: []string{"sh", "-c", line}})
	if err != nil {
		w.t.Fatal(err)
	}
	for range stream.Events() {
	}
}
