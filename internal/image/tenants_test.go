package image_test

import (
	"context"
	"net/http"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

func TestLayersOfOthersHaveToBeDownloaded(t *testing.T) {
	p := newPlace(t)
	w := open(t, func(c *image.Config) { c.Insecure = []string{p.host()} })
	img := newImage(t, 1, 10_000)
	blob, diff, _ := firstLayer(t, img)
	ref := p.push(t, "app:v1", img)
	first, err := w.pull(acme, ref)
	must(t, err)
	p.forget()
	second, err := w.pull(globex, ref)
	must(t, err)
	if n := len(p.asked("GET /v2/app/blobs/" + blob.String())); n != 1 {
		t.Fatalf("the other tenant downloaded it %d times", n)
	}
	if w.driver.count() != 1 || second.Template != first.Template || second.Bytes != first.Bytes {
		t.Fatalf("%d unpacks; %+v", w.driver.count(), second)
	}
	t.Run("but not twice", func(t *testing.T) {
		more, err := mutate.AppendLayers(img, mustLayer(t))
		must(t, err)
		ref := p.push(t, "more:v1", more)
		_, err = w.pull(globex, ref)
		must(t, err)
		if n := len(p.asked("GET /v2/more/blobs/" + blob.String())); n != 0 {
			t.Fatal("it was downloaded again")
		}
	})
	t.Run("one who is denied it does not get it", func(t *testing.T) {
		p.behave(func(w http.ResponseWriter, r *http.Request) bool {
			return strings.HasSuffix(r.URL.Path, blob.String()) && complain(w, 403, "DENIED")
		})
		_, err := w.pull("initech", ref)
		wantKind(t, err, fault.Denied)
		p.behave(nil)
	})
	t.Run("one who says that something else is that layer does not get it", func(t *testing.T) {
		_, err := w.pull("initech", p.push(t, "lie:v1", lie(t, diff)))
		wantKind(t, err, fault.Invalid, "digest")
		if left := w.left(); len(left) != 0 {
			t.Fatalf("left behind: %v", left)
		}
	})
}

// lie is an image whose configuration claims another layer than it has.
func lie(t *testing.T, diff string) v1.Image {
	t.Helper()
	i, err := mutate.AppendLayers(empty.Image, mustLayer(t))
	must(t, err)
	i = configured(t, i, "amd64")
	c, err := i.ConfigFile()
	must(t, err)
	c = c.DeepCopy()
	c.RootFS.DiffIDs[0], err = v1.NewHash(diff)
	must(t, err)
	i, err = mutate.ConfigFile(i, c)
	must(t, err)
	return i
}

func TestLyingWhileTheLayerIsUnpacked(t *testing.T) {
	p := newPlace(t)
	w := open(t, func(c *image.Config) { c.Insecure = []string{p.host()} })
	img := newImage(t, 1, 10_000)
	_, diff, _ := firstLayer(t, img)
	honest, liar := p.push(t, "app:v1", img), p.push(t, "lie:v1", lie(t, diff))
	started, gate := make(chan struct{}, 2), make(chan struct{})
	w.driver.onUnpack = func(context.Context, sandbox.LayerRequest) error {
		started <- struct{}{}
		<-gate
		return nil
	}
	results := make(chan error, 2)
	go func() { _, err := w.pull(acme, honest); results <- err }()
	<-started
	lied := make(chan error)
	waits := make(chan struct{}, 100)
	go func() {
		_, err := w.Pull(t.Context(), globex, template.PullRequest{Reference: liar, Progress: func(p template.PullProgress) {
			if p.Step == template.PullUnpack {
				waits <- struct{}{}
			}
		}})
		lied <- err
	}()
	<-waits
	close(gate)
	must(t, <-results)
	wantKind(t, <-lied, fault.Invalid, "digest")
}

func TestPartsAreATenantsOwn(t *testing.T) {
	w := open(t, nil)
	blob, _, _ := firstLayer(t, newImage(t, 1, 10))
	if w.PartFile(acme, blob) == w.PartFile(globex, blob) || w.PartFile("../x", blob) == "" {
		t.Fatal("two tenants share a part")
	}
	if strings.Contains(w.PartFile("../../x", blob), "..") {
		t.Fatal("a tenant's name is a path")
	}
}
