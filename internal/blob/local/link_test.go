package local_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/covehq/cove/internal/blob/local"
	"github.com/covehq/cove/internal/fault"
)

func openShelf(t *testing.T, dir string) *local.Shelf {
	t.Helper()
	s, err := local.OpenShelf(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// put keeps content and returns its digest.
func put(t *testing.T, s *local.Shelf, content string) string {
	t.Helper()
	d, err := s.Draft("acme")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Drop()
	_, err = d.Write([]byte(content))
	sum, size, err2 := d.Settle()
	if err := errors.Join(err, err2, d.Keep()); err != nil || size != int64(len(content)) {
		t.Fatalf("%d %v", size, err)
	}
	return sum
}

func releaseAll(s *local.Shelf) error {
	for r, err := range s.All() {
		if err := errors.Join(err, s.Release(r.Tenant, r.SHA256)); err != nil {
			return err
		}
	}
	return nil
}

func TestShelf(t *testing.T) {
	dir := t.TempDir()
	s := openShelf(t, dir)
	a, b := put(t, s, "a"), put(t, s, "b")
	inode := func(sum string) os.FileInfo {
		t.Helper()
		info, err := os.Stat(filepath.Join(dir, "blobs/t-acme", sum[:2], sum))
		if err != nil {
			t.Fatal(err)
		}
		return info
	}
	shown := func(claim, at, want string) {
		t.Helper()
		if text, err := os.ReadFile(filepath.Join(dir, "sessions", at)); err != nil || string(text) != want {
			t.Errorf("%s: %q %v", claim, text, err)
		}
	}
	if err := errors.Join(s.MakeDir("one"), s.MakeDir("one"), s.MakeDir("two"), s.Show("one", "x", "acme", a), s.Show("two", "y", "acme", a)); err != nil {
		t.Fatal(err)
	}
	shown("content under another name", "one/x", "a")

	before := inode(a)
	put(t, s, "a")
	if !os.SameFile(before, inode(a)) {
		t.Error("content that comes again has another inode than what others see")
	}
	if info := inode(a); info.Mode() != 0o444 {
		t.Errorf("a blob has the mode %v", info.Mode())
	}
	if err := errors.Join(s.Show("one", "x", "acme", a), s.Show("one", "x", "acme", b)); err != nil {
		t.Fatal(err)
	}
	shown("in the place of another", "one/x", "b")
	shown("which others see still", "two/y", "a")
	if names, err := s.Shown("one"); err != nil || !cmp.Equal(names, []string{"x"}) {
		t.Errorf("%q %v", names, err)
	}

	if err := s.Show("one", "z", "umbrella", a); !fault.Is(err, fault.NotFound) {
		t.Errorf("content that is not there: %v", err)
	}
	if err := s.Show("none", "x", "acme", a); !fault.Is(err, fault.Conflict) {
		t.Errorf("a directory that is not there: %v", err)
	}
	for _, bad := range []string{"", ".", "..", "../x", "a/b", "/x", "-x"} {
		for claim, err := range map[string]error{
			"make": s.MakeDir(bad), "remove": s.RemoveDir(bad), "show in": s.Show(bad, "x", "acme", a), "show as": s.Show("one", bad, "acme", a), "hide": s.Hide("one", bad), "hide in": s.Hide(bad, "x"),
		} {
			if !fault.Is(err, fault.Invalid) {
				t.Errorf("%s %q: %v", claim, bad, err)
			}
		}
	}

	if err := errors.Join(s.Hide("two", "y"), s.Hide("two", "y"), releaseAll(s)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Size("acme", a); !fault.Is(err, fault.NotFound) {
		t.Errorf("what nobody sees is there still: %v", err)
	}
	if size, err := s.Size("acme", b); size != 1 || err != nil {
		t.Errorf("what somebody sees: %d %v", size, err)
	}
	if err := errors.Join(s.RemoveDir("one"), s.RemoveDir("one"), releaseAll(s)); err != nil {
		t.Fatal(err)
	}
	if dirs, err := s.Dirs(); err != nil || !cmp.Equal(dirs, []string{"two"}) {
		t.Errorf("%q %v", dirs, err)
	}
	if err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			t.Errorf("%s is left", path)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

func TestContentThatIsOpenStaysAndCounts(t *testing.T) {
	dir := t.TempDir()
	s := openShelf(t, dir)
	sum := put(t, s, "content")
	if err := errors.Join(s.MakeDir("one"), s.Show("one", "x", "acme", sum)); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(dir, "sessions/one/x"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	holds := func(claim string, there bool, bytes int64, files int) {
		t.Helper()
		if err := s.Release("acme", sum); err != nil {
			t.Fatal(err)
		}
		n, open := s.Lingering("acme")
		if _, err := s.Size("acme", sum); (err == nil) != there || n != bytes || open != files {
			t.Errorf("%s: %v, %d bytes in %d files", claim, err, n, open)
		}
		if n, open := s.Lingering("umbrella"); n != 0 || open != 0 {
			t.Errorf("%s: another tenant has %d bytes in %d files", claim, n, open)
		}
	}
	holds("it is shown", true, 0, 0)
	if err := s.Hide("one", "x"); err != nil {
		t.Fatal(err)
	}
	holds("it is open", true, 7, 1)
	if err := s.Show("one", "y", "acme", sum); err != nil {
		t.Fatal(err)
	}
	holds("it is shown again", true, 0, 0)
	if err := errors.Join(s.Hide("one", "y"), f.Close()); err != nil {
		t.Fatal(err)
	}
	holds("it is closed", false, 0, 0)
}

// TestMoreLinksThanAFileCanHave: a file system that has no such bound has nothing to tell.
func TestMoreLinksThanAFileCanHave(t *testing.T) {
	s := openShelf(t, t.TempDir())
	sum := put(t, s, "x")
	if err := s.MakeDir("one"); err != nil {
		t.Fatal(err)
	}
	for i := range 66_000 {
		if err := s.Show("one", fmt.Sprint(i), "acme", sum); err != nil {
			if !fault.Is(err, fault.Exhausted) {
				t.Error(i, err)
			}
			return
		}
	}
}

func TestShelfForgetsWhatDidNotArrive(t *testing.T) {
	dir := t.TempDir()
	s := openShelf(t, dir)
	d, err := s.Draft("acme")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = d.Write([]byte("half")) // and then the server is killed
	openShelf(t, dir)
	if left, err := os.ReadDir(filepath.Join(dir, "blobs/tmp")); err != nil || len(left) != 0 {
		t.Errorf("%v %v", left, err)
	}
}
