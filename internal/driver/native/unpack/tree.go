package unpack

import (
	"errors"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// tree is the directory that a layer is unpacked into, with some of its directories open: the entries of a tar mostly come
// sorted by directory, and each lookup by path would walk it again.
type tree struct {
	root  int
	dirs  map[string]int
	order []string // of dirs, the one used last at the end
}

const maxOpen = 64

func newTree(root int) tree { return tree{root: root, dirs: map[string]int{}} }

func (t *tree) close() {
	for _, fd := range t.dirs {
		_ = unix.Close(fd)
	}
	clear(t.dirs)
	t.order = t.order[:0]
}

// open opens a place below the root. Links on the way are followed as long as they stay below it: EXDEV says that one did not.
func (t *tree) open(at string, flags uint64) (int, error) {
	if at == "" {
		at = "."
	}
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS}
	// A ".." in a link is not followed while somebody on this host mounts something.
	for range 1000 {
		fd, err := retry(func() (int, error) { return unix.Openat2(t.root, at, &how) })
		if !errors.Is(err, unix.EAGAIN) {
			return fd, err
		}
	}
	return -1, unix.EAGAIN
}

// dir is a directory that is there; the tree closes it.
func (t *tree) dir(at string) (int, error) {
	if at == "" {
		return t.root, nil
	}
	if fd, ok := t.dirs[at]; ok {
		t.touch(at)
		return fd, nil
	}
	fd, err := t.open(at, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return -1, err
	}
	if len(t.order) == maxOpen {
		oldest := t.order[0]
		_ = unix.Close(t.dirs[oldest])
		delete(t.dirs, oldest)
		t.order = append(t.order[:0], t.order[1:]...)
	}
	t.dirs[at], t.order = fd, append(t.order, at)
	return fd, nil
}

// touch keeps the directories that were asked for last open: who needs two has both.
func (t *tree) touch(at string) {
	last := len(t.order) - 1
	if t.order[last] == at {
		return
	}
	i := slices.Index(t.order, at)
	copy(t.order[i:], t.order[i+1:])
	t.order[last] = at
}

// remove removes a file, or a directory with everything in it. Where a name led may be elsewhere after that, so nothing but
// the directory that it was in stays open.
func (t *tree) remove(parent int, base string) error {
	err := unix.Unlinkat(parent, base, 0)
	if err == nil || !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		t.forget(parent)
		return err
	}
	t.forget(parent)
	return removeAll(parent, base)
}

// forget closes every directory but one.
func (t *tree) forget(but int) {
	kept := t.order[:0]
	for _, at := range t.order {
		if t.dirs[at] == but {
			kept = append(kept, at)
			continue
		}
		_ = unix.Close(t.dirs[at])
		delete(t.dirs, at)
	}
	t.order = kept
}

func removeAll(parent int, base string) error {
	fd, err := unix.Openat(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	dir := os.NewFile(uintptr(fd), base)
	names, err := dir.Readdirnames(-1)
	if err == nil {
		err = removeEach(fd, names)
	}
	if err := errors.Join(err, dir.Close()); err != nil {
		return err
	}
	return unix.Unlinkat(parent, base, unix.AT_REMOVEDIR)
}

func removeEach(dir int, names []string) error {
	for _, name := range names {
		err := unix.Unlinkat(dir, name, 0)
		if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) {
			err = removeAll(dir, name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// kindOf is the kind of a file, of a link itself.
func kindOf(parent int, base string) (uint32, error) {
	var st unix.Stat_t
	err := unix.Fstatat(parent, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	return st.Mode & unix.S_IFMT, err
}

// setOpaque marks a directory that hides the one below it.
func setOpaque(parent int, base string) error {
	fd, err := unix.Openat(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fsetxattr(fd, opaqueMark, []byte("y"), 0)
}

// setTime sets when an open file was changed. A time that the file system cannot have is left as it is.
func setTime(fd int, mtime unix.Timespec) {
	times := [2]unix.Timespec{mtime, mtime}
	_, _, _ = unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&times)), 0, 0, 0)
}

// retry does a call again that a signal interrupted.
func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
