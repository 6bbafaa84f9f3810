// Package unpack turns one layer of a container image, a tar that anybody may have made, into a directory that an overlay
// can have as a lower layer. It runs as a process of its own that has nothing but that directory: no privilege outside, no
// other file, no network. It knows no registry and no sandbox.
package unpack

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/diskspace"
	"github.com/covehq/cove/internal/fault"
)

// Request is a layer to unpack.
type Request struct {
	DiffID   string `json:"diff_id"`   // sha256:… of the tar without compression; anything else is not kept
	MaxBytes int64  `json:"max_bytes"` // of all its files together
	MaxFiles int    `json:"max_files"`
	KeepFree int64  `json:"keep_free,omitempty"` // bytes of the file system that the layer leaves free
}

// Result is what came out of a layer.
type Result struct {
	Bytes   int64 `json:"bytes"`             // of its files
	Files   int   `json:"files"`             // of any kind
	Skipped int   `json:"skipped,omitempty"` // device nodes below /dev, which a sandbox has of its own
	Nobodys int   `json:"nobodys,omitempty"` // files of ids that no sandbox has, which belong to nobody now
}

// unpacker is one layer being unpacked. It works by descriptors below its root and follows no link that leads out of it.
type unpacker struct {
	tree    tree
	request Request
	result  Result
	times   map[string]unix.Timespec // of directories, which change while files are put into them
	far     map[uint64]int           // bytes from the root to a directory, by inode: links make names shorter than that
	buffer  []byte
	room    int64 // bytes that may be written before the free space is looked at again
}

// copySize is how much of a file is written at once.
const copySize = 256 << 10

// Layer unpacks what blob holds into the directory root, which is empty. The process's umask is to be zero.
func Layer(ctx context.Context, root int, blob io.Reader, r Request) (Result, error) {
	u := &unpacker{tree: newTree(root), request: r, times: map[string]unix.Timespec{}, far: map[uint64]int{}, buffer: make([]byte, copySize)}
	defer u.tree.close()
	s, err := openStream(ctx, blob, r.streamBound())
	if err != nil {
		return Result{}, err
	}
	defer s.close()
	if err := u.entries(tar.NewReader(s)); err != nil {
		return Result{}, s.explain(err)
	}
	digest, err := s.digest()
	if err != nil {
		return Result{}, s.explain(err)
	}
	if digest != r.DiffID {
		return Result{}, fault.New(fault.Invalid, "the layer is %s, not %s as its image says: it was changed or is broken", digest, r.DiffID)
	}
	u.setTimes()
	return u.result, nil
}

// streamBound is how long a tar can be that keeps to the request: a name takes some blocks, and padding is bounded.
func (r Request) streamBound() int64 {
	const perFile, slack = 8 << 10, 64 << 20
	return r.MaxBytes + int64(r.MaxFiles)*perFile + slack
}

// entries unpacks to the end of the archive.
func (u *unpacker) entries(in *tar.Reader) error {
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) { // names are looked at below
			return broken{err}
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		if err := u.entry(h, in); err != nil {
			return u.explain(h, err)
		}
	}
}

// explain says which entry failed; sentences of our own say it already.
func (u *unpacker) explain(h *tar.Header, err error) error {
	var told *fault.Error
	var cut broken
	switch {
	case errors.As(err, &told), errors.As(err, &cut):
		return err
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fault.Wrap(fault.DiskFull, err, "the server's disk is full: a layer of the image does not fit")
	case errors.Is(err, unix.EXDEV), errors.Is(err, unix.ELOOP):
		return refused(h, "lies behind a link that leads out of the layer")
	case errors.Is(err, unix.ENOTDIR):
		return refused(h, "lies below something that is no directory")
	case errors.Is(err, unix.ENAMETOOLONG):
		return refused(h, "has a name that is too long")
	}
	return fmt.Errorf("entry %.200q: %w", h.Name, err)
}

func refused(h *tar.Header, why string, args ...any) error {
	return fault.New(fault.Invalid, "the layer cannot be used: its entry %.200q "+why, append([]any{h.Name}, args...)...)
}

// Bounds of names; the kernel's are 255 and 4095, and the directory that a layer lies in has a path of its own.
const (
	maxName = 255
	maxPath = 3600
	maxFar  = 3000 // of a directory from the root, whatever the names say by which it is reached
)

// place is where an entry belongs: below the root, without "." and empty names. The root itself is "".
func place(h *tar.Header, name string) (string, error) {
	if strings.IndexByte(name, 0) >= 0 {
		return "", refused(h, "has a name with a NUL byte")
	}
	clean := make([]string, 0, 16)
	length := 0
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
			continue
		case part == "..":
			return "", refused(h, "names a place outside of the layer")
		case len(part) > maxName:
			return "", refused(h, "has a name of more than %d bytes", maxName)
		}
		clean = append(clean, part)
		if length += len(part) + 1; length > maxPath {
			return "", refused(h, "has a path of more than %d bytes", maxPath)
		}
	}
	return strings.Join(clean, "/"), nil
}

func split(at string) (dir, base string) {
	i := strings.LastIndexByte(at, '/')
	if i < 0 {
		return "", at
	}
	return at[:i], at[i+1:]
}

// count notes one more file and the space that it takes besides its content.
func (u *unpacker) count() error {
	if u.result.Files++; u.result.Files > u.request.MaxFiles {
		return fault.New(fault.Exhausted, "the layer has more than %d files, which is the limit", u.request.MaxFiles)
	}
	return u.space(blockBytes)
}

// charge notes the bytes of a file before any of them is read.
func (u *unpacker) charge(n int64) error {
	if n < 0 || n > u.request.MaxBytes-u.result.Bytes {
		return fault.New(fault.Exhausted, "the layer holds more than %d bytes, which is the limit", u.request.MaxBytes)
	}
	u.result.Bytes += n
	return nil
}

// Free space is looked at whenever so many bytes more are written; a file takes a block at least.
const (
	spaceStep  = 1 << 20
	blockBytes = 4 << 10
)

// space refuses to write so many bytes where less would stay free than the request says, or where
// the file system is short of inodes.
func (u *unpacker) space(n int64) error {
	if u.room >= n || u.request.KeepFree == 0 {
		u.room -= n
		return nil
	}
	var st unix.Statfs_t
	if _, err := retry(func() (int, error) { return 0, unix.Fstatfs(u.tree.root, &st) }); err != nil {
		return fmt.Errorf("look at the disk's free space: %w", err)
	}
	if err := diskspace.CheckFiles(st.Files, st.Ffree); err != nil {
		return err
	}
	more := max(n, spaceStep)
	if free := int64(st.Bavail) * st.Bsize; free-more < u.request.KeepFree {
		why := fmt.Errorf("%d bytes are free, and %d are kept free", free, u.request.KeepFree)
		return fault.Wrap(fault.DiskFull, why, "the server's disk is full: a layer of the image does not fit")
	}
	u.room = more - n
	return nil
}

// setTimes gives directories their times when nothing is put into them any more. One that was replaced meanwhile has none.
func (u *unpacker) setTimes() {
	for at, mtime := range u.times {
		fd, err := u.tree.open(at, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW)
		if err != nil {
			continue
		}
		setTime(fd, mtime)
		_ = unix.Close(fd)
	}
}
