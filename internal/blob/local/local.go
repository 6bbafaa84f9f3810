// Package local keeps blobs as files of a directory, each named by the SHA-256 of its content.
package local

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"iter"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/covehq/cove/internal/artifact"
	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
)

// Options say who may look, and how much of the disk blobs may take.
type Options struct {
	File  fs.FileMode     // of a blob; default 0600
	Dir   fs.FileMode     // of the directories; default 0700
	Space diskspace.Check // before a blob takes more of the disk
}

// Store is a directory of blobs:
//
//	t-TENANT/ab/abcd…   a blob
//	tmp/…               large blobs on their way, worth nothing to anybody but their writer
//
// One level of 256 directories: with a second, almost every small blob would need a directory of its own, which costs more
// to make than the blob.
type Store struct {
	dir     string
	options Options
	root    *os.File
	placing [256]sync.Mutex // of small blobs, by the first byte of their digest
}

var _ artifact.Blobs = (*Store)(nil)

// Open opens the directory, makes it if there is none, and removes what a server that died was writing. Only one process
// has a directory at a time; who opens it makes sure of that.
func Open(dir string, o Options) (*Store, error) {
	o.File, o.Dir = cmp.Or(o.File, 0o600), cmp.Or(o.Dir, 0o700)
	s := &Store{dir: dir, options: o}
	if err := os.RemoveAll(s.temp()); err != nil {
		return nil, fmt.Errorf("open blobs: %w", err)
	}
	if err := os.MkdirAll(s.temp(), o.Dir); err != nil {
		return nil, fmt.Errorf("open blobs: %w", err)
	}
	root, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open blobs: %w", err)
	}
	s.root = root
	return s, nil
}

// Close lets go of the directory.
func (s *Store) Close() error { return s.root.Close() }

func (s *Store) temp() string { return filepath.Join(s.dir, "tmp") }

func (s *Store) space(tenant string) string { return filepath.Join(s.dir, "t-"+url.PathEscape(tenant)) }

// path is where a blob lies.
func (s *Store) path(tenant, sum string) (string, error) {
	if raw, err := hex.DecodeString(sum); err != nil || len(raw) != sha256.Size || strings.ToLower(sum) != sum || tenant == "" {
		return "", fault.New(fault.Invalid, "%.80q is not the SHA-256 of a blob", sum)
	}
	return filepath.Join(s.space(tenant), sum[:2], sum), nil
}

// small is how large a blob may be that is held in memory until its name is known: making its file there at once costs half of
// making it elsewhere and moving it.
const small = 64 << 10

// Draft begins a blob. It fails if the disk has no room for more.
func (s *Store) Draft(tenant string) (artifact.Draft, error) {
	d, err := s.draft(tenant)
	if err != nil {
		return nil, err
	}
	return d, nil
}

func (s *Store) draft(tenant string) (*draft, error) {
	d := &draft{store: s, tenant: tenant, hash: sha256.New(), space: diskspace.NewMeter(s.options.Space)}
	return d, d.space.Begin()
}

type draft struct {
	store  *Store
	tenant string
	held   []byte   // all that was written, while there is no file
	file   *os.File // nil: it is small, or was placed or dropped
	hash   hash.Hash
	size   int64
	space  *diskspace.Meter
}

// spill moves a draft from memory into a file of its own.
func (d *draft) spill() error {
	f, err := os.CreateTemp(d.store.temp(), "")
	if err != nil {
		return full(fmt.Errorf("make blob: %w", err))
	}
	d.file = f
	if _, err := f.Write(d.held); err != nil {
		return full(fmt.Errorf("write blob: %w", err))
	}
	d.held = nil
	return nil
}

func (d *draft) Write(p []byte) (n int, err error) {
	if err := d.space.Take(int64(len(p))); err != nil {
		return 0, err
	}
	if d.file == nil && d.size+int64(len(p)) > small {
		if err := d.spill(); err != nil {
			return 0, err
		}
	}
	if d.file == nil {
		d.held, n = append(d.held, p...), len(p)
	} else {
		n, err = d.file.Write(p)
	}
	d.hash.Write(p[:n])
	d.size += int64(n)
	if err != nil {
		return n, full(fmt.Errorf("write blob: %w", err))
	}
	return n, nil
}

func (d *draft) Sum() string { return hex.EncodeToString(d.hash.Sum(nil)) }

func (d *draft) Size() int64 { return d.size }

// Place puts the blob under its name. One that is there stays, since it may be on the disk already, which this one is not; one
// that was damaged is replaced, and whoever reads it reads on.
func (d *draft) Place() (existed bool, err error) {
	defer d.Drop()
	digest := d.hash.Sum(nil)
	sum := hex.EncodeToString(digest)
	to, err := d.store.path(d.tenant, sum)
	if err != nil {
		return false, err
	}
	put := d.move
	if d.file == nil {
		// Whoever places the same bytes waits: what is being written here would look damaged.
		turn := &d.store.placing[digest[0]]
		turn.Lock()
		defer turn.Unlock()
		put = d.create
	}
	err = put(to)
	if errors.Is(err, fs.ErrNotExist) { // the first of its directory
		if err = os.MkdirAll(filepath.Dir(to), d.store.options.Dir); err == nil {
			err = put(to)
		}
	}
	if errors.Is(err, fs.ErrExist) {
		if is(to, sum, d.size) {
			return true, nil
		}
		existed, err = true, d.replace(to)
	}
	if err != nil {
		return false, full(fmt.Errorf("place blob: %w", err))
	}
	return existed, nil
}

// create writes a small blob under its name, unless there is one: fs.ErrExist. A server that is killed meanwhile leaves a part of
// it there, which no artifact names: so it is swept, or replaced by whoever places the whole.
func (d *draft) create(to string) error {
	f, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, d.store.options.File)
	if err != nil {
		return err
	}
	_, err = f.Write(d.held)
	if err == nil {
		err = d.mode(f)
	}
	f.Close() // what it could tell, Sync does
	if err != nil {
		_ = os.Remove(to) // it is nobody's yet
	}
	return err
}

// move gives a large blob its name, unless another has it: fs.ErrExist.
func (d *draft) move(to string) error {
	if err := d.mode(d.file); err != nil {
		return err
	}
	if err := rename(d.file.Name(), to); err != nil {
		return err
	}
	d.placed()
	return nil
}

// replace puts the blob in the place of another, in one step and on the disk before.
func (d *draft) replace(to string) error {
	if d.file == nil {
		if err := d.spill(); err != nil {
			return err
		}
	}
	if err := errors.Join(d.mode(d.file), d.file.Sync(), os.Rename(d.file.Name(), to)); err != nil {
		return err
	}
	d.placed()
	return nil
}

func (d *draft) mode(f *os.File) error {
	if d.store.options.File == 0o600 {
		return nil
	}
	return f.Chmod(d.store.options.File)
}

// placed lets go of a file that has its name.
func (d *draft) placed() {
	d.file.Close() // what it could tell, Sync does
	d.file = nil
}

// is tells whether a file has the bytes of a blob.
func is(path, sum string, size int64) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || info.Size() != size {
		return false
	}
	has := sha256.New()
	_, err = io.Copy(has, f)
	return err == nil && hex.EncodeToString(has.Sum(nil)) == sum
}

// over is rename for a file system that cannot tell.
func over(from, to string) error {
	if _, err := os.Lstat(to); err == nil {
		return fs.ErrExist
	}
	return os.Rename(from, to)
}

func (d *draft) Drop() {
	d.held = nil
	if d.file == nil {
		return
	}
	d.file.Close()
	_ = os.Remove(d.file.Name()) // one that stays is removed at the next start
	d.file = nil
}

// Sync returns when everything that was placed outlives a loss of power. It waits for all that is dirty in the file system,
// whosever it is, so nobody who is in a hurry calls it.
func (s *Store) Sync(context.Context) error { return s.syncAll() }

// Open opens a blob; one that is not there is fault.Gone.
func (s *Store) Open(tenant, sum string) (artifact.Blob, error) {
	path, err := s.path(tenant, sum)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fault.Wrap(fault.Gone, err, "the content is not stored here any more")
	}
	if err != nil {
		return nil, fmt.Errorf("open blob: %w", err)
	}
	return blob{f}, nil
}

// blob is an open file.
type blob struct{ *os.File }

func (b blob) Mark() (string, error) {
	info, err := b.Stat()
	if err != nil {
		return "", err
	}
	return mark(info), nil
}

// Has tells whether a blob is there, and its size.
func (s *Store) Has(tenant, sum string) (size int64, ok bool) {
	path, err := s.path(tenant, sum)
	if err != nil {
		return 0, false
	}
	info, err := os.Lstat(path)
	if err != nil || !info.Mode().IsRegular() {
		return 0, false
	}
	return info.Size(), true
}

// Remove removes a blob; one that is not there is removed already.
func (s *Store) Remove(tenant, sum string) error {
	path, err := s.path(tenant, sum)
	if err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove blob: %w", err)
	}
	return nil
}

// All are the blobs of all tenants.
func (s *Store) All() iter.Seq2[artifact.Ref, error] {
	return func(yield func(artifact.Ref, error) bool) {
		err := filepath.WalkDir(s.dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				if errors.Is(err, fs.ErrNotExist) {
					return nil // removed while we look
				}
				return err
			}
			if path == s.temp() {
				return filepath.SkipDir
			}
			r, ok := s.ref(path, e)
			if ok && !yield(r, nil) {
				return fs.SkipAll
			}
			return nil
		})
		if err != nil {
			yield(artifact.Ref{}, fmt.Errorf("list blobs: %w", err))
		}
	}
}

// ref reads a path backwards.
func (s *Store) ref(path string, e fs.DirEntry) (r artifact.Ref, ok bool) {
	if !e.Type().IsRegular() {
		return r, false
	}
	rel, err := filepath.Rel(s.dir, path)
	if err != nil {
		return r, false
	}
	parts := strings.Split(rel, "/")
	if len(parts) != 3 || !strings.HasPrefix(parts[0], "t-") {
		return r, false
	}
	tenant, err := url.PathUnescape(strings.TrimPrefix(parts[0], "t-"))
	if err != nil {
		return r, false
	}
	r = artifact.Ref{Tenant: tenant, SHA256: parts[2]}
	want, err := s.path(r.Tenant, r.SHA256)
	return r, err == nil && want == path
}
