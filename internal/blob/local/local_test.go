package local_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/blob/blobtest"
	"github.com/covehq/cove/internal/blob/local"
)

func open(t *testing.T, dir string, o local.Options) *local.Store {
	t.Helper()
	s, err := local.Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestContract(t *testing.T) {
	blobtest.Run(t, func(t *testing.T) artifact.Blobs { return open(t, t.TempDir(), local.Options{}) })
}

func TestOpenSweepsWhatWasBeingWritten(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, local.Options{})
	if _, err := s.Draft("acme"); err != nil { // and the server dies
		t.Fatal(err)
	}
	open(t, dir, local.Options{})
	left, err := os.ReadDir(filepath.Join(dir, "tmp"))
	if err != nil || len(left) != 0 {
		t.Error(left, err)
	}
}

// TestABlobThatIsWholeStays: it may be on the disk already, and the one that comes is not.
func TestABlobThatIsWholeStays(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, local.Options{})
	keep := func() (at string, now fs.FileInfo) {
		t.Helper()
		d, err := s.Draft("acme")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := d.Write([]byte("content")); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Place(); err != nil {
			t.Fatal(err)
		}
		at = filepath.Join(dir, "t-acme", d.Sum()[:2], d.Sum())
		now, err = os.Stat(at)
		if err != nil {
			t.Fatal(err)
		}
		return at, now
	}
	at, first := keep()
	if _, second := keep(); !os.SameFile(first, second) {
		t.Error("it was replaced")
	}
	for _, damage := range []string{"c0ntent", "", "content and more"} {
		if err := os.WriteFile(at, []byte(damage), 0o600); err != nil {
			t.Fatal(err)
		}
		keep()
		if healed, err := os.ReadFile(at); err != nil || string(healed) != "content" {
			t.Errorf("%q became %q, %v", damage, healed, err)
		}
	}
	if left, err := os.ReadDir(filepath.Join(dir, "tmp")); err != nil || len(left) != 0 {
		t.Error(left, err)
	}
}

func TestModes(t *testing.T) {
	for _, c := range []struct{ asked, want local.Options }{
		{local.Options{}, local.Options{File: 0o600, Dir: 0o700}},
		{local.Options{File: 0o444, Dir: 0o755}, local.Options{File: 0o444, Dir: 0o755}},
	} {
		dir := t.TempDir()
		s := open(t, dir, c.asked)
		d, err := s.Draft("acme")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := d.Place(); err != nil {
			t.Fatal(err)
		}
		err = filepath.WalkDir(filepath.Join(dir, "t-acme"), func(p string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := e.Info()
			if err != nil {
				return err
			}
			want := c.want.File
			if e.IsDir() {
				want = c.want.Dir
			}
			if info.Mode().Perm() != want {
				t.Errorf("%s has %v, not %v", p, info.Mode().Perm(), want)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if size, ok := s.Has("acme", d.Sum()); size != 0 || !ok {
			t.Error(size, ok)
		}
		if _, ok := s.Has("umbrella", d.Sum()); ok {
			t.Error("another tenant has it")
		}
	}
}
