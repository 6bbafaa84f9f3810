package e2b_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b"
	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/policy"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

// The control plane is tested with a real Manager, store and agents. Only the driver pretends to pause, fork and snapshot,
// and the builder is a double.

var secret = bytes.Repeat([]byte("s"), 32)

// world is a control plane with two tenants.
type world struct {
	t       testing.TB
	api     *e2b.API
	url     string
	manager *sandbox.Manager
	driver  *driver
	store   *documents
	lists   *atomic.Int64 // asked of the store
	builder *builder
	key     string // of acme
	other   string // of globex
	serve   func() // by another control plane, as after a restart
}

var acme = auth.Principal{Tenant: "acme"}

func newWorld(t testing.TB, change ...func(*e2b.Config, *sandbox.Config)) *world {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	store, err := sqlstore.Open(filepath.Join(t.TempDir(), "db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	agents, err := inproc.New(inproc.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { agents.Close() })
	d := &driver{Driver: agents, catalogue: &catalogue{owned: map[string]*template.Template{}}, networks: map[string]policy.Network{}}
	cfg, domain := e2b.Config{Version: "0.6.13", Secret: secret}, sandbox.Config{}
	for _, f := range change {
		f(&cfg, &domain)
	}
	counted := &counting{Store: store}
	m := sandbox.NewManager(domain, d, counted, d.catalogue, sandbox.NopObserver{}, log)
	if err := m.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	keys := auth.NewKeys(store)
	w := &world{t: t, manager: m, lists: &counted.lists, driver: d, store: &documents{Store: store}, builder: &builder{}}
	w.key, w.other = newKey(t, keys, "acme"), newKey(t, keys, "globex")
	w.serve = func() {
		w.api = e2b.New(cfg, m, keys, w.store, w.builder, log)
		server := httptest.NewServer(w.api)
		t.Cleanup(server.Close)
		w.url = server.URL
	}
	w.serve()
	return w
}

// counting counts lists.
type counting struct {
	*sqlstore.Store
	lists atomic.Int64
}

func (c *counting) List(ctx context.Context, tenant string, q sandbox.ListQuery) (sandbox.Page, error) {
	c.lists.Add(1)
	return c.Store.List(ctx, tenant, q)
}

// documents can fail to keep a kind of them.
type documents struct {
	*sqlstore.Store
	refused atomic.Value // string
}

func (d *documents) PutDocument(ctx context.Context, tenant, kind, id string, body []byte) error {
	if d.refused.Load() == kind {
		return errors.New("the disk is full")
	}
	return d.Store.PutDocument(ctx, tenant, kind, id, body)
}

func (d *documents) ids(t testing.TB, kind string) (ids []string) {
	t.Helper()
	docs, err := d.Documents(t.Context(), "acme", kind)
	if err != nil {
		t.Fatal(err)
	}
	for _, doc := range docs {
		ids = append(ids, doc.ID)
	}
	return ids
}

func newKey(t testing.TB, keys *auth.Keys, tenant string) string {
	t.Helper()
	key, _, err := keys.Create(t.Context(), tenant, "test", false)
	if err != nil {
		t.Fatal(err)
	}
	return string(key)
}

// reply is an answer, read whole.
type reply struct {
	status int
	header http.Header
	body   string
}

func (w *world) send(method, path, body string, headers ...string) reply {
	w.t.Helper()
	r, err := http.NewRequestWithContext(w.t.Context(), method, w.url+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	r.Header.Set("X-API-Key", w.key)
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
		if headers[i+1] == "" {
			r.Header.Del(headers[i])
		}
	}
	noRedirect := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := noRedirect.Do(r)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return reply{resp.StatusCode, resp.Header, string(b)}
}

// ask is send for what must succeed in a certain way.
func (w *world) ask(status int, method, path, body string, value any) reply {
	w.t.Helper()
	r := w.send(method, path, body)
	if r.status != status {
		w.t.Fatalf("%s %s: status %d, want %d: %s", method, path, r.status, status, r.body)
	}
	if value != nil {
		if err := json.Unmarshal([]byte(r.body), value); err != nil {
			w.t.Fatalf("%s %s: %v in %s", method, path, err, r.body)
		}
	}
	return r
}

// refused checks that a request fails in the one shape of failures.
func (w *world) refused(r reply, status int) string {
	w.t.Helper()
	var p struct {
		Code    *int    `json:"code"`
		Message *string `json:"message"`
	}
	if err := json.Unmarshal([]byte(r.body), &p); err != nil || p.Code == nil || p.Message == nil || *p.Message == "" {
		w.t.Fatalf("status %d with body %q, want an error of E2B", r.status, r.body)
	}
	if r.status != status || *p.Code != status || r.header.Get("Content-Type") != "application/json" {
		w.t.Fatalf("status %d, code %d, type %q, want %d: %s", r.status, *p.Code, r.header.Get("Content-Type"), status, *p.Message)
	}
	return *p.Message
}

func (w *world) create(body string) e2b.Sandbox {
	w.t.Helper()
	var sb e2b.Sandbox
	w.ask(http.StatusCreated, "POST", "/v2/sandboxes", body, &sb)
	return sb
}

func (w *world) detail(id string) e2b.Detail {
	w.t.Helper()
	var d e2b.Detail
	w.ask(http.StatusOK, "GET", "/sandboxes/"+id, "", &d)
	return d
}

// driver has agents that are goroutines and pretends the rest.
type driver struct {
	*inproc.Driver
	catalogue *catalogue
	made      func() // called between the making of a snapshot and its end

	mu       sync.Mutex
	networks map[string]policy.Network
}

func (d *driver) Caps() sandbox.Caps {
	return sandbox.Caps{Name: "double", Isolation: "none", Limits: true, Network: true, Fork: true, Pause: true, Snapshot: true}
}
func (d *driver) Pause(context.Context, string) error  { return nil }
func (d *driver) Resume(context.Context, string) error { return nil }

func (d *driver) Usage(context.Context, string) (sandbox.Usage, error) {
	return sandbox.Usage{CPUMS: 7, MemoryBytes: 5 << 20}, nil
}

func (d *driver) Start(ctx context.Context, req sandbox.StartRequest) error {
	d.mu.Lock()
	d.networks[req.ID] = req.Network
	d.mu.Unlock()
	return d.Driver.Start(ctx, req)
}

func (d *driver) Change(ctx context.Context, id string, change sandbox.Change) error {
	if change.Network != nil {
		d.mu.Lock()
		d.networks[id] = *change.Network
		d.mu.Unlock()
	}
	return d.Driver.Change(ctx, id, change)
}

func (d *driver) network(id string) policy.Network {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.networks[id]
}

func (d *driver) Fork(ctx context.Context, req sandbox.ForkRequest) (sandbox.Forked, error) {
	for _, c := range req.Children {
		if err := d.Start(ctx, sandbox.StartRequest{ID: c.ID, Tenant: "acme", Template: base, Limits: c.Limits, Network: c.Network, Env: c.Env, Deadline: c.Deadline}); err != nil {
			return sandbox.Forked{}, err
		}
	}
	return sandbox.Forked{}, nil
}

func (d *driver) Snapshot(_ context.Context, req sandbox.SnapshotRequest) (*template.Template, error) {
	t := *base
	t.Name, t.Tenant, t.Digest = req.Name, req.Tenant, req.Name
	d.catalogue.mu.Lock()
	d.catalogue.owned[req.Name] = &t
	d.catalogue.mu.Unlock()
	if d.made != nil {
		d.made()
	}
	return &t, nil
}

func (d *driver) RemoveTemplate(_ context.Context, _, name string) error {
	d.catalogue.mu.Lock()
	defer d.catalogue.mu.Unlock()
	if d.catalogue.owned[name] == nil {
		return fault.New(fault.NotFound, "no template %s", name)
	}
	if d.catalogue.kept[name] {
		return fault.New(fault.Conflict, "template x is made from it")
	}
	delete(d.catalogue.owned, name)
	return nil
}

// catalogue has base and what snapshots made.
type catalogue struct {
	mu    sync.Mutex
	owned map[string]*template.Template
	kept  map[string]bool // others are made from them
}

// keep makes everything that is there stay, until it is let go.
func (c *catalogue) keep() (letGo func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.kept = map[string]bool{}
	for name := range c.owned {
		c.kept[name] = true
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.kept = nil
	}
}

var base = &template.Template{
	Name: "base", Digest: "d1", User: "user", Limits: template.Limits{CPUs: 1.5, MemoryBytes: 512 << 20, DiskBytes: 1 << 30},
}

func (c *catalogue) Resolve(_ context.Context, tenant, name string) (*template.Template, error) {
	if name == base.Name {
		return base, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if t := c.owned[name]; t != nil && t.Tenant == tenant {
		return t, nil
	}
	return nil, fault.New(fault.NotFound, "there is no template %q", name)
}

func (c *catalogue) names() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.owned))
}

func (c *catalogue) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.owned)
}

// builder knows base, and a template whose start command makes a file that its ready command looks for.
type builder struct {
	start *build.Start

	mu    sync.Mutex
	built []string // what the template "renamed" stands for, one look after the other; the last one stays
}

func (b *builder) Serve(w http.ResponseWriter, r *http.Request, who auth.Principal) {
	w.WriteHeader(http.StatusTeapot)
	_, _ = io.WriteString(w, "builder: "+who.Tenant+" "+r.Method+" "+r.URL.EscapedPath())
}

func (b *builder) ServeUpload(w http.ResponseWriter, r *http.Request) {
	_, _ = io.WriteString(w, "upload")
}

func (b *builder) Resolve(_ context.Context, _ auth.Principal, ref string) (build.Resolved, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if ref == "renamed" && len(b.built) > 0 {
		now := b.built[0]
		if len(b.built) > 1 {
			b.built = b.built[1:]
		}
		return build.Resolved{Template: now, ID: "tmpl2", Alias: ref}, nil
	}
	switch ref {
	case "base":
		return build.Resolved{Template: "base", ID: "base", Alias: "base"}, nil
	case "server", "tmpl1":
		return build.Resolved{Template: "base", ID: "tmpl1", Alias: "server", Env: map[string]string{"A": "template", "B": "template"}, Start: b.start}, nil
	}
	return build.Resolved{}, fault.New(fault.NotFound, "Template %s was not found", ref)
}

// since reports whether a time lies some while after a moment between begun and now, but for what
// its text rounds away.
func since(begun, at time.Time, after time.Duration) bool {
	return !at.Before(begun.Add(after-time.Second)) && !at.After(time.Now().Add(after+time.Second))
}
