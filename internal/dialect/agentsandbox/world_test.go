package agentsandbox_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/agentsandbox"
	"github.com/covehq/cove/internal/driver/inproc"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

// The dialect is tested with a real Manager, a real store, real keys and real agents. Doubles are the images, the runtime, the
// router and what the inproc driver cannot do: pauses.

type world struct {
	*httptest.Server
	t       *testing.T
	api     *agentsandbox.API
	manager *sandbox.Manager
	store   *sqlstore.Store
	driver  *pausable
	images  *images
	runtime *runtime
	kept    *documents
	domain  *domain
	cfg     agentsandbox.Config
	keys    map[string]string // by tenant
	log     *slog.Logger
}

func newWorld(t *testing.T, change ...func(*world)) *world {
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
	w := &world{
		t: t, store: store, driver: &pausable{Driver: inner, pause: true}, images: &images{}, runtime: &runtime{}, keys: map[string]string{},
		kept: &documents{Store: store}, log: log,
		cfg: agentsandbox.Config{Version: "test", Templates: map[string]string{"python-3.12": "python", "lost": "nowhere"}, RetryAfter: 10 * time.Millisecond},
	}
	for _, f := range change {
		f(w)
	}
	w.manager = sandbox.NewManager(sandbox.Config{}, w.driver, store, templates{}, sandbox.NopObserver{}, log)
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
	w.serve()
	return w
}

// serve puts a server in front of what there is.
func (w *world) serve() {
	w.t.Helper()
	w.domain = &domain{Manager: w.manager}
	w.api = agentsandbox.New(w.cfg, w.domain, auth.NewKeys(w.store), w.images, templates{}, w.kept, w.runtime, w.log)
	w.api.Connect(router{}, daemon{})
	if err := w.api.Open(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(w.api.Close)
	w.Server = httptest.NewServer(w.api)
	w.t.Cleanup(w.Server.Close)
}

// again puts another server in front of the same objects and sandboxes.
func (w *world) again() {
	w.t.Helper()
	w.api.Quit()
	w.Server.Close()
	w.api.Close()
	w.serve()
}

// documents are the store's, of which none can be deleted while that is refused.
type documents struct {
	*sqlstore.Store

	mu      sync.Mutex
	refuse  bool
	refused []time.Time
}

func (d *documents) DeleteDocument(ctx context.Context, tenant, kind, id string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.refuse {
		d.refused = append(d.refused, time.Now())
		return fault.New(fault.Unavailable, "the database is away")
	}
	return d.Store.DeleteDocument(ctx, tenant, kind, id)
}

func (d *documents) setRefuse(refuse bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refuse = refuse
}

// failures are the times of deletes that were refused.
func (d *documents) failures() []time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.refused)
}

// domain is the Manager; it notes who asked for events, and lets something happen after a resume.
type domain struct {
	*sandbox.Manager

	mu      sync.Mutex
	asked   []sandbox.EventQuery
	resumed func()
}

func (d *domain) Resume(ctx context.Context, p auth.Principal, id string, lifetime time.Duration) (sandbox.Sandbox, error) {
	sb, err := d.Manager.Resume(ctx, p, id, lifetime)
	d.mu.Lock()
	then := d.resumed
	d.mu.Unlock()
	if then != nil {
		then()
	}
	return sb, err
}

func (d *domain) Events(ctx context.Context, p auth.Principal, q sandbox.EventQuery) iter.Seq2[sandbox.LifecycleEvent, error] {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked = append(d.asked, q)
	return d.Manager.Events(ctx, p, q)
}

func (d *domain) queries() []sandbox.EventQuery {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.asked)
}

// templates are two.
type templates struct{}

func (templates) List(string) []template.Info {
	return []template.Info{{Name: "base"}, {Name: "python"}}
}

func (templates) Resolve(_ context.Context, _, name string) (*template.Template, error) {
	if name != "base" && name != "python" {
		return nil, fault.New(fault.NotFound, "there is no template %q", name)
	}
	return &template.Template{Name: name, Digest: "d1"}, nil
}

// images are names of templates. One that begins with "slow" comes when it is let, others not at all.
type images struct {
	mu    sync.Mutex
	gate  chan struct{}
	asked []string
}

func (i *images) hold() (let func()) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.gate = make(chan struct{})
	return sync.OnceFunc(func() { close(i.gate) })
}

func (i *images) Ensure(ctx context.Context, tenant string, r template.PullRequest) (*template.Template, error) {
	i.mu.Lock()
	i.asked = append(i.asked, r.Reference)
	gate := i.gate
	i.mu.Unlock()
	if strings.HasPrefix(r.Reference, "slow") {
		select {
		case <-gate:
			return &template.Template{Name: "base"}, nil
		case <-ctx.Done():
			return nil, fault.Wrap(fault.Unavailable, ctx.Err(), "the pull was given up")
		}
	}
	return templates{}.Resolve(ctx, tenant, r.Reference)
}

// runtime notes whom it was prepared for, and says where it is.
type runtime struct {
	mu       sync.Mutex
	prepared []string
	refuse   int // so many times
	panics   int // so many times
}

func (r *runtime) Prepare(_ context.Context, _ auth.Principal, id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.panics > 0 {
		r.panics--
		panic("a defect")
	}
	if r.refuse > 0 {
		r.refuse--
		return fault.New(fault.Unavailable, "not yet")
	}
	r.prepared = append(r.prepared, id)
	return nil
}

func (r *runtime) Serve(w http.ResponseWriter, _ *http.Request, p auth.Principal, id string) {
	io.WriteString(w, "runtime of "+p.Tenant+" "+id)
}

func (r *runtime) has(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.prepared {
		if p == id {
			return true
		}
	}
	return false
}

// daemon says where it is.
type daemon struct{}

func (daemon) Serve(w http.ResponseWriter, _ *http.Request, p auth.Principal, id string) {
	io.WriteString(w, "daemon of "+p.Tenant+" "+id)
}

// router answers everything with who is asking.
type router struct{}

func (router) Dial(_ context.Context, p auth.Principal) (net.Conn, error) {
	near, far := net.Pipe()
	go func() {
		defer far.Close()
		if req, err := http.ReadRequest(bufio.NewReader(far)); err == nil {
			req.Body.Close()
			io.WriteString(far, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\n"+p.Tenant[:4])
		}
	}()
	return near, nil
}

// pausable is the inproc driver with what it cannot do.
type pausable struct {
	*inproc.Driver
	pause bool

	mu     sync.Mutex
	refuse error // of Start
}

func (d *pausable) Caps() sandbox.Caps {
	c := d.Driver.Caps()
	c.Pause, c.Network = d.pause, true
	return c
}

func (d *pausable) Pause(context.Context, string) error                  { return nil }
func (d *pausable) Resume(context.Context, string) error                 { return nil }
func (d *pausable) Change(context.Context, string, sandbox.Change) error { return nil }

func (d *pausable) Start(ctx context.Context, r sandbox.StartRequest) error {
	d.mu.Lock()
	refuse := d.refuse
	d.mu.Unlock()
	if refuse != nil {
		return refuse
	}
	return d.Driver.Start(ctx, r)
}

func (d *pausable) setRefuse(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refuse = err
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

// dig is what is found below names; lists are entered by their first entry.
func dig(v any, path ...string) any {
	for _, name := range path {
		if l, ok := v.([]any); ok && len(l) > 0 {
			v = l[0]
		}
		m, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = m[name]
	}
	return v
}

// request makes a request of acme's; header pairs may replace its key.
func (w *world) request(ctx context.Context, method, path, body string, headers ...string) *http.Response {
	w.t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, w.URL+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+w.keys["acme"])
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
		if headers[i+1] == "" {
			req.Header.Del(headers[i])
		}
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { resp.Body.Close() })
	return resp
}

func (w *world) ask(method, path, body string, headers ...string) reply {
	w.t.Helper()
	resp := w.request(w.t.Context(), method, path, body, headers...)
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return reply{resp.StatusCode, resp.Header, string(text)}
}

const (
	claims    = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default/sandboxclaims"
	oldClaims = "/apis/extensions.agents.x-k8s.io/v1alpha1/namespaces/default/sandboxclaims"
	boxes     = "/apis/agents.x-k8s.io/v1beta1/namespaces/default/sandboxes"
	oldBoxes  = "/apis/agents.x-k8s.io/v1alpha1/namespaces/default/sandboxes"
	tmpls     = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default/sandboxtemplates"
	pools     = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default/sandboxwarmpools"
)

func claimBody(name string, spec ...string) string {
	s := `"warmPoolRef":{"name":"python-3.12"}`
	if len(spec) > 0 {
		s = strings.Join(spec, ",")
	}
	return `{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxClaim","metadata":{"name":"` + name + `"},"spec":{` + s + `}}`
}

func boxBody(name, image string, spec ...string) string {
	s := `"podTemplate":{"spec":{"containers":[{"name":"main","image":"` + image + `"}]}}`
	return `{"apiVersion":"agents.x-k8s.io/v1beta1","kind":"Sandbox","metadata":{"name":"` + name + `"},"spec":{` + strings.Join(append(spec, s), ",") + `}}`
}

// post makes an object.
func (w *world) post(path, body string) map[string]any {
	w.t.Helper()
	got := w.ask("POST", path, body)
	if got.status != http.StatusCreated {
		w.t.Fatalf("POST %s: %d %s", path, got.status, got.body)
	}
	return got.json(w.t)
}

// ready is an object's Ready condition.
func (w *world) ready(path string) (status, reason, message string) {
	w.t.Helper()
	got := w.ask("GET", path, "")
	if got.status != http.StatusOK {
		return "", "", ""
	}
	return conditionOf(got.json(w.t), "Ready")
}

func conditionOf(o map[string]any, name string) (status, reason, message string) {
	l, _ := dig(o, "status", "conditions").([]any)
	for _, c := range l {
		if dig(c, "type") == name {
			status, _ = dig(c, "status").(string)
			reason, _ = dig(c, "reason").(string)
			message, _ = dig(c, "message").(string)
		}
	}
	return status, reason, message
}

// becomes waits for a reason of an object's Ready condition.
func (w *world) becomes(path, reason string) map[string]any {
	w.t.Helper()
	var last string
	w.eventually(path+" becomes "+reason, func() bool {
		_, last, _ = w.ready(path)
		return last == reason
	}, &last)
	return w.ask("GET", path, "").json(w.t)
}

// claimed makes a claim and waits until it is ready; it gives the domain's id of its sandbox.
func (w *world) claimed(name string, spec ...string) string {
	w.t.Helper()
	w.post(claims, claimBody(name, spec...))
	w.becomes(claims+"/"+name, "DependenciesReady")
	return w.id(name)
}

// id is the domain's name of a Sandbox.
func (w *world) id(name string) string {
	w.t.Helper()
	id, err := w.api.Find(w.t.Context(), auth.Principal{Tenant: "acme"}, "default", name)
	if err != nil {
		w.t.Fatal(err)
	}
	return id
}

func (w *world) state(id string) sandbox.State {
	w.t.Helper()
	sb, err := w.manager.Get(w.t.Context(), auth.Principal{Tenant: "acme"}, id)
	if err != nil {
		return ""
	}
	return sb.State
}

// eventually waits for what happens in the background.
func (w *world) eventually(what string, ok func() bool, last ...*string) {
	w.t.Helper()
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(2 * time.Minute); !ok(); <-tick.C {
		if time.Now().After(end) {
			for _, l := range last {
				what += "; it is " + *l
			}
			w.t.Fatalf("never: %s", what)
		}
	}
}

func wantStatus(t *testing.T, got reply, code int, reason string) map[string]any {
	t.Helper()
	body := got.json(t)
	if got.status != code || body["reason"] != reason || body["kind"] != "Status" || body["message"] == "" || body["code"] != float64(code) {
		t.Errorf("want %d %s, got %d %.1000s", code, reason, got.status, got.body)
	}
	return body
}
