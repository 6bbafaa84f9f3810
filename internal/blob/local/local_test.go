package local_test

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
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

// large is more than a draft holds in memory.
const large = 100_000

func TestOpenSweepsWhatWasBeingWritten(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, local.Options{})
	d, err := s.Draft("acme")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Write(make([]byte, large)); err != nil { // and the server dies
		t.Fatal(err)
	}
	if left, err := os.ReadDir(filepath.Join(dir, "tmp")); err != nil || len(left) != 1 {
		t.Error(left, err)
	}
	open(t, dir, local.Options{})
	left, err := os.ReadDir(filepath.Join(dir, "tmp"))
	if err != nil || len(left) != 0 {
		t.Error(left, err)
	}
}

// TestABlobThatIsWholeStays: it may be on the disk already, and the one that comes is not. What a server that was killed has left
// of one, or what was damaged, is replaced.
func TestABlobThatIsWholeStays(t *testing.T) {
	for name, content := range map[string]string{"small": "content", "large": strings.Repeat("content", large)} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, dir, local.Options{})
			keep := func() (at string, now fs.FileInfo, existed bool) {
				t.Helper()
				d, err := s.Draft("acme")
				if err != nil {
					t.Fatal(err)
				}
				if _, err := d.Write([]byte(content)); err != nil {
					t.Fatal(err)
				}
				if existed, err = d.Place(); err != nil {
					t.Fatal(err)
				}
				at = filepath.Join(dir, "t-acme", d.Sum()[:2], d.Sum())
				now, err = os.Stat(at)
				if err != nil {
					t.Fatal(err)
				}
				return at, now, existed
			}
			at, first, _ := keep()
			if _, second, existed := keep(); !os.SameFile(first, second) || !existed {
				t.Error("it was replaced")
			}
			for _, damage := range []string{"C" + content[1:], "", content[:len(content)/2], content + " and more"} {
				if err := os.WriteFile(at, []byte(damage), 0o600); err != nil {
					t.Fatal(err)
				}
				reader, err := os.Open(at)
				if err != nil {
					t.Fatal(err)
				}
				keep()
				if healed, err := os.ReadFile(at); err != nil || string(healed) != content {
					t.Errorf("%.20q became %.20q, %v", damage, healed, err)
				}
				if same, err := io.ReadAll(reader); err != nil || string(same) != damage {
					t.Errorf("whoever reads %.20q reads %.20q, %v", damage, same, err)
				}
				reader.Close()
			}
			if left, err := os.ReadDir(filepath.Join(dir, "tmp")); err != nil || len(left) != 0 {
				t.Error(left, err)
			}
		})
	}
}

func TestModes(t *testing.T) {
	for _, c := range []struct {
		asked, want local.Options
		size        int
	}{
		{local.Options{}, local.Options{File: 0o600, Dir: 0o700}, 0},
		{local.Options{}, local.Options{File: 0o600, Dir: 0o700}, large},
		{local.Options{File: 0o444, Dir: 0o755}, local.Options{File: 0o444, Dir: 0o755}, 0},
		{local.Options{File: 0o444, Dir: 0o755}, local.Options{File: 0o444, Dir: 0o755}, large},
	} {
		dir := t.TempDir()
		s := open(t, dir, c.asked)
		d, err := s.Draft("acme")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := d.Write(make([]byte, c.size)); err != nil {
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
		if size, ok := s.Has("acme", d.Sum()); size != int64(c.size) || !ok {
			t.Error(size, ok)
		}
		if _, ok := s.Has("umbrella", d.Sum()); ok {
			t.Error("another tenant has it")
		}
	}
}
