package template_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// unpacked makes a layer of an image by hand.
func unpacked(t *testing.T, store *template.Store, number int, files map[string]string) string {
	t.Helper()
	id := fmt.Sprintf("sha256:%064x", number)
	dir, err := store.LayerDir(id)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, template.LayerTree), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		at := filepath.Join(dir, template.LayerTree, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return id
}

func newImage(number int, layers ...string) template.NewImage {
	return template.NewImage{Tenant: "acme", Name: fmt.Sprintf("img-%032x", number), Image: template.Image{Reference: "registry.test/a:1", Layers: layers}}
}

func addImage(t *testing.T, store *template.Store, n template.NewImage) *template.Template {
	t.Helper()
	made, err := store.AddImage(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func TestATemplateOfAnImage(t *testing.T) {
	store := open(t, t.TempDir())
	a, b := unpacked(t, store, 1, nil), unpacked(t, store, 2, nil)
	made := addImage(t, store, newImage(1, a, b, a))
	lower := made.Trees[0].Lower
	if len(made.Trees) != 1 || len(lower) != 4 || !strings.Contains(lower[1], fmt.Sprintf("%064x", 1)) || !strings.Contains(lower[2], fmt.Sprintf("%064x", 2)) {
		t.Errorf("the uppermost first, and each once: %q", lower)
	}
	if made.User != "root" || made.Workdir != "/" || made.Env["PATH"] == "" || made.Python.Executable != "" || made.Image.UID != 0 {
		t.Errorf("%+v", made)
	}
	for _, name := range []string{"etc/hosts", "etc/hostname", "etc/resolv.conf"} {
		if info, err := os.Stat(filepath.Join(lower[0], name)); err != nil || info.Mode().Perm() != 0o644 {
			t.Errorf("%s: %v %v", name, info, err)
		}
	}
	for _, name := range []string{"dev", "proc", "sys", "run", "tmp", "root", "etc"} {
		if _, err := os.Stat(filepath.Join(lower[3], name)); err != nil {
			t.Error(err)
		}
	}
	again, err := store.AddImage(t.Context(), newImage(1, a, b, a))
	if err != nil || again.Digest != made.Digest {
		t.Errorf("%v %v", again, err)
	}
	got := store.ListFor("acme")
	if i := slices.IndexFunc(got, func(i template.Info) bool { return i.Name == made.Name }); i < 0 || got[i].Kind() != template.SourceImage || got[i].From != "registry.test/a:1" {
		t.Errorf("%+v", got)
	}
	if _, err := store.ResolveFor(t.Context(), "other", made.Name); !fault.Is(err, fault.NotFound) {
		t.Error(err)
	}
}

func TestImagesThatCannotBe(t *testing.T) {
	store := open(t, t.TempDir())
	a := unpacked(t, store, 1, nil)
	for claim, c := range map[string]struct {
		change func(*template.NewImage)
		kind   fault.Kind
	}{
		"no tenant":               {func(n *template.NewImage) { n.Tenant = "" }, fault.Invalid},
		"a name of another kind":  {func(n *template.NewImage) { n.Name = "python" }, fault.Invalid},
		"a name that is a path":   {func(n *template.NewImage) { n.Name = "img-../../../../../../../../etc/passwd" }, fault.Invalid},
		"a layer that is a path":  {func(n *template.NewImage) { n.Image.Layers = []string{"sha256:../../../../etc"} }, fault.Invalid},
		"a layer that is missing": {func(n *template.NewImage) { n.Image.Layers = []string{fmt.Sprintf("sha256:%064x", 9)} }, fault.Conflict},
		"too many layers":         {func(n *template.NewImage) { n.Image.Layers = slices.Repeat([]string{a}, 128) }, fault.Invalid},
		"a user with a slash":     {func(n *template.NewImage) { n.User = "../root" }, fault.Invalid},
		"a variable without name": {func(n *template.NewImage) { n.Env = map[string]string{"": "x"} }, fault.Invalid},
		"a variable with NUL":     {func(n *template.NewImage) { n.Env = map[string]string{"A": "\x00"} }, fault.Invalid},
		"a workdir with NUL":      {func(n *template.NewImage) { n.Workdir = "/\x00" }, fault.Invalid},
	} {
		t.Run(claim, func(t *testing.T) {
			n := newImage(1, a)
			c.change(&n)
			if _, err := store.AddImage(t.Context(), n); !fault.Is(err, c.kind) {
				t.Error(err)
			}
		})
	}
}

func TestAnImagesUserIsFoundBeneathItsLayers(t *testing.T) {
	store := open(t, t.TempDir())
	old := unpacked(t, store, 1, map[string]string{"etc/passwd": "app:x:1:1::/:/bin/sh\n", "etc/group": "staff:x:50:\n"})
	now := unpacked(t, store, 2, map[string]string{"etc/passwd": "root:x:0:0::/root:/bin/sh\nbad line\napp:x:1234:1235::/:/bin/sh\n"})
	link := unpacked(t, store, 3, map[string]string{"etc/x": ""})
	dir, _ := store.LayerDir(link)
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, template.LayerTree, "etc/passwd")); err != nil {
		t.Fatal(err)
	}
	for i, c := range []struct {
		user     string
		layers   []string
		uid, gid int
	}{
		{"", []string{old, now}, 0, 0},
		{"app", []string{old, now}, 1234, 1235},
		{"1234", []string{old, now}, 1234, 1235},
		{"app:staff", []string{old, now}, 1234, 50},
		{"app:7", []string{old, now}, 1234, 7},
		{"77", []string{old, now}, 77, 0},
		{"77:88", nil, 77, 88},
		{"app:nobody", []string{old, now}, 1234, -1},
		{"ghost", []string{old, now}, -1, -1},
		{"daemon", []string{old, link}, -1, -1}, // the host has one
	} {
		n := newImage(i+10, c.layers...)
		n.User = c.user
		if made := addImage(t, store, n); made.Image.UID != c.uid || made.Image.GID != c.gid {
			t.Errorf("%q: %d:%d, not %d:%d", c.user, made.Image.UID, made.Image.GID, c.uid, c.gid)
		}
	}
}

func TestPruningKeepsWhatIsNeeded(t *testing.T) {
	store := open(t, t.TempDir())
	var ids []string
	for i := range 6 {
		ids = append(ids, unpacked(t, store, i, map[string]string{"x": fmt.Sprint(i)}))
	}
	kept := addImage(t, store, newImage(1, ids[0], ids[1]))
	above := addImage(t, store, newImage(2, ids[0], ids[2]))
	add(t, store, template.NewSnapshot{From: above, Tenant: "acme", Name: "above"})
	gone := addImage(t, store, newImage(3, ids[3]))
	for _, made := range []*template.Template{above, gone} {
		if _, err := store.RemoveSnapshot(t.Context(), "acme", made.Name); err != nil {
			t.Fatal(err)
		}
	}
	released := false
	inUse := func() ([]*template.Template, func()) { return []*template.Template{gone}, func() { released = true } }
	wanted := func(name string) bool { return name == fmt.Sprintf("%064x", 4) }
	doomed, err := store.PruneLayers(t.Context(), inUse, wanted)
	if err != nil || len(doomed) != 1 || !released {
		t.Fatalf("%q %v", doomed, err)
	}
	for i, id := range ids {
		dir, _ := store.LayerDir(id)
		if _, err := os.Stat(dir); (err == nil) != (i != 5) {
			t.Errorf("%d: %v", i, err)
		}
	}
	if _, err := store.ResolveFor(t.Context(), "acme", kept.Name); err != nil {
		t.Error(err)
	}
	if err := store.Sweep(t.Context(), nil, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := store.ResolveFor(t.Context(), "acme", "above"); err != nil {
		t.Error(err)
	}
}

func TestAnImagesLayerThatWasChangedIsSeen(t *testing.T) {
	store := open(t, t.TempDir())
	id := unpacked(t, store, 1, map[string]string{"bin/tool": "good"})
	made := addImage(t, store, newImage(1, id))
	if err := store.SealLayers(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := store.Verify(t.Context(), "acme", made.Name); err != nil {
		t.Fatal(err)
	}
	dir, _ := store.LayerDir(id)
	if err := os.WriteFile(filepath.Join(dir, template.LayerTree, "bin/tool"), []byte("evil"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := store.Verify(t.Context(), "acme", made.Name); !fault.Is(err, fault.Internal) || !strings.Contains(err.Error(), "was changed") {
		t.Error(err)
	}
}

func TestAnImagesVolumesHaveShortNames(t *testing.T) {
	n := newImage(1)
	n.Image.Volumes = []string{"/" + strings.Repeat("x", 511)}
	if _, err := n.Template(); err != nil {
		t.Error(err)
	}
	for _, volumes := range [][]string{{"/" + strings.Repeat("x", 512)}, slices.Repeat([]string{"/" + strings.Repeat("x", 500)}, 17)} {
		n.Image.Volumes = volumes
		if _, err := n.Template(); !fault.Is(err, fault.Unsupported) || !strings.Contains(fault.Message(err), "too long") {
			t.Errorf("%d: %v", len(volumes), err)
		}
	}
}
