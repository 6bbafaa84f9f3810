package app

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/config"
	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/sqlstore"
	"github.com/covehq/cove/internal/template"
)

func openDocuments(t *testing.T) *sqlstore.Store {
	t.Helper()
	store, err := sqlstore.Open(filepath.Join(t.TempDir(), "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	return store
}

// puller is the driver of one server, which may be configured in another way than the next.
type puller struct {
	memory int64
	off    bool
	allow  []string
}

func (p puller) AddImage(_ context.Context, req sandbox.ImageRequest) (*template.Template, error) {
	if p.off {
		return nil, fault.New(fault.Unsupported, "images are off")
	}
	image := req.Image
	return &template.Template{Name: req.Name, Tenant: req.Tenant, Env: req.Env, Image: &image, Limits: template.Limits{MemoryBytes: p.memory}}, nil
}

func TestTemplatesOfAClusterAreItsOperators(t *testing.T) {
	templates := newClusterTemplates([]*template.Template{{Name: "python", Digest: "d"}, {Name: "small"}}, "python", clusterImages{documents: openDocuments(t)})
	for name, want := range map[string]string{"python": "python", "small": "small", "code-interpreter": "python", "other": ""} {
		got, err := templates.Resolve(t.Context(), "acme", name)
		switch {
		case want == "" && (!fault.Is(err, fault.NotFound) || !strings.Contains(fault.Message(err), "python, small")):
			t.Errorf("%s: %v", name, err)
		case want != "" && (err != nil || got.Name != want):
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	if list := templates.List("acme"); len(list) != 2 || list[0].Name != "python" || list[0].Digest != "d" {
		t.Errorf("%+v", list)
	}
}

func TestImagesOnAClusterAreTheirTenants(t *testing.T) {
	store, log := openDocuments(t), slog.New(slog.DiscardHandler)
	server := func(p puller) (clusterTemplates, clusterImages) {
		images := clusterImages{p, image.Pulls{Allow: p.allow}.Allows, store, log}
		return newClusterTemplates([]*template.Template{{Name: "python"}}, "python", images), images
	}
	templates, images := server(puller{memory: 1})
	req := sandbox.ImageRequest{
		Tenant: "acme", Name: "img-1", Description: "image a", Env: map[string]string{"A": "b"}, Image: template.Image{Reference: "registry.test/a:1", Digest: "sha256:a"},
	}
	if _, err := images.AddImage(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	if _, err := templates.Resolve(t.Context(), "globex", "img-1"); !fault.Is(err, fault.NotFound) {
		t.Errorf("another tenant: %v", err)
	}
	if list := templates.List("globex"); len(list) != 1 {
		t.Errorf("another tenant sees %+v", list)
	}
	if list := templates.List("acme"); len(list) != 2 || list[1].Tenant != "acme" || list[1].Source != template.SourceImage || list[1].From != "registry.test/a:1" {
		t.Errorf("%+v", list)
	}
	other, _ := server(puller{memory: 2}) // another server, or this one after a restart, as it is configured then
	found, err := other.Resolve(t.Context(), "acme", "img-1")
	if err != nil || found.Tenant != "acme" || found.Env["A"] != "b" || found.Image.Digest != "sha256:a" || found.Limits.MemoryBytes != 2 {
		t.Errorf("%+v %v", found, err)
	}
	off, _ := server(puller{off: true})
	if _, err := off.Resolve(t.Context(), "acme", "img-1"); !fault.Is(err, fault.Unavailable) || !strings.Contains(fault.Message(err), "images are off") {
		t.Errorf("%v", err)
	}
	narrow, kept := server(puller{allow: []string{"registry.test/b"}}) // which the operator has just decided
	if _, err := narrow.Resolve(t.Context(), "acme", "img-1"); !fault.Is(err, fault.Unavailable) || !strings.Contains(fault.Message(err), "allows images by name") {
		t.Errorf("%v", err)
	}
	if list := narrow.List("acme"); len(list) != 2 || list[1].Name != "img-1" || list[1].Digest != "" { // it counts, so that it can be seen
		t.Errorf("%+v", list)
	}
	if _, err := kept.AddImage(t.Context(), req); !fault.Is(err, fault.Denied) {
		t.Errorf("%v", err)
	}
	driver := clusterDriver{images: images}
	if err := driver.RemoveTemplate(t.Context(), "globex", "img-1"); !fault.Is(err, fault.NotFound) {
		t.Errorf("%v", err)
	}
	if err := driver.RemoveTemplate(t.Context(), "acme", "img-1"); err != nil {
		t.Error(err)
	}
	if _, err := other.Resolve(t.Context(), "acme", "img-1"); !fault.Is(err, fault.NotFound) {
		t.Errorf("%v", err)
	}
}

func TestATenantHasSoManyImagesOnACluster(t *testing.T) {
	images := clusterImages{puller{}, image.Pulls{}.Allows, openDocuments(t), slog.New(slog.DiscardHandler)}
	add := func(tenant string, n int) error {
		_, err := images.AddImage(t.Context(), sandbox.ImageRequest{Tenant: tenant, Name: fmt.Sprintf("img-%d", n)})
		return err
	}
	for n := range maxClusterImages {
		if err := images.documents.PutDocument(t.Context(), "acme", kindImage, fmt.Sprintf("img-%d", n), []byte("{}")); err != nil {
			t.Fatal(err)
		}
	}
	if err := add("acme", 5000); !fault.Is(err, fault.Exhausted) {
		t.Errorf("%v", err)
	}
	if err := add("acme", 5); err != nil {
		t.Errorf("one that is there: %v", err)
	}
	if err := add("globex", 5000); err != nil {
		t.Errorf("another tenant's: %v", err)
	}
}

func TestWhatAClustersOperatorSaysOfImages(t *testing.T) {
	s := &Server{cfg: config.Config{Driver: config.DriverKubernetes, Kubernetes: config.Kubernetes{Images: config.KubernetesImages{
		Allow: []string{"a/*"}, Platform: "linux/arm64", PullSecrets: []string{"ours"}, Looser: true, Memory: 1 << 30,
	}}}}
	if p := s.imagePulls(); len(p.Allow) != 1 || !p.Credentials || !strings.Contains(p.Off, "sandboxes.images.enabled") || s.imagePlatform() != "linux/arm64" {
		t.Errorf("%+v %s", p, s.imagePlatform())
	}
	if k := kubernetesImages(s.cfg.Kubernetes.Images); !k.Looser || k.Memory != 1<<30 || k.PullSecrets[0] != "ours" || k.Image != "" {
		t.Errorf("%+v", k)
	}
	s.cfg.Driver = config.DriverNative
	if p := s.imagePulls(); p.Off != "" || p.Credentials || len(p.Allow) > 0 || s.imagePlatform() == "linux/arm64" {
		t.Errorf("%+v %s", p, s.imagePlatform())
	}
}
