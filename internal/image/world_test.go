package image_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

const (
	acme   = "acme" // the operator's own tenant in these tests
	globex = "globex"
)

// world is a service with a real database, a real registry and a fake driver.
type world struct {
	*image.Service
	t      *testing.T
	dir    string
	store  *sqlstore.Store
	driver *fakeImager
	log    *safeBuffer
}

func open(t *testing.T, change func(*image.Config)) *world {
	t.Helper()
	dir := t.TempDir()
	store, err := sqlstore.Open(filepath.Join(dir, "cove.db"))
	must(t, err)
	t.Cleanup(func() { store.Close() })
	w := &world{t: t, dir: dir, store: store, driver: newFakeImager(), log: &safeBuffer{}}
	w.reopen(change)
	return w
}

// reopen is another server on the same data.
func (w *world) reopen(change func(*image.Config)) {
	w.t.Helper()
	if w.Service != nil {
		w.Close()
	}
	cfg := image.Config{Dir: filepath.Join(w.dir, "images"), Operator: acme, Platform: "linux/amd64"}
	if change != nil {
		change(&cfg)
	}
	s, err := image.Open(cfg, w.driver, w.driver, w.store, slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug})))
	must(w.t, err)
	s.Hurry(5 * time.Second)
	w.Service = s
	w.t.Cleanup(s.Close)
}

func (w *world) pull(tenant, ref string) (image.Info, error) {
	return w.Pull(w.t.Context(), tenant, template.PullRequest{Reference: ref})
}

// left is what lies in the directory of images.
func (w *world) left() []string {
	var all []string
	must(w.t, filepath.WalkDir(filepath.Join(w.dir, "images"), func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			all = append(all, path)
		}
		return err
	}))
	return all
}

// place is a registry that can be told to misbehave.
type place struct {
	*httptest.Server
	mu       sync.Mutex
	requests []*http.Request
	hook     func(http.ResponseWriter, *http.Request) (answered bool)
	handler  http.Handler
}

func newPlace(t *testing.T) *place {
	t.Helper()
	p := &place{handler: registry.New(registry.Logger(log.New(io.Discard, "", 0)))}
	p.Server = httptest.NewServer(p)
	t.Cleanup(p.Close)
	return p
}

func (p *place) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	p.requests = append(p.requests, r)
	hook := p.hook
	p.mu.Unlock()
	if hook == nil || !hook(w, r) {
		p.handler.ServeHTTP(w, r)
	}
}

func (p *place) host() string { return strings.TrimPrefix(p.URL, "http://") }

func (p *place) behave(hook func(http.ResponseWriter, *http.Request) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hook = hook
}

// forget begins a new count.
func (p *place) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests = nil
}

// asked are the requests for parts of images since forget.
func (p *place) asked(contains string) (all []*http.Request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.requests {
		if strings.Contains(r.Method+" "+r.URL.Path, contains) {
			all = append(all, r)
		}
	}
	return all
}

// push puts an image into the registry, past its hook, and returns its name.
func (p *place) push(t *testing.T, repository string, what any) string {
	t.Helper()
	p.mu.Lock()
	hook := p.hook
	p.hook = nil
	p.mu.Unlock()
	ref, err := name.ParseReference(p.host() + "/" + repository)
	must(t, err)
	switch what := what.(type) {
	case v1.Image:
		err = remote.Write(ref, what)
	case v1.ImageIndex:
		err = remote.WriteIndex(ref, what)
	}
	must(t, err)
	p.behave(hook)
	p.forget()
	return ref.String()
}

// newImage is an image of so many layers with random bytes in each.
func newImage(t *testing.T, layers, bytes int) v1.Image {
	t.Helper()
	var all []v1.Layer
	for range layers {
		l, err := random.Layer(int64(bytes), "application/vnd.oci.image.layer.v1.tar+gzip")
		must(t, err)
		all = append(all, l)
	}
	i, err := mutate.AppendLayers(empty.Image, all...)
	must(t, err)
	return configured(t, i, "amd64")
}

func configured(t *testing.T, i v1.Image, arch string) v1.Image {
	t.Helper()
	c, err := i.ConfigFile()
	must(t, err)
	c = c.DeepCopy()
	c.OS, c.Architecture = "linux", arch
	c.Created = v1.Time{Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	c.Config = v1.Config{
		Entrypoint: []string{"/bin/entry"}, Cmd: []string{"serve"}, Env: []string{"PATH=/bin", "GREETING=hello=world"}, User: "app:staff", WorkingDir: "/srv",
		Labels: map[string]string{"maker": "us"}, ExposedPorts: map[string]struct{}{"80/tcp": {}},
	}
	i, err = mutate.ConfigFile(i, c)
	must(t, err)
	return i
}

func digestOf(t *testing.T, i v1.Image) string {
	t.Helper()
	d, err := i.Digest()
	must(t, err)
	return d.String()
}

func firstLayer(t *testing.T, i v1.Image) (blob v1.Hash, diff string, bytes []byte) {
	t.Helper()
	all, err := i.Layers()
	must(t, err)
	blob, err = all[0].Digest()
	must(t, err)
	d, err := all[0].DiffID()
	must(t, err)
	r, err := all[0].Compressed()
	must(t, err)
	defer r.Close()
	bytes, err = io.ReadAll(r)
	must(t, err)
	return blob, d.String(), bytes
}

// fakeImager is a driver that keeps the digests of layers and the records of templates, and no files.
type fakeImager struct {
	mu        sync.Mutex
	layers    map[string]sandbox.Layer
	templates map[string]*template.Template // by tenant and name
	unpacked  []string
	refuse    map[string]error // by name of a template that is to be removed
	onUnpack  func(context.Context, sandbox.LayerRequest) error
	onAdd     func() // when a template has been made
	blind     bool   // the server cannot read what tenants have
	unusable  bool   // templates are there and none can be used: the operator has changed something
	bytes     map[string]int64
	peak      int64          // the most bytes of layers that were there at once
	files     map[string]int // of a layer, by its digest; else one
}

func newFakeImager() *fakeImager {
	d := &fakeImager{layers: map[string]sandbox.Layer{}, templates: map[string]*template.Template{}, refuse: map[string]error{}}
	for _, name := range []string{"base", "python", "code-interpreter"} {
		d.templates["/"+name] = &template.Template{Name: name, Digest: "built-" + name}
	}
	return d
}

func (d *fakeImager) Layers(_ context.Context, diffs []string) ([]sandbox.Layer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(diffs) > template.MaxImageLayers { // as the maker does
		return nil, fault.New(fault.Invalid, "%d layers at once", len(diffs))
	}
	var all []sandbox.Layer
	for _, diff := range diffs {
		if l, ok := d.layers[diff]; ok {
			all = append(all, l)
		}
	}
	return all, nil
}

func (d *fakeImager) Unpack(ctx context.Context, req sandbox.LayerRequest, blob *os.File) (sandbox.Layer, error) {
	d.mu.Lock()
	d.unpacked = append(d.unpacked, req.DiffID)
	hook := d.onUnpack
	d.mu.Unlock()
	if hook != nil {
		if err := hook(ctx, req); err != nil {
			return sandbox.Layer{}, err
		}
	}
	raw, err := io.ReadAll(blob)
	if err != nil {
		return sandbox.Layer{}, err
	}
	if z, err := gzip.NewReader(bytes.NewReader(raw)); err == nil {
		if raw, err = io.ReadAll(z); err != nil {
			return sandbox.Layer{}, fault.Wrap(fault.Invalid, err, "the layer is damaged")
		}
	}
	if sum := sha256.Sum256(raw); "sha256:"+hex.EncodeToString(sum[:]) != req.DiffID {
		return sandbox.Layer{}, fault.New(fault.Invalid, "the layer does not have its digest")
	}
	l := sandbox.Layer{DiffID: req.DiffID, Bytes: int64(len(raw)), Files: max(d.files[req.DiffID], 1)}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.layers[req.DiffID] = l
	d.peak = max(d.peak, d.sum())
	return l, nil
}

func (d *fakeImager) AddImage(_ context.Context, req sandbox.ImageRequest) (*template.Template, error) {
	if d.onAdd != nil {
		defer d.onAdd()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, diff := range req.Image.Layers {
		if _, ok := d.layers[diff]; !ok {
			return nil, fault.New(fault.Internal, "layer %s is not there", diff)
		}
	}
	key := req.Tenant + "/" + req.Name
	if d.templates[key] == nil {
		image := req.Image
		d.templates[key] = &template.Template{
			Name: req.Name, Tenant: req.Tenant, Digest: "of-" + req.Name, Description: req.Description,
			Env: req.Env, User: req.User, Workdir: req.Workdir, Image: &image,
		}
	}
	return d.templates[key], nil
}

func (d *fakeImager) PruneLayers(context.Context) (freed int64, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for diff, l := range d.layers {
		needed := false
		for _, t := range d.templates {
			needed = needed || t.Image != nil && slices.Contains(t.Image.Layers, diff)
		}
		if !needed {
			freed += l.Bytes
			delete(d.layers, diff)
		}
	}
	return freed, nil
}

func (d *fakeImager) List(tenant string) (all []template.Info) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range d.templates {
		if t.Tenant == "" || t.Tenant == tenant {
			all = append(all, template.Info{Name: t.Name, Tenant: t.Tenant, Digest: t.Digest, Bytes: d.bytes[t.Name]})
		}
	}
	return all
}

func (d *fakeImager) Resolve(_ context.Context, tenant, name string) (*template.Template, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, key := range []string{tenant + "/" + name, "/" + name} {
		if t := d.templates[key]; t != nil && !(d.blind && t.Tenant != "") {
			if d.unusable && t.Tenant != "" {
				return nil, fault.New(fault.Unavailable, "template %q cannot be used any more", name)
			}
			return t, nil
		}
	}
	return nil, fault.New(fault.NotFound, "there is no template %q", name)
}

func (d *fakeImager) RemoveTemplate(_ context.Context, tenant, name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.refuse[name]; err != nil {
		return err
	}
	if d.templates[tenant+"/"+name] == nil {
		return fault.New(fault.NotFound, "there is no template %q", name)
	}
	delete(d.templates, tenant+"/"+name)
	return nil
}

// sum is what all layers have; mu is held.
func (d *fakeImager) sum() (bytes int64) {
	for _, l := range d.layers {
		bytes += l.Bytes
	}
	return bytes
}

func (d *fakeImager) most() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.peak
}

func (d *fakeImager) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.unpacked)
}

// safeBuffer is a log that is written and read at once.
type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantKind(t *testing.T, err error, kind fault.Kind, words ...string) {
	t.Helper()
	if !fault.Is(err, kind) {
		t.Fatalf("want %s, got %v", kind, err)
	}
	for _, w := range words {
		if !strings.Contains(fault.Message(err), w) {
			t.Fatalf("the message %q lacks %q", fault.Message(err), w)
		}
	}
}

func isPart(r *http.Request) bool {
	return r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/")
}

func complain(w http.ResponseWriter, status int, code string) bool {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"errors":[{"code":%q,"message":"no"}]}`, code)
	return true
}

var discard = slog.New(slog.DiscardHandler)

var quiet = log.New(io.Discard, "", 0)
