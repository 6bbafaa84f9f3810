package image_test

import (
	"archive/tar"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/image"
	"github.com/covehq/cove/internal/sandbox"
	"github.com/covehq/cove/internal/template"
)

func TestCatalog(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	a, b := newImage(t, 1, 1000), newImage(t, 1, 1000)
	one, err := w.pull(acme, p.push(t, "a:1", a))
	must(t, err)
	two, err := w.pull(acme, p.push(t, "a:2", a))
	must(t, err)
	other, err := w.pull(acme, p.push(t, "b:1", b))
	must(t, err)
	if one.Template != two.Template || one.Template == other.Template {
		t.Fatalf("%s %s %s", one.Template, two.Template, other.Template)
	}
	t.Run("the list has every name, in order", func(t *testing.T) {
		all, err := w.List(t.Context(), acme)
		must(t, err)
		if names := namesOf(all); !slices.Equal(names, []string{one.Reference, two.Reference, other.Reference}) {
			t.Fatal(names)
		}
	})
	t.Run("one is found by name, digest, beginning of a digest and template", func(t *testing.T) {
		short := strings.TrimPrefix(other.Digest, "sha256:")[:12]
		for _, by := range []string{other.Reference, other.Digest, short, other.Template, strings.TrimPrefix(other.Template, "img-")[:8]} {
			got, err := w.Inspect(t.Context(), acme, by)
			if err != nil || got.Reference != other.Reference {
				t.Errorf("%s: %+v %v", by, got, err)
			}
			_, err = w.Inspect(t.Context(), globex, by)
			if !fault.Is(err, fault.NotFound) {
				t.Errorf("%s of somebody else: %v", by, err)
			}
		}
		for by, kind := range map[string]fault.Kind{"nope": fault.NotFound, "sha256:" + strings.Repeat("0", 64): fault.NotFound, "": fault.Invalid, "A B": fault.Invalid, p.host() + "/a@" + other.Digest: fault.NotFound} {
			_, err := w.Inspect(t.Context(), acme, by)
			if !fault.Is(err, kind) {
				t.Errorf("%q: %v", by, err)
			}
		}
	})
	t.Run("the template goes with the last name", func(t *testing.T) {
		must(t, w.Remove(t.Context(), acme, one.Reference))
		if _, err := w.driver.Resolve(t.Context(), acme, one.Template); err != nil {
			t.Fatal("it is gone with the first")
		}
		wantKind(t, w.Remove(t.Context(), acme, one.Reference), fault.NotFound)
		must(t, w.Remove(t.Context(), acme, two.Reference))
		if _, err := w.driver.Resolve(t.Context(), acme, two.Template); err == nil {
			t.Fatal("it is still there")
		}
		if len(w.driver.layers) != 1 {
			t.Fatalf("%d layers are there", len(w.driver.layers))
		}
	})
	t.Run("a digest takes all names away", func(t *testing.T) {
		_, err := w.pull(acme, p.push(t, "b:2", b))
		must(t, err)
		must(t, w.Remove(t.Context(), acme, other.Digest))
		if all, err := w.List(t.Context(), acme); err != nil || len(all) != 0 {
			t.Fatalf("%v %v", all, err)
		}
	})
	t.Run("what was removed is pulled again", func(t *testing.T) {
		_, err := w.Ensure(t.Context(), acme, template.PullRequest{Reference: other.Reference})
		must(t, err)
	})
	t.Run("what lost its template otherwise is pulled again", func(t *testing.T) {
		must(t, w.driver.RemoveTemplate(t.Context(), acme, other.Template))
		_, err := w.Inspect(t.Context(), acme, other.Reference)
		wantKind(t, err, fault.NotFound)
		_, err = w.Ensure(t.Context(), acme, template.PullRequest{Reference: other.Reference})
		must(t, err)
	})
}

func namesOf(all []image.Info) (names []string) {
	for _, i := range all {
		names = append(names, i.Reference)
	}
	return names
}

func TestTag(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	below, err := w.pull(acme, p.push(t, "a:1", newImage(t, 1, 1000)))
	must(t, err)
	inner, err := w.driver.Resolve(t.Context(), acme, below.Template)
	must(t, err)
	w.driver.templates[acme+"/bld-1"] = &template.Template{Name: "bld-1", Tenant: acme, Digest: "abc123def", User: "me", Workdir: "/w", Env: map[string]string{"A": "b"}, Image: inner.Image, Snapshot: &template.Snapshot{}}
	at := time.Date(2026, 5, 6, 7, 8, 9, 0, time.UTC)
	info, err := w.Tag(t.Context(), acme, "bld-1", "mine", template.Image{Cmd: []string{"run"}, Labels: map[string]string{"x": "y"}, Ports: []string{"1/tcp"}, Created: at})
	must(t, err)
	if info.Reference != "docker.io/library/mine:latest" || info.Digest != "sha256:abc123def" || info.Entrypoint != nil || info.Cmd[0] != "run" || info.User != "me" || info.Labels["x"] != "y" || !info.Created.Equal(at) {
		t.Fatalf("%+v", info)
	}
	got, err := w.Ensure(t.Context(), acme, template.PullRequest{Reference: "mine"})
	must(t, err)
	if got.Name != "bld-1" || got.Image.Cmd[0] != "run" || len(got.Image.Entrypoint) != 0 || got.Image.Reference != info.Reference {
		t.Fatalf("%+v", got.Image)
	}
	if inner.Image.Cmd[0] != "serve" {
		t.Fatal("the image below was changed")
	}
	for _, c := range []struct {
		tenant, template, ref string
		kind                  fault.Kind
	}{{acme, "nope", "mine", fault.NotFound}, {globex, "bld-1", "mine", fault.NotFound}, {acme, "bld-1", "UP", fault.Invalid}, {acme, "bld-1", "a@" + below.Digest, fault.Invalid}} {
		_, err := w.Tag(t.Context(), c.tenant, c.template, c.ref, template.Image{})
		wantKind(t, err, c.kind)
	}
	t.Run("what others are made from stays until Prune", func(t *testing.T) {
		w.driver.refuse["bld-1"] = fault.New(fault.Conflict, "others are made from it")
		must(t, w.Remove(t.Context(), acme, "mine"))
		_, removed, err := w.Prune(t.Context(), acme)
		if err != nil || len(removed) != 0 {
			t.Fatalf("%v %v", removed, err)
		}
		delete(w.driver.refuse, "bld-1")
		_, removed, err = w.Prune(t.Context(), acme)
		if err != nil || !slices.Equal(removed, []string{"bld-1"}) {
			t.Fatalf("%v %v", removed, err)
		}
	})
	t.Run("a template of everybody's loses its name only", func(t *testing.T) {
		_, err := w.Tag(t.Context(), acme, "python", "snake", template.Image{})
		must(t, err)
		must(t, w.Remove(t.Context(), acme, "snake"))
		if _, err := w.driver.Resolve(t.Context(), acme, "python"); err != nil {
			t.Fatal(err)
		}
	})
}

func TestPrune(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	ref := p.push(t, "a:1", newImage(t, 1, 1000))
	old, err := w.pull(acme, ref)
	must(t, err)
	p.push(t, "a:1", newImage(t, 1, 1000))
	current, err := w.pull(acme, ref) // the tag has moved: nobody names the old one any more
	must(t, err)
	freed, removed, err := w.Prune(t.Context(), acme)
	must(t, err)
	if freed < 1000 || !slices.Equal(removed, []string{old.Template}) {
		t.Fatalf("%d %v", freed, removed)
	}
	if _, err := w.driver.Resolve(t.Context(), acme, current.Template); err != nil {
		t.Fatal(err)
	}
	if notes, err := w.store.Documents(t.Context(), acme, "image-layer"); err != nil || len(notes) != 1 {
		t.Fatalf("%v %v", notes, err)
	}
}

func TestPruneTellsWhatLayersOfBuildsHad(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	_, err := w.pull(acme, p.push(t, "a:1", newImage(t, 1, 1000)))
	must(t, err)
	w.driver.templates["acme/bld-1"], w.driver.bytes = &template.Template{Name: "bld-1", Tenant: acme}, map[string]int64{"bld-1": 4096}
	freed, removed, err := w.Prune(t.Context(), acme)
	must(t, err)
	if freed != 4096 || !slices.Equal(removed, []string{"bld-1"}) {
		t.Errorf("%d %v", freed, removed)
	}
}

func TestATenantsImagesHaveABound(t *testing.T) {
	p := newPlace(t)
	large, small := newImage(t, 1, 3<<20), newImage(t, 1, 1000)
	above, err := small.Layers()
	must(t, err)
	shared, err := mutate.AppendLayers(large, above...)
	must(t, err)
	names := map[string]string{"large": p.push(t, "large:1", large), "shared": p.push(t, "shared:1", shared), "other": p.push(t, "other:1", newImage(t, 1, 2<<20)), "small": p.push(t, "small:1", small)}
	w := open(t, func(c *image.Config) { c.MaxTenantBytes = 4 << 20 })
	for _, step := range []struct {
		name string
		ok   bool
	}{{"large", true}, {"shared", true}, {"other", false}, {"small", true}} {
		_, err := w.pull(acme, names[step.name])
		if step.ok && err != nil || !step.ok && !fault.Is(err, fault.Exhausted) {
			t.Fatalf("%s: %v", step.name, err)
		}
	}
	if got := p.asked("other/blobs/"); len(got) > 1 { // its configuration, and no layer
		t.Errorf("what cannot be had was downloaded: %v", got)
	}
	if _, err := w.pull(globex, names["other"]); fault.Is(err, fault.Exhausted) {
		t.Errorf("another tenant: %v", err)
	}
	for _, name := range []string{"large", "shared"} {
		must(t, w.Remove(t.Context(), acme, names[name]))
	}
	_, err = w.pull(acme, names["other"])
	must(t, err)
	w.driver.templates["acme/bld-1"], w.driver.bytes = &template.Template{Name: "bld-1", Tenant: acme}, map[string]int64{"bld-1": 3 << 20}
	if _, err := w.importAll("mine:1", saved(t, map[string]v1.Image{"mine:1": newImage(t, 1, 10_000)})); !fault.Is(err, fault.Exhausted) {
		t.Errorf("layers of builds do not count: %v", err)
	}
}

// bomb is an image whose layer is small only on its way.
func bomb(t *testing.T, bytes int) v1.Image {
	t.Helper()
	raw := tarOf(t, tar.Header{Name: "zeros-" + rand.Text(), Uname: strings.Repeat("\x00", bytes)})
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(string(raw))), nil })
	must(t, err)
	i, err := mutate.AppendLayers(empty.Image, l)
	must(t, err)
	return configured(t, i, "amd64")
}

// While somebody pulls, no layer can be removed: what a tenant has brought meanwhile counts, whatever became of it.
func TestATenantsBoundHoldsWhileLayersCannotBeRemoved(t *testing.T) {
	const bound = 4 << 20
	p := newPlace(t)
	w := open(t, func(c *image.Config) { c.MaxTenantBytes, c.Insecure = bound, []string{p.host()} })
	slow, gate := p.push(t, "slow:1", newImage(t, 1, 1000)), make(chan struct{})
	unpacks := make(chan struct{}, 1)
	w.driver.onUnpack = func(context.Context, sandbox.LayerRequest) error { unpacks <- struct{}{}; <-gate; return nil }
	other := make(chan error, 1)
	go func() { _, err := w.pull(globex, slow); other <- err }()
	select {
	case <-unpacks:
	case err := <-other:
		t.Fatal(err)
	}
	w.driver.mu.Lock()
	w.driver.onUnpack = nil
	w.driver.mu.Unlock()

	t.Run("one that is too large is not unpacked", func(t *testing.T) {
		for range 3 {
			_, err := w.pull(acme, p.push(t, "bomb:1", bomb(t, 2*bound)))
			wantKind(t, err, fault.Exhausted, "this server allows 4")
		}
		if most := w.driver.most(); most != 0 {
			t.Errorf("%d bytes were there", most)
		}
	})
	t.Run("those that are removed again count until they are gone", func(t *testing.T) {
		for i := range 3 {
			name := p.push(t, fmt.Sprintf("part:%d", i), bomb(t, bound/2-8192))
			_, err := w.pull(acme, name)
			if i < 2 {
				must(t, err)
				must(t, w.Remove(t.Context(), acme, name))
			} else {
				wantKind(t, err, fault.Exhausted)
			}
		}
		if most := w.driver.most(); most > bound {
			t.Errorf("%d bytes were there", most)
		}
	})
	close(gate)
	must(t, <-other)
	_, err := w.pull(acme, p.push(t, "after:1", bomb(t, bound/2)))
	must(t, err)
}

func TestPullsAtOnceDoNotTakeTheSameRoom(t *testing.T) {
	const bound = 4 << 20
	p := newPlace(t)
	w := open(t, func(c *image.Config) { c.MaxTenantBytes = bound })
	results := make(chan error, 8)
	for i := range cap(results) {
		name := p.push(t, fmt.Sprintf("part:%d", i), bomb(t, bound/2-8192))
		go func() { _, err := w.pull(acme, name); results <- err }()
	}
	came := 0
	for range cap(results) {
		if err := <-results; err == nil {
			came++
		} else if !fault.Is(err, fault.Exhausted) {
			t.Error(err)
		}
	}
	if most := w.driver.most(); came != 2 || most > bound {
		t.Errorf("%d images came, %d bytes were there", came, most)
	}
}

func TestPruneAsksAboutManyLayers(t *testing.T) {
	w := open(t, nil)
	for i := range 2*template.MaxImageLayers + 1 {
		must(t, w.store.PutDocument(t.Context(), acme, "image-layer", fmt.Sprintf("sha256:%064x", i), []byte("{}")))
	}
	_, _, err := w.Prune(t.Context(), acme)
	must(t, err)
	if notes, err := w.store.Documents(t.Context(), acme, "image-layer"); err != nil || len(notes) != 0 {
		t.Fatalf("%d notes of layers that are not there, %v", len(notes), err)
	}
}

// A template has no name for a moment, in which nobody may take it for one that nobody needs.
func TestPruneLeavesWhatIsAboutToBeNamed(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	pruned := make(chan error, 1)
	w.driver.onAdd = func() {
		go func() { _, _, err := w.Prune(t.Context(), acme); pruned <- err }()
		select {
		case err := <-pruned: // it did not wait
			pruned <- err
		case <-time.After(50 * time.Millisecond):
		}
	}
	info, err := w.pull(acme, p.push(t, "a:1", newImage(t, 1, 1000)))
	must(t, err)
	must(t, <-pruned)
	if _, err := w.Inspect(t.Context(), acme, info.Reference); err != nil {
		t.Fatal(err)
	}
}

func TestRemoveLeavesWhatHasMoved(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	ref := p.push(t, "a:1", newImage(t, 1, 1000))
	_, err := w.pull(acme, ref)
	must(t, err)
	var current image.Info
	must(t, w.RemoveAfter(t.Context(), acme, ref, func() {
		p.push(t, "a:1", newImage(t, 1, 1000))
		current, err = w.pull(acme, ref)
		must(t, err)
	}))
	if got, err := w.Inspect(t.Context(), acme, ref); err != nil || got.Template != current.Template {
		t.Fatalf("%+v %v", got, err)
	}
	must(t, w.RemoveAfter(t.Context(), acme, ref, func() { must(t, w.Remove(t.Context(), acme, ref)) }))
}

func TestNoNameForWhatCannotBeRead(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	ref := p.push(t, "a:1", newImage(t, 1, 1000))
	w.driver.blind = true
	_, err := w.pull(acme, ref)
	wantKind(t, err, fault.Internal, "cannot read its template")
	if docs, err := w.store.Documents(t.Context(), acme, "image-ref"); err != nil || len(docs) != 0 {
		t.Fatalf("%v %v", docs, err)
	}
	w.driver.blind = false
	_, err = w.Ensure(t.Context(), acme, template.PullRequest{Reference: ref})
	must(t, err)
}

func TestPruneWaitsForPulls(t *testing.T) {
	w, p := open(t, nil), newPlace(t)
	ref := p.push(t, "a:1", newImage(t, 2, 1000))
	w.driver.layers["sha256:stray"] = sandbox.Layer{DiffID: "sha256:stray", Bytes: 7}
	started, gate := make(chan struct{}, 2), make(chan struct{})
	var later atomic.Bool
	w.driver.onUnpack = func(context.Context, sandbox.LayerRequest) error {
		if !later.Swap(true) {
			return nil
		}
		started <- struct{}{}
		<-gate
		return nil
	}
	done := make(chan error)
	go func() { _, err := w.pull(acme, ref); done <- err }()
	<-started
	freed, _, err := w.Prune(t.Context(), acme)
	if err != nil || freed != 0 {
		t.Fatalf("%d %v", freed, err)
	}
	close(gate)
	must(t, <-done)
	if there, _ := w.driver.Layers(t.Context(), []string{"sha256:stray"}); len(there) != 0 {
		t.Fatal("the stray layer is still there")
	}
}

// TestFilesCount pulls images of empty files, which have no bytes and still take the host's disk.
func TestFilesCount(t *testing.T) {
	p := newPlace(t)
	img := newImage(t, 1, 1000)
	layers, err := img.Layers()
	must(t, err)
	diff, err := layers[0].DiffID()
	must(t, err)
	name := p.push(t, "empty:1", img)
	for _, c := range []struct {
		name  string
		files int
		set   func(*image.Config)
		words string
	}{
		{"as bytes of the tenant", 3000, func(c *image.Config) { c.MaxTenantBytes = 4 << 20 }, "this server allows 4"},
		{"as bytes of the image", 3000, func(c *image.Config) { c.MaxBytes = 4 << 20 }, "the 4 MiB that an image may have"},
		{"as files of the image", 3000, func(c *image.Config) { c.MaxFiles = 2000 }, "an image may have 2000"},
		{"as files of the tenant", 3000, func(c *image.Config) { c.MaxTenantBytes, c.MaxTenantFiles = 1<<40, 2000 }, "have 3000 files"},
		{"within all bounds", 3000, func(c *image.Config) { c.MaxTenantBytes, c.MaxFiles, c.MaxTenantFiles = 16<<20, 3000, 3000 }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := open(t, c.set)
			w.driver.files = map[string]int{diff.String(): c.files}
			_, err := w.pull(acme, name)
			if c.words == "" {
				must(t, err)
				return
			}
			wantKind(t, err, fault.Exhausted, c.words)
		})
	}
}

// TestFilesCount_WhileUnpacked holds layers in the driver: what they may have is not given away twice.
func TestFilesCount_WhileUnpacked(t *testing.T) {
	p := newPlace(t)
	const held = 2
	names := make([]string, held+1)
	for i := range names {
		names[i] = p.push(t, fmt.Sprintf("held:%d", i), newImage(t, 1, 2000+i))
	}
	w := open(t, func(c *image.Config) { c.MaxTenantBytes, c.MaxFiles, c.MaxTenantFiles = 1<<40, 1000, 1500 })
	reached, release := make(chan int, held), make(chan struct{})
	w.driver.onUnpack = func(_ context.Context, r sandbox.LayerRequest) error {
		reached <- r.MaxFiles
		<-release
		return nil
	}
	ended := make(chan error, held)
	granted := 0
	for _, name := range names[:held] {
		go func() { _, err := w.pull(acme, name); ended <- err }()
		granted += <-reached
	}
	if granted != 1500 {
		t.Errorf("layers in the driver may have %d files together, want the tenant's 1500", granted)
	}
	_, err := w.pull(acme, names[held])
	wantKind(t, err, fault.Exhausted, "no room for the files")
	close(release)
	for range held {
		must(t, <-ended)
	}
	_, err = w.pull(acme, names[held])
	must(t, err)
}

// TestUnpacks_OfOneTenant has layers of one tenant stay in the driver, which takes four at a time.
func TestUnpacks_OfOneTenant(t *testing.T) {
	p := newPlace(t)
	w := open(t, func(c *image.Config) { c.Insecure = []string{p.host()} })
	const share = 3
	const pulls = share + 2
	reached, release := make(chan string, pulls+1), make(chan struct{})
	w.driver.onUnpack = func(_ context.Context, r sandbox.LayerRequest) error {
		tenant, _, _ := strings.Cut(r.For, "/")
		reached <- tenant
		<-release
		return nil
	}
	ended := make(chan error, pulls+1)
	for i := range pulls {
		name := p.push(t, fmt.Sprintf("many:%d", i), newImage(t, 1, 1000+i))
		go func() { _, err := w.pull(acme, name); ended <- err }()
	}
	one := p.push(t, "one:1", newImage(t, 1, 2000))
	for range share {
		<-reached
	}
	go func() { _, err := w.pull(globex, one); ended <- err }()
	select {
	case tenant := <-reached:
		if tenant != globex {
			t.Errorf("one more layer of a tenant that has %d in the driver", share)
		}
	case err := <-ended:
		t.Fatal(err)
	case <-time.After(time.Minute):
		t.Error("another tenant's layer waits")
	}
	time.Sleep(50 * time.Millisecond)
	if n := len(reached); n > 0 {
		t.Errorf("%d more layers reached the driver", n)
	}
	close(release)
	for range cap(ended) {
		must(t, <-ended)
	}
}
