package maker

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Bounds of removeTree: directories that are open at once, and names that are read at once.
const (
	removeLevels = 32
	removeNames  = 1024
)

// removeTree removes a directory with everything in it, or a file. Strangers say how deep a layer is, and a maker that runs out
// of descriptors serves nobody: so what lies deep is moved to the top and removed from there. No link is followed.
func removeTree(path string) error {
	parent, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return gone(&os.PathError{Op: "open", Path: filepath.Dir(path), Err: err})
	}
	defer unix.Close(parent)
	base := filepath.Base(path)
	err = unix.Unlinkat(parent, base, 0)
	if !errors.Is(err, unix.EISDIR) {
		return gone(err)
	}
	top, err := openDirAt(parent, base)
	if err != nil {
		return gone(err)
	}
	defer top.Close()
	r := remover{top: int(top.Fd())}
	for again := true; again; again = r.moved {
		r.moved = false
		if _, err := top.Seek(0, io.SeekStart); err != nil {
			return err
		}
		if err := r.empty(top, 1); err != nil {
			return fmt.Errorf("remove %s: %w", path, err)
		}
	}
	return gone(unix.Unlinkat(parent, base, unix.AT_REMOVEDIR))
}

// gone takes what is not there for removed.
func gone(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

func openDirAt(parent int, base string) (*os.File, error) {
	fd, err := unix.Openat(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open directory: %w", err) // its name may be anything
	}
	return os.NewFile(uintptr(fd), "directory"), nil
}

// remover empties a tree; moved says that something deep lies at its top now.
type remover struct {
	top   int
	moved bool
	count int
}

// empty removes what is in a directory. Only who has seen no name in it knows that it is empty: names come and go while they
// are read.
func (r *remover) empty(dir *os.File, level int) error {
	for {
		seen := false
		for {
			names, err := dir.Readdirnames(removeNames)
			for _, name := range names {
				seen = true
				if err := r.remove(int(dir.Fd()), name, level); err != nil {
					return err
				}
			}
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
		}
		if !seen {
			return nil
		}
		if _, err := dir.Seek(0, io.SeekStart); err != nil {
			return err
		}
	}
}

func (r *remover) remove(parent int, name string, level int) error {
	err := unix.Unlinkat(parent, name, 0)
	if !errors.Is(err, unix.EISDIR) {
		return gone(err)
	}
	if level == removeLevels {
		r.moved = true
		r.count++
		// The layer's own names cannot be foreseen, nor ours by who made it.
		return unix.Renameat2(parent, name, r.top, fmt.Sprintf(".deep-%d-%s", r.count, rand.Text()), unix.RENAME_NOREPLACE)
	}
	dir, err := openDirAt(parent, name)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := r.empty(dir, level+1); err != nil {
		return err
	}
	return gone(unix.Unlinkat(parent, name, unix.AT_REMOVEDIR))
}
