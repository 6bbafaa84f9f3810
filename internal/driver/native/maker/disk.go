package maker

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/sandbox"
)

// disks makes a sandbox's own layer as a small file system of its own, so that it has an end: a sparse image file
// behind a loop device. The file has no name and the loop device clears itself, so whatever happens to the maker,
// nothing is left on the host. Project quotas would be cheaper, but few hosts' kernels and file systems have them on.
type disks struct {
	dir     string
	mark    string // on every loop device: whose it is
	reflink bool   // the host's file system copies by reference: a copy of any size is instant

	mu      sync.Mutex
	masters map[master]*os.File    // of the sizes asked for last; none has a name
	named   map[string]*frozenDisk // images of templates that somebody uses, by path
}

// maxMasters bounds what callers who choose their own sizes can make the maker hold.
const maxMasters = 16

// master is an empty file system that images are copied from: its few hundred kilobytes of metadata.
type master struct {
	bytes   int64
	journal bool
}

// disk is the own layer of one sandbox.
type disk struct {
	disks   *disks
	image   *os.File // without a name
	root    *os.File // its topmost directory, by which the file system as a whole is asked and told
	size    int64
	journal bool
	owns    bool       // the image that it is made from
	forking sync.Mutex // held while somebody outside the sandbox's cgroup may write to it
	hurried bool       // it is read and written through the host's cache until settle
	device  string
	empty   int64         // bytes that the file system uses for itself
	below   []*frozenDisk // layers between it and the template's, uppermost first; held

	copying sync.Mutex // a file system freezes once at a time, and is not let go of meanwhile
	closed  bool
}

func openDisks(dir string) (*disks, error) {
	// Named files are of an earlier maker, whose sandboxes are gone.
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return &disks{dir: dir, mark: markOf(dir), reflink: canReflink(dir) == nil, masters: map[master]*os.File{}, named: map[string]*frozenDisk{}}, nil
}

// make gives a disk for so many trees and its mount, which is attached nowhere and holds a directory with u and w for each.
func (d *disks) make(f form, trees int) (_ *disk, mount *os.File, err error) {
	want := master{f.disk, f.storage == sandbox.StorageDurable}
	made := &disk{disks: d, size: want.bytes, journal: want.journal}
	copied := f.from != nil && (d.reflink || f.from.bytes <= smallLayer)
	var content *os.File
	switch {
	case copied:
		made.size, made.journal, made.empty, made.below = f.from.size, f.from.journal, f.from.empty, holdAll(f.from.below)
		content, made.owns, made.hurried = f.from.image, f.owns, f.hurried
	default:
		if content, err = d.master(want); err != nil {
			return nil, nil, err
		}
		defer content.Close()
		if f.from != nil {
			made.below = append(holdAll([]*frozenDisk{f.from}), holdAll(f.from.below)...)
		}
	}
	if mount, err = made.fill(content); err != nil {
		made.close()
		return nil, nil, err
	}
	if copied {
		err = forgetVolatile(made.root, trees)
	} else {
		made.empty, err = usedBytes(made.root)
	}
	if err != nil {
		mount.Close()
		made.close()
		return nil, nil, err
	}
	return made, mount, nil
}

// fill gives the disk its content, a copy of another image, and mounts it.
func (k *disk) fill(from *os.File) (mount *os.File, err error) {
	if k.image, err = k.content(from); err != nil {
		return nil, err
	}
	flags := uint32(unix.LO_FLAGS_DIRECT_IO)
	if k.hurried {
		flags = 0 // it was just written, and reading past the host's cache would wait for the host's disk
	}
	loop, err := attachLoop(k.image, k.disks.mark, flags)
	if err != nil {
		return nil, err
	}
	k.device = loop.Name()
	// The mount keeps the device; the device clears itself when the last user is gone.
	defer loop.Close()
	var options []string
	if !k.journal {
		options = []string{"nobarrier"} // nothing of it outlives its sandbox, so the host's disk need not be waited for
	}
	if mount, err = mountImage(loop.Name(), options...); err != nil {
		return nil, err
	}
	if k.root, err = openRoot(mount); err != nil {
		mount.Close()
		return nil, err
	}
	return mount, nil
}

// settle ends the hurry: what is cached in the sandbox need not be cached by the host as well. It may wait for the host's
// disk, and so does the sandbox that writes meanwhile.
func (k *disk) settle() {
	k.copying.Lock()
	defer k.copying.Unlock()
	if !k.hurried || k.closed {
		return
	}
	loop, err := os.OpenFile(k.device, os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer loop.Close()
	// A comfort: without it there are two caches.
	_ = unix.IoctlSetInt(int(loop.Fd()), unix.LOOP_SET_DIRECT_IO, 1)
}

// content is a copy of an image, or that image itself when the disk has become its owner.
func (k *disk) content(from *os.File) (*os.File, error) {
	if !k.owns {
		return copyImage(k.disks.dir, from, k.size)
	}
	fd, err := unix.FcntlInt(from.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "image"), nil
}

// close lets go of the disk, when nobody copies it any more; its space is free when its last mount is gone too.
func (k *disk) close() {
	k.copying.Lock()
	defer k.copying.Unlock()
	if k.closed {
		return
	}
	k.closed = true
	for _, f := range []*os.File{k.image, k.root} {
		if f != nil {
			f.Close()
		}
	}
	closeAll(k.below)
}

// bytes is what the sandbox has written and not deleted.
func (k *disk) bytes() int64 {
	used, err := usedBytes(k.root)
	if err != nil {
		return 0
	}
	return max(used-k.empty, 0)
}

func usedBytes(root *os.File) (int64, error) {
	var st unix.Statfs_t
	err := hold(root, func(fd int) error { return unix.Fstatfs(fd, &st) })
	return int64(st.Blocks-st.Bfree) * st.Bsize, err
}

// hold gives a descriptor's number to f, and keeps it from being closed and used for something else meanwhile.
func hold(file *os.File, f func(fd int) error) error {
	return wire.Hold([]*os.File{file}, func(fds []int) error { return f(fds[0]) })
}

// openRoot opens the topmost directory of a mount: the descriptor of a mount itself takes no ioctl.
func openRoot(mount *os.File) (*os.File, error) {
	fd, err := unix.Openat(int(mount.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open disk: %w", err)
	}
	return os.NewFile(uintptr(fd), "disk"), nil
}

// forgetVolatile removes the mark that a volatile overlay leaves in its work directory, which no sandbox sees: the next
// overlay on a copy of it would be refused, since a crash might have lost something. Ours was synced and frozen.
func forgetVolatile(root *os.File, trees int) error {
	for i := range trees {
		marks := filepath.Join(strconv.Itoa(i), "w/work/incompat")
		for _, left := range []struct {
			name  string
			flags int
		}{{"volatile/dirty", 0}, {"volatile", unix.AT_REMOVEDIR}, {"", unix.AT_REMOVEDIR}} {
			at := filepath.Join(marks, left.name)
			if err := unix.Unlinkat(int(root.Fd()), at, left.flags); err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("clear %s: %w", at, err)
			}
		}
	}
	return nil
}

// master returns a descriptor of the caller's own.
func (d *disks) master(want master) (*os.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f := d.masters[want]
	if f == nil {
		var err error
		if f, err = d.makeMaster(want); err != nil {
			return nil, err
		}
		for old, file := range d.masters {
			if len(d.masters) < maxMasters {
				break
			}
			file.Close()
			delete(d.masters, old)
		}
		d.masters[want] = f
	}
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

func (d *disks) makeMaster(want master) (*os.File, error) {
	skeleton, err := os.MkdirTemp(d.dir, "skeleton")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(skeleton)
	if err := os.Chmod(skeleton, 0o755); err != nil {
		return nil, err
	}
	for i := range maxTrees {
		for _, leaf := range []string{"u", "w"} {
			if err := os.MkdirAll(filepath.Join(skeleton, strconv.Itoa(i), leaf), 0o755); err != nil {
				return nil, err
			}
		}
	}
	path := filepath.Join(d.dir, fmt.Sprintf("master-%d-%t", want.bytes, want.journal))
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	defer os.Remove(path) // only mkfs needs a name
	if err := f.Truncate(want.bytes); err != nil {
		f.Close()
		return nil, err
	}
	// Without blocks in reserve for a larger size: they are zeros, and four fifths of what every image is copied from.
	features := "^resize_inode,^has_journal"
	if want.journal {
		features = "^resize_inode,has_journal"
	}
	// -E root_owner: the image is idmapped, so 0 on disk is the sandbox's root. lazy_itable_init leaves the inode
	// tables as holes; the mount says noinit_itable so that the kernel does not fill them in either.
	out, err := exec.Command("mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-i", "16384", "-O", features,
		"-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0", "-d", skeleton, path).CombinedOutput()
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("mkfs.ext4 (package e2fsprogs): %w: %s", err, out)
	}
	return f, nil
}

// nameless makes a file that is gone with its last descriptor.
func nameless(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make image: %w", err)
	}
	return os.NewFile(uintptr(fd), "image"), nil
}

// copyImage makes a nameless image with another's data and its holes.
func copyImage(dir string, from *os.File, size int64) (*os.File, error) {
	image, err := nameless(dir)
	if err != nil {
		return nil, err
	}
	if err := copyInto(image, from, size); err != nil {
		image.Close()
		return nil, err
	}
	return image, nil
}

func copyInto(image, from *os.File, size int64) error {
	if unix.IoctlFileClone(int(image.Fd()), int(from.Fd())) == nil {
		return nil
	}
	if err := image.Truncate(size); err != nil {
		return err
	}
	if err := copyData(image, from, size); err != nil {
		return fmt.Errorf("copy image: %w", spaceless(err))
	}
	return nil
}

func copyData(to, from *os.File, size int64) error {
	for at := int64(0); at < size; {
		start, err := unix.Seek(int(from.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(int(from.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if _, err := io.Copy(io.NewOffsetWriter(to, start), io.NewSectionReader(from, start, end-start)); err != nil {
			return err
		}
		at = end
	}
	return nil
}

// markOf names the loop devices of one directory. The path of their files would not do: once the mount namespace of the
// maker that opened them is gone, it is another.
func markOf(dir string) string {
	sum := sha256.Sum256([]byte(dir))
	return "cove-" + hex.EncodeToString(sum[:16])
}

// attachLoop puts an image behind a free loop device that clears itself.
func attachLoop(image *os.File, mark string, flags uint32) (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	for attempt := range 64 {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a loop device: %w", err)
		}
		loop, err := os.OpenFile("/dev/loop"+strconv.Itoa(number), os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		config := unix.LoopConfig{Fd: uint32(image.Fd()), Size: 4096, Info: unix.LoopInfo64{Flags: flags | unix.LO_FLAGS_AUTOCLEAR}}
		copy(config.Info.File_name[:], mark)
		err = unix.IoctlLoopConfigure(int(loop.Fd()), &config)
		if err == nil {
			return loop, nil
		}
		loop.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("configure loop device: %w", err)
		}
		time.Sleep(time.Duration(attempt) * time.Millisecond) // somebody else took it: ask again
	}
	return nil, errors.New("no loop device is free")
}

// mountImage mounts a device, attached nowhere. A device that is mounted already is mounted once more.
func mountImage(device string, flags ...string) (*os.File, error) {
	fsfd, err := unix.Fsopen("ext4", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fsfd)
	err = unix.FsconfigSetString(fsfd, "source", device)
	for _, flag := range append(flags, "noinit_itable") {
		err = errors.Join(err, unix.FsconfigSetFlag(fsfd, flag))
	}
	if err == nil {
		err = unix.FsconfigCreate(fsfd)
	}
	if err != nil {
		return nil, fmt.Errorf("mount image: %w", err)
	}
	fd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return nil, fmt.Errorf("mount image: %w", err)
	}
	return os.NewFile(uintptr(fd), "disk"), nil
}
