package template_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/template"
)

// lower is a template whose layers are there.
func lower(t *testing.T, store *template.Store) *template.Template {
	t.Helper()
	dir := filepath.Join(store.LayersDir(), "base-1")
	for _, tree := range []string{"@", "@usr"} {
		if err := os.MkdirAll(filepath.Join(dir, tree), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return &template.Template{
		Name: "base", Digest: "base-digest", User: "user",
		Trees: []template.Tree{{Target: "/", Lower: []string{dir + "/@"}}, {Target: "/usr", Lower: []string{dir + "/@usr", "/usr"}}},
	}
}

func putImage(text string) func(int, string) error {
	return func(_ int, path string) error { return os.WriteFile(path, []byte(text), 0o600) }
}

func add(t *testing.T, store *template.Store, n template.NewSnapshot) *template.Template {
	t.Helper()
	if n.Put == nil {
		n.Put = putImage(n.Name)
	}
	if n.Above == 0 {
		n.Above = 1
	}
	made, err := store.AddSnapshot(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func imagesIn(t *testing.T, store *template.Store) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(store.LayersDir(), "*.img"))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestASnapshotLiesAboveItsTemplate(t *testing.T) {
	store := open(t, t.TempDir())
	base := lower(t, store)
	one := add(t, store, template.NewSnapshot{From: base, Tenant: "acme", Name: "one", Description: "first", Above: 2})
	two := add(t, store, template.NewSnapshot{From: one, Tenant: "acme", Name: "two"})
	if got := len(one.Images()); got != 2 {
		t.Errorf("%d images", got)
	}
	for _, info := range store.ListFor("acme") { // each for what it alone has: a file takes at least a block
		if own := map[string]int64{"one": 2, "two": 1}[info.Name]; info.Bytes < own*512 || own == 0 && info.Bytes != 0 {
			t.Errorf("%s has %d bytes", info.Name, info.Bytes)
		}
	}
	want := []template.Tree{
		{Target: "/", Lower: slices.Concat(two.Images(), base.Trees[0].Lower)}, {Target: "/usr", Lower: slices.Concat(two.Images(), base.Trees[1].Lower)},
	}
	if diff := cmp.Diff(want, two.Trees); diff != "" || len(two.Images()) != 3 || !slices.Equal(two.Images()[1:], one.Images()) {
		t.Errorf("%s\n%v", diff, two.Images())
	}
	if two.Digest == one.Digest || one.Digest == base.Digest || two.Snapshot.Base != "base" || two.Snapshot.Digest != "base-digest" || two.Snapshot.From != "one" {
		t.Errorf("%s %s %+v", one.Digest, two.Digest, two.Snapshot)
	}
	below := two.Base()
	if below.Name != "base" || below.Digest != "base-digest" || below.Tenant != "" || below.Snapshot != nil || !cmp.Equal(below.Trees, base.Trees) {
		t.Errorf("below all images lies %+v", below)
	}
	// Another process sees the same.
	again := open(t, filepath.Dir(filepath.Dir(store.LayersDir())))
	got, err := again.ResolveFor(t.Context(), "acme", "two")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(two, got); diff != "" {
		t.Error(diff)
	}
}

// What lies below all images is shared by everything that was made from it, so it has nothing of those above.
func TestASnapshotHasDefaultsOfItsOwn(t *testing.T) {
	store := open(t, t.TempDir())
	base := lower(t, store)
	base.Env, base.Workdir = map[string]string{"A": "1"}, "/home/user"
	one := add(t, store, template.NewSnapshot{From: base, Tenant: "acme", Name: "one", Env: map[string]string{"B": "2"}, Workdir: "/srv"})
	two := add(t, store, template.NewSnapshot{From: one, Tenant: "acme", Name: "two", Env: map[string]string{"A": "3"}, User: "bob"})
	if want := map[string]string{"A": "3", "B": "2"}; !cmp.Equal(want, two.Env) || two.User != "bob" || two.Workdir != "/srv" {
		t.Errorf("%v %s %s", two.Env, two.User, two.Workdir)
	}
	plain := add(t, store, template.NewSnapshot{From: base, Tenant: "acme", Name: "plain"})
	for _, above := range []*template.Template{one, two, plain} {
		if below := above.Base(); !cmp.Equal(below, base) {
			t.Errorf("below %s: %s", above.Name, cmp.Diff(base, below))
		}
	}
}

func TestASnapshotIsItsTenantsAlone(t *testing.T) {
	store := open(t, t.TempDir())
	base := lower(t, store)
	add(t, store, template.NewSnapshot{From: base, Tenant: "acme", Name: "mine"})
	theirs := add(t, store, template.NewSnapshot{From: base, Tenant: "../acme", Name: "mine"})
	if got, err := store.ResolveFor(t.Context(), "../acme", "mine"); err != nil || got.Digest != theirs.Digest {
		t.Errorf("%+v %v", got, err)
	}
	_, err := store.ResolveFor(t.Context(), "other", "mine")
	if !fault.Is(err, fault.NotFound) || !strings.Contains(fault.Message(err), "there are base, code-interpreter, python") {
		t.Errorf("got %v", err)
	}
	if _, err := store.ResolveFor(t.Context(), "", "mine"); !fault.Is(err, fault.NotFound) {
		t.Errorf("nobody's: %v", err)
	}
	if _, err := store.ResolveFor(t.Context(), "acme", "../../x"); !fault.Is(err, fault.NotFound) {
		t.Errorf("a path: %v", err)
	}
	var kinds []string
	for _, info := range store.ListFor("acme") {
		kinds = append(kinds, info.Name+" "+info.Kind()+" "+info.Tenant)
		if info.Kind() == template.SourceSnapshot && (info.From != "base" || time.Since(info.Created) > time.Minute || info.Digest == "") {
			t.Errorf("%+v", info)
		}
	}
	if diff := cmp.Diff([]string{"base built-in ", "code-interpreter built-in ", "mine snapshot acme", "python built-in "}, kinds); diff != "" {
		t.Error(diff)
	}
	if got := len(store.All()); got != len(store.List())+2 {
		t.Errorf("%d templates of everybody", got)
	}
	for _, name := range []string{"mine", "python", "", "Big", "a/b"} {
		kind := fault.Conflict
		if name != "mine" && name != "python" {
			kind = fault.Invalid
		}
		_, err := store.AddSnapshot(t.Context(), template.NewSnapshot{From: base, Tenant: "acme", Name: name, Above: 1, Put: putImage("x")})
		if !fault.Is(err, kind) {
			t.Errorf("%q: %v", name, err)
		}
	}
	if _, err := store.AddSnapshot(t.Context(), template.NewSnapshot{From: base, Name: "x", Above: 1, Put: putImage("x")}); !fault.Is(err, fault.Invalid) {
		t.Errorf("a snapshot for everybody: %v", err)
	}
	if got := len(imagesIn(t, store)); got != 2 {
		t.Errorf("%d images", got)
	}
}

func TestASnapshotThatFailsLeavesNothing(t *testing.T) {
	store := open(t, t.TempDir())
	base := lower(t, store)
	broken := errors.New("broken")
	_, err := store.AddSnapshot(t.Context(), template.NewSnapshot{From: base, Tenant: "acme", Name: "x", Above: 2, Put: func(i int, path string) error {
		if i == 1 {
			return broken
		}
		return putImage("x")(i, path)
	}})
	if !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	if left := imagesIn(t, store); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	if _, err := store.ResolveFor(t.Context(), "acme", "x"); !fault.Is(err, fault.NotFound) {
		t.Errorf("got %v", err)
	}
}

func TestRemovingASnapshot(t *testing.T) {
	store := open(t, t.TempDir())
	base := lower(t, store)
	one := add(t, store, template.NewSnapshot{From: base, Tenant: "acme", Name: "one"})
	two := add(t, store, template.NewSnapshot{From: one, Tenant: "acme", Name: "two"})
	remove := func(tenant, name string) error {
		_, err := store.RemoveSnapshot(t.Context(), tenant, name)
		return err
	}
	for _, c := range []struct {
		claim, tenant, name string
		kind                fault.Kind
	}{
		{"what another is made from", "acme", "one", fault.Conflict},
		{"another tenant's", "other", "one", fault.NotFound},
		{"everybody's", "acme", "python", fault.Denied},
		{"what is not there", "acme", "three", fault.NotFound},
	} {
		if err := remove(c.tenant, c.name); !fault.Is(err, c.kind) {
			t.Errorf("%s: %v", c.claim, err)
		}
	}
	if err := remove("acme", "two"); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(one.Images(), imagesIn(t, store)); diff != "" {
		t.Errorf("after the upper one is removed: %s", diff)
	}
	// A sandbox of it still runs, and a snapshot of that brings what is gone.
	n := template.NewSnapshot{From: two, Tenant: "acme", Name: "again"}
	var asked []int
	n.Put = func(i int, path string) error { asked = append(asked, i); return putImage("x")(i, path) }
	again := add(t, store, n)
	if diff := cmp.Diff([]int{0, 1}, asked); diff != "" || len(again.Images()) != 3 || again.Images()[2] != one.Images()[0] {
		t.Errorf("%s %v", diff, again.Images())
	}
	for _, name := range []string{"again", "one"} {
		if err := remove("acme", name); err != nil {
			t.Error(err)
		}
	}
	if left := imagesIn(t, store); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	if _, err := store.ResolveFor(t.Context(), "acme", "one"); !fault.Is(err, fault.NotFound) {
		t.Errorf("removed, and yet: %v", err)
	}
}

func TestSweepKeepsWhatSnapshotsNeed(t *testing.T) {
	store := open(t, t.TempDir())
	base := lower(t, store)
	made := add(t, store, template.NewSnapshot{From: base, Tenant: "acme", Name: "one"})
	stray, unneeded := filepath.Join(store.LayersDir(), "snap-stray-0.img"), filepath.Join(store.LayersDir(), "old-1")
	if err := os.WriteFile(stray, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(unneeded, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := store.CleanSnapshots(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(made.Images(), imagesIn(t, store)); diff != "" {
		t.Error(diff)
	}
	if err := store.Sweep(t.Context(), nil, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(unneeded); err == nil {
		t.Error("a layer that nobody needs is kept")
	}
	if _, err := store.ResolveFor(t.Context(), "acme", "one"); err != nil {
		t.Error(err)
	}
	if err := os.RemoveAll(filepath.Join(store.LayersDir(), "base-1")); err != nil {
		t.Fatal(err)
	}
	fresh := open(t, filepath.Dir(filepath.Dir(store.LayersDir())))
	if _, err := fresh.ResolveFor(t.Context(), "acme", "one"); !fault.Is(err, fault.Unavailable) {
		t.Errorf("a layer below is gone: %v", err)
	}
	if _, err := fresh.RemoveSnapshot(t.Context(), "acme", "one"); err != nil {
		t.Errorf("one with a missing layer cannot be removed: %v", err)
	}
}

func TestAChangedImageIsNoticed(t *testing.T) {
	store := open(t, t.TempDir())
	base := lower(t, store)
	base.Trees = base.Trees[:1]
	base.Trees[0].Lower = []string{t.TempDir()} // not a built layer: only the images are looked at
	sparse := func(_ int, path string) error {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := f.Truncate(64 << 20); err != nil {
			return err
		}
		_, err = f.WriteAt([]byte("data"), 40<<20)
		return err
	}
	one := add(t, store, template.NewSnapshot{From: base, Tenant: "acme", Name: "one", Put: sparse})
	two := add(t, store, template.NewSnapshot{From: one, Tenant: "acme", Name: "two", Put: sparse})
	verify := func(name string) error { return store.Verify(context.Background(), "acme", name) }
	for _, name := range []string{"one", "two", "two"} { // the first time seals it
		if err := verify(name); err != nil {
			t.Fatal(err)
		}
	}
	change := func(path string, at int64, text string) {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteAt([]byte(text), at); err != nil {
			t.Fatal(err)
		}
	}
	change(two.Images()[0], 1<<20, strings.Repeat("\x00", 4096)) // zeros are as good as a hole
	if err := verify("two"); err != nil {
		t.Errorf("an image that reads the same: %v", err)
	}
	change(one.Images()[0], 40<<20, "Data")
	for _, name := range []string{"one", "two"} {
		if err := verify(name); !fault.Is(err, fault.Internal) {
			t.Errorf("%s, after the lower image was changed: %v", name, err)
		}
	}
}

// TestRecord_TenantsAreNotForEveryone has records of tenants readable for the server's group alone,
// those of an earlier version too.
func TestRecord_TenantsAreNotForEveryone(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give a file to another group")
	}
	dir, server := t.TempDir(), t.TempDir()
	if err := os.Chown(server, 0, 4711); err != nil {
		t.Fatal(err)
	}
	modes := func() (all []string) {
		t.Helper()
		for _, pattern := range []string{"built/tenants/*", "built/tenants/*/*.json"} {
			names, err := filepath.Glob(filepath.Join(dir, pattern))
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range names {
				info, err := os.Stat(name)
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, fmt.Sprintf("%o %d", info.Mode().Perm(), info.Sys().(*syscall.Stat_t).Gid))
			}
		}
		return all
	}
	before := open(t, dir) // as before there were readers
	add(t, before, template.NewSnapshot{From: lower(t, before), Tenant: "acme", Name: "one"})
	store, err := template.Open(template.Options{Dir: dir, Readers: server})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.CleanSnapshots(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"750 4711", "640 4711"}, modes()); diff != "" {
		t.Errorf("an earlier record: %s", diff)
	}
	add(t, store, template.NewSnapshot{From: lower(t, store), Tenant: "bravo", Name: "two"})
	if diff := cmp.Diff([]string{"750 4711", "750 4711", "640 4711", "640 4711"}, modes()); diff != "" {
		t.Errorf("a new record: %s", diff)
	}
}
