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
	"github.com/covehq/cove/internal/fault"
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

// disk is a file system that has room for so many bytes.
type disk struct{ room, asked int64 }

func (d *disk) space(bytes int64) error {
	if d.asked += bytes; d.asked > d.room {
		return fault.New(fault.DiskFull, "the server's disk is full")
	}
	return nil
}

// pour writes into a draft until it takes no more.
func pour(d io.Writer, piece int) (written int64, err error) {
	for {
		n, err := d.Write(make([]byte, piece))
		if written += int64(n); err != nil || written > 64<<20 {
			return written, err
		}
	}
}

func TestDraft_BelowReserve(t *testing.T) {
	const room = 5 << 20
	for name, draft := range map[string]func(dir string, d *disk) (io.Writer, func(), error){
		"store": func(dir string, d *disk) (io.Writer, func(), error) {
			draft, err := open(t, dir, local.Options{Space: d.space}).Draft("acme")
			if err != nil {
				return nil, nil, err
			}
			return draft, draft.Drop, nil
		},
		"shelf": func(dir string, d *disk) (io.Writer, func(), error) {
			s, err := local.OpenShelf(dir, d.space)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { s.Close() })
			draft, err := s.Draft("acme")
			if err != nil {
				return nil, nil, err
			}
			return draft, draft.Drop, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, err := draft(t.TempDir(), &disk{}); !fault.Is(err, fault.DiskFull) {
				t.Errorf("begun without room: %v, want %s", err, fault.DiskFull)
			}
			for _, piece := range []int{1000, 256 << 10, 3 << 20} {
				dir := t.TempDir()
				d, drop, err := draft(dir, &disk{room: room})
				if err != nil {
					t.Fatal(err)
				}
				written, err := pour(d, piece)
				drop()
				if !fault.Is(err, fault.DiskFull) || written > room || written == 0 {
					t.Errorf("in pieces of %d: %d bytes of %d were written, then %v", piece, written, room, err)
				}
				if left := files(t, dir); len(left) != 0 {
					t.Errorf("in pieces of %d: %v is left", piece, left)
				}
			}
		})
	}
}

// files are all regular files below a directory.
func files(t *testing.T, dir string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			all = append(all, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}
