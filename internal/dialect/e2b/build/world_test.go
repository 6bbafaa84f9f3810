package build_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/covehq/cove/internal/auth"
	"github.com/covehq/cove/internal/dialect/e2b/build"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

// memory keeps documents.
type memory struct {
	mu   sync.Mutex
	docs map[string]sandbox.Document
}

func newMemory() *memory { return &memory{docs: map[string]sandbox.Document{}} }

func docKey(tenant, kind, id string) string { return tenant + "\x00" + kind + "\x00" + id }

func (m *memory) PutDocument(_ context.Context, tenant, kind, id string, body []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.docs[docKey(tenant, kind, id)] = sandbox.Document{ID: id, Body: body}
	return nil
}

func (m *memory) Document(_ context.Context, tenant, kind, id string) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, ok := m.docs[docKey(tenant, kind, id)]
	if !ok {
		return nil, fault.New(fault.NotFound, "no such document")
	}
	return d.Body, nil
}

func (m *memory) Documents(_ context.Context, tenant, kind string) (all []sandbox.Document, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for k, d := range m.docs {
		if strings.HasPrefix(k, docKey(tenant, kind, "")) {
			all = append(all, d)
		}
	}
	return all, nil
}

func (m *memory) DeleteDocument(_ context.Context, tenant, kind, id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.docs[docKey(tenant, kind, id)]; !ok {
		return fault.New(fault.NotFound, "no such document")
	}
	delete(m.docs, docKey(tenant, kind, id))
	return nil
}

// world is a Builder over doubles.
type world struct {
	t *testing.T
	*domain
	documents *memory
	builder   *build.Builder
	who       auth.Principal
	parallel  int // builds at once; zero: as many as usual
	space     diskspace.Check
	dir       string // of uploaded archives
	maxFiles  int64  // their bytes; zero: as many as usual
}

// inWorld runs a test where time is false and nothing is left at the end.
func inWorld(t *testing.T, f func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, domain: newDomain(), documents: newMemory(), who: auth.Principal{Tenant: "acme"}}
		w.open()
		f(t, w)
		w.builder.Close()
		w.work.Wait()
		if living, _ := w.count(); living != 0 {
			t.Errorf("%d sandboxes are left", living)
		}
	})
}

// open starts a server over what an earlier one has left.
func (w *world) open() {
	w.t.Helper()
	w.dir = w.t.TempDir()
	b, err := build.New(build.Config{
		Dir: w.dir, MaxFiles: w.maxFiles, Secret: bytes.Repeat([]byte{7}, 32), MaxUpload: 1 << 20, MaxLayers: 8, Parallel: w.parallel, Space: func(n int64) error { return w.space.Allow(n) },
		Limits: template.Limits{CPUs: 1, MemoryBytes: 512 << 20, DiskBytes: 2 << 30},
	}, w.domain, w.documents, w.domain, w.domain, slog.New(slog.DiscardHandler))
	if err != nil {
		w.t.Fatal(err)
	}
	w.builder = b
	synctest.Wait()
}

// ask makes a request; body is sent as JSON.
func (w *world) ask(method, path string, body any) (int, map[string]any) {
	w.t.Helper()
	status, raw := w.raw(w.who, method, path, body)
	var out map[string]any
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &out); err != nil {
			w.t.Fatalf("%s %s: %d %s", method, path, status, raw)
		}
	}
	return status, out
}

func (w *world) raw(who auth.Principal, method, path string, body any) (int, []byte) {
	w.t.Helper()
	var r io.Reader = http.NoBody
	switch b := body.(type) {
	case nil:
	case string:
		r = strings.NewReader(b)
	default:
		text, err := json.Marshal(b)
		if err != nil {
			w.t.Fatal(err)
		}
		r = bytes.NewReader(text)
	}
	rec := httptest.NewRecorder()
	w.builder.Serve(rec, httptest.NewRequestWithContext(context.Background(), method, path, r), who)
	return rec.Code, rec.Body.Bytes()
}

// js is a JSON object.
type js = map[string]any

// begin asks for a build and gives it its steps.
func (w *world) begin(name string, start js) (template, id string) {
	w.t.Helper()
	status, asked := w.ask("POST", "/v3/templates", js{"name": name})
	if status != http.StatusAccepted {
		w.t.Fatalf("ask for a build: %d %v", status, asked)
	}
	template, id = asked["templateID"].(string), asked["buildID"].(string)
	if status, out := w.ask("POST", "/v2/templates/"+template+"/builds/"+id, start); status != http.StatusAccepted {
		w.t.Fatalf("start a build: %d %v", status, out)
	}
	return template, id
}

// status is where a build is, with everything it has said.
func (w *world) status(template, id string) (status string, reason map[string]any, log []string) {
	w.t.Helper()
	for {
		code, out := w.ask("GET", fmt.Sprintf("/templates/%s/builds/%s/status?logsOffset=%d", template, id, len(log)), nil)
		if code != http.StatusOK {
			w.t.Fatalf("status: %d %v", code, out)
		}
		status, _ = out["status"].(string)
		reason, _ = out["reason"].(map[string]any)
		entries := out["logEntries"].([]any)
		for _, e := range entries {
			log = append(log, e.(map[string]any)["message"].(string))
		}
		if len(entries) == 0 {
			return status, reason, log
		}
	}
}

// build runs a build to its end, which must be a good one.
func (w *world) build(name string, start js) (template, id string, log []string) {
	w.t.Helper()
	template, id = w.begin(name, start)
	w.settle(template, id)
	status, reason, log := w.status(template, id)
	if status != "ready" {
		w.t.Fatalf("build of %s: %s %v\n%s", name, status, reason, strings.Join(log, "\n"))
	}
	return template, id, log
}

// settle waits until a build has ended.
func (w *world) settle(template, id string) {
	w.t.Helper()
	for range 2 * 3600 {
		synctest.Wait()
		if status, _, _ := w.status(template, id); status == "ready" || status == "error" {
			return
		}
		time.Sleep(time.Second) // of the false time
	}
	w.t.Fatal("the build does not end")
}

func (w *world) resolve(ref string) (build.Resolved, error) {
	return w.builder.Resolve(context.Background(), w.who, ref)
}

func run(args ...string) js { return js{"type": "RUN", "args": args} }

func fromBase(steps ...js) js { return js{"fromImage": "e2bdev/base", "steps": steps} }

// archive packs entries, compressed.
func archive(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	a := tar.NewWriter(z)
	for _, h := range headers {
		content := []byte(nil)
		if h.Typeflag == tar.TypeReg {
			content = []byte("content of " + h.Name)
			h.Size = int64(len(content))
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := a.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := a.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// upload sends an archive by the link that the server gives.
func (w *world) upload(template, hash string, body []byte) (status int, present bool) {
	w.t.Helper()
	code, out := w.ask("GET", "/templates/"+template+"/files/"+hash, nil)
	if code != http.StatusCreated {
		w.t.Fatalf("ask for a link: %d %v", code, out)
	}
	link, err := url.Parse(out["url"].(string))
	if err != nil {
		w.t.Fatal(err)
	}
	rec := httptest.NewRecorder()
	w.builder.ServeUpload(rec, httptest.NewRequest("PUT", link.RequestURI(), bytes.NewReader(body)))
	return rec.Code, out["present"].(bool)
}
