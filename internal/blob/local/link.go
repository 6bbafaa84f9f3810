package local

import (
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/dataset"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
)

// Shelf keeps blobs that are seen under names of their own in directories: each name is a hard link, so however many
// directories show a blob, it has one inode and one place in the page cache.
//
//	blobs/…                as in Store, readable by everybody
//	sessions/DIR/FILE      a blob again
type Shelf struct {
	blobs *Store
	dirs  string

	mu    sync.Mutex
	heavy map[artifact.Ref]int64 // sizes of blobs that no directory shows and somebody has open
}

var _ dataset.Blobs = (*Shelf)(nil)

// OpenShelf opens the directory, or makes it, and removes what a server that died was writing. Blobs ask for space.
func OpenShelf(dir string, space diskspace.Check) (*Shelf, error) {
	s := &Shelf{dirs: filepath.Join(dir, "sessions"), heavy: map[artifact.Ref]int64{}}
	if err := os.MkdirAll(s.dirs, 0o755); err != nil {
		return nil, fmt.Errorf("open datasets: %w", err)
	}
	// What others read is a link to the same inode: hence the mode.
	blobs, err := Open(filepath.Join(dir, "blobs"), Options{File: 0o444, Dir: 0o700, Space: space})
	if err != nil {
		return nil, err
	}
	s.blobs = blobs
	return s, nil
}

// Close lets go of the directory.
func (s *Shelf) Close() error { return s.blobs.Close() }

// Draft begins a blob.
func (s *Shelf) Draft(tenant string) (dataset.Draft, error) {
	d, err := s.blobs.draft(tenant)
	if err != nil {
		return nil, err
	}
	// It is never made under its name: whoever finds it there takes it for whole and shows it to others.
	if err := d.spill(); err != nil {
		return nil, err
	}
	return shelved{d}, nil
}

type shelved struct{ *draft }

func (d shelved) Settle() (string, int64, error) {
	if err := d.file.Sync(); err != nil {
		return "", 0, full(fmt.Errorf("sync blob: %w", err))
	}
	return d.Sum(), d.Size(), nil
}

// Keep leaves a blob that is there alone: those who see it share one inode with those who come.
func (d shelved) Keep() error {
	if _, there := d.store.Has(d.tenant, d.Sum()); there {
		d.Drop()
		return nil
	}
	_, err := d.Place()
	return err
}

// Size is that of a blob that is there.
func (s *Shelf) Size(tenant, sum string) (int64, error) {
	size, there := s.blobs.Has(tenant, sum)
	if !there {
		return 0, fault.New(fault.NotFound, "there is no content with the SHA-256 %.80s here: send it", sum)
	}
	return size, nil
}

var plainName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._:@=+-]{0,127}$`)

// at is the place of a directory, or of a name in it. Whoever asks has checked them; nothing rests on that.
func (s *Shelf) at(names ...string) (string, error) {
	for _, name := range names {
		if !plainName.MatchString(name) {
			return "", fault.New(fault.Invalid, "%.140q is no name", name)
		}
	}
	return filepath.Join(append([]string{s.dirs}, names...)...), nil
}

// MakeDir makes a directory, if it is not there.
func (s *Shelf) MakeDir(dir string) error {
	path, err := s.at(dir)
	if err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return full(fmt.Errorf("make directory of datasets: %w", err))
	}
	return os.Chmod(path, 0o755) // whatever the umask is: a sandbox is nobody here
}

// Dirs are all directories.
func (s *Shelf) Dirs() ([]string, error) {
	return names(s.dirs)
}

// Shown are the names in a directory.
func (s *Shelf) Shown(dir string) ([]string, error) {
	path, err := s.at(dir)
	if err != nil {
		return nil, err
	}
	return names(path)
}

func names(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list datasets: %w", err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all, nil
}

// RemoveDir removes a directory with its links.
func (s *Shelf) RemoveDir(dir string) error {
	path, err := s.at(dir)
	if err != nil {
		return err
	}
	if err := os.RemoveAll(path); err != nil {
		return fmt.Errorf("remove directory of datasets: %w", err)
	}
	return nil
}

// hidden begins the name that a link has before it takes the place of another.
const hidden = ".new-"

// Show links a blob into a directory, in one step over what has that name.
func (s *Shelf) Show(dir, file, tenant, sum string) error {
	blob, err := s.blobs.path(tenant, sum)
	if err != nil {
		return err
	}
	to, err := s.at(dir, file)
	if err != nil {
		return err
	}
	if same(blob, to) {
		return nil
	}
	temp := filepath.Join(filepath.Dir(to), hidden+file)
	_ = os.Remove(temp) // of a server that died
	if err := os.Link(blob, temp); err != nil {
		return whyNotLinked(err, filepath.Dir(to))
	}
	if err := os.Rename(temp, to); err != nil {
		return full(fmt.Errorf("show dataset: %w", err))
	}
	s.forget(artifact.Ref{Tenant: tenant, SHA256: sum})
	return nil
}

func whyNotLinked(err error, dir string) error {
	if _, missing := os.Lstat(dir); errors.Is(missing, fs.ErrNotExist) {
		return fault.Wrap(fault.Conflict, err, "the session has no place for datasets: open it again, with datasets that come by the API")
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fault.Wrap(fault.NotFound, err, "the content of the dataset is gone: send it again")
	case errors.Is(err, syscall.EMLINK):
		return fault.Wrap(fault.Exhausted, err, "as many sessions have this content as the server's file system can count: remove sessions that are not used any more")
	}
	return full(fmt.Errorf("show dataset: %w", err))
}

// same tells whether two names are one file; a rename from one to the other would do nothing.
func same(a, b string) bool {
	one, err := os.Lstat(a)
	other, err2 := os.Lstat(b)
	return err == nil && err2 == nil && os.SameFile(one, other)
}

// Hide takes a name out of a directory.
func (s *Shelf) Hide(dir, file string) error {
	to, err := s.at(dir)
	if err != nil {
		return err
	}
	if !plainName.MatchString(strings.TrimPrefix(file, hidden)) {
		return fault.New(fault.Invalid, "%.140q is no name", file)
	}
	if err := os.Remove(filepath.Join(to, file)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("hide dataset: %w", err)
	}
	return nil
}

// Release removes a blob, unless a directory shows it or somebody who saw it has it open still: its bytes would stay on the disk
// and count nowhere. Nobody keeps or shows it meanwhile.
func (s *Shelf) Release(tenant, sum string) error {
	path, err := s.blobs.path(tenant, sum)
	if err != nil {
		return err
	}
	info, err := os.Lstat(path)
	if err != nil || info.Sys().(*syscall.Stat_t).Nlink > 1 {
		return nil
	}
	ref := artifact.Ref{Tenant: tenant, SHA256: sum}
	if inUse(path) {
		s.linger(ref, info.Size())
		return nil
	}
	s.forget(ref)
	return s.blobs.Remove(tenant, sum)
}

// linger notes the size of a blob that no directory shows and that a process still has open.
func (s *Shelf) linger(r artifact.Ref, size int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.heavy[r] = size
}

// forget drops what linger noted: the blob is shown again, or it is removed.
func (s *Shelf) forget(r artifact.Ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.heavy, r)
}

// Lingering is the size and the number of a tenant's contents that nothing shows any more and that
// are on the disk still.
func (s *Shelf) Lingering(tenant string) (bytes int64, files int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r, n := range s.heavy {
		if r.Tenant == tenant {
			bytes += n
			files++
		}
	}
	return bytes, files
}

// All are all contents.
func (s *Shelf) All() iter.Seq2[artifact.Ref, error] { return s.blobs.All() }
