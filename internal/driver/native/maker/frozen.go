package maker

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/driver/native/wire"
	"github.com/covehq/cove/internal/fault"
)

// frozenDisk is a sandbox's disk as it was at one moment. Nobody writes to it any more and many may use it; it is gone
// with its last user.
type frozenDisk struct {
	disks   *disks
	name    string // of a template's image; empty: it has none
	image   *os.File
	loop    *os.File // a device that shows the image already; nil: none
	size    int64
	bytes   int64 // that a copy would have to write
	journal bool
	work    int  // which of the work directories was in use
	marked  bool // the other one was still marked
	empty   int64
	below   []*frozenDisk // what lay below the disk, uppermost first; held

	users int // guarded by disks.mu

	mu     sync.Mutex
	device string
	mount  *os.File // keeps the device
}

// smallLayer is up to what size a child gets a copy of its own. Above it, on a file system that cannot copy by reference,
// all children share one read-only layer below an empty disk.
const smallLayer = 32 << 20

var errNoDisk = fault.New(fault.Unsupported, "a sandbox with tmpfs storage cannot be forked or snapshotted: its files are in memory")

// freezeDisk gives the sandbox's own layer as it is now. Whoever writes to it meanwhile waits until the copy is made. The
// caller closes what it gets.
func (s *shell) freezeDisk() (*frozenDisk, error) {
	if s.disk == nil {
		return nil, errNoDisk
	}
	still := s.disk.still
	if !s.disk.journal && s.group.CanFreeze() {
		still = s.stopped
	}
	return s.disk.freeze(s.disk.disks.dir, still)
}

// stopped runs f while no process of a running sandbox runs and its disk is written out. Freezing the file system itself
// would wait for every processor of the host several times: tens of milliseconds. What is open and deleted stays in the
// copy, where it costs space and nothing else; a journal would have to be emptied too.
func (s *shell) stopped(f func() error) (err error) {
	s.moving.Lock()
	defer s.moving.Unlock()
	if err := s.group.Freeze(); err != nil {
		return s.disk.still(f) // one of them cannot be stopped
	}
	defer func() { err = errors.Join(err, s.group.Thaw()) }()
	if err := s.disk.sync(); err != nil {
		return err
	}
	return f()
}

// freeze copies the disk into a nameless file of that directory.
func (k *disk) freeze(dir string, still func(func() error) error) (_ *frozenDisk, err error) {
	k.copying.Lock()
	defer k.copying.Unlock()
	if k.closed {
		return nil, fault.New(fault.Gone, "the sandbox has ended")
	}
	// Most of what is only in memory goes to the image while everybody still writes.
	if err := k.sync(); err != nil {
		return nil, err
	}
	k.trim()
	into := spare{size: k.size}
	if dir == k.disks.dir {
		into, err = k.disks.takeSpare(k.size)
	} else {
		into.image, err = nameless(dir)
	}
	if err != nil {
		return nil, err
	}
	image := into.image
	err = still(func() error { return copyInto(image, k.image, k.size) })
	if err != nil {
		into.close()
		return nil, err
	}
	return &frozenDisk{
		disks: k.disks, image: image, loop: into.loop, size: k.size, bytes: allocated(image), journal: k.journal, empty: k.empty, work: k.work, marked: k.marked,
		below: holdAll(k.below), users: 1,
	}, nil
}

// sync writes what is only in memory.
func (k *disk) sync() error {
	if err := hold(k.root, unix.Syncfs); err != nil {
		k.failed.Store(!errors.Is(err, wire.ErrNotHeld)) // the kernel tells of an error once
		return fmt.Errorf("sync disk: %w", k.disks.perhapsFull(err))
	}
	return nil
}

// perhapsFull explains an error of a sandbox's disk: where the host's is full, a sandbox only hears that writing failed.
func (d *disks) perhapsFull(err error) error {
	var st unix.Statfs_t
	if unix.Statfs(d.dir, &st) == nil && int64(st.Bavail)*st.Bsize < smallLayer {
		return spaceless(errors.Join(err, unix.ENOSPC))
	}
	return err
}

// still runs f while the file system is whole on its device and nobody can write to it.
func (k *disk) still(f func() error) (err error) {
	if err := unix.IoctlSetInt(int(k.root.Fd()), fiFreeze, 0); err != nil {
		return fmt.Errorf("freeze disk: %w", k.disks.perhapsFull(err))
	}
	defer func() {
		if thaw := unix.IoctlSetInt(int(k.root.Fd()), fiThaw, 0); thaw != nil {
			err = errors.Join(err, fmt.Errorf("thaw disk: %w", thaw))
		}
	}()
	return f()
}

// Of linux/fs.h; the same on every architecture that Go and Cove run on.
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
	fiTrim   = 0xc0185879
)

// trim gives the blocks of deleted files back to the host when there are many: a copy would carry them all.
func (k *disk) trim() {
	used, err := usedBytes(k.root)
	if err != nil || allocated(k.image) < used+smallLayer {
		return
	}
	all := struct{ start, length, least uint64 }{length: ^uint64(0)}
	// A comfort: without it the copy is larger.
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, k.root.Fd(), fiTrim, uintptr(unsafe.Pointer(&all)))
}

func allocated(f *os.File) int64 {
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil {
		return 0
	}
	return st.Blocks * 512
}

// hold counts another user.
func (f *frozenDisk) hold() *frozenDisk {
	f.disks.mu.Lock()
	defer f.disks.mu.Unlock()
	f.users++
	return f
}

// close lets go; the last user's close frees it.
func (f *frozenDisk) close() {
	f.disks.mu.Lock()
	f.users--
	last := f.users == 0
	if last && f.name != "" {
		delete(f.disks.named, f.name)
	}
	f.disks.mu.Unlock()
	if !last {
		return
	}
	spare{image: f.image, loop: f.loop}.close()
	if f.mount != nil {
		f.mount.Close()
	}
	closeAll(f.below)
}

// copy gives its content to a disk: a copy, or the image itself when nobody else will ask.
func (f *frozenDisk) copy(last bool) (spare, error) {
	if last {
		fd, err := unix.FcntlInt(f.image.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return spare{}, err
		}
		s := spare{os.NewFile(uintptr(fd), "image"), f.loop, f.size}
		f.loop = nil
		return s, nil
	}
	s, err := f.disks.takeSpare(f.size)
	if err != nil {
		return spare{}, err
	}
	if err := copyInto(s.image, f.image, f.size); err != nil {
		s.close()
		return spare{}, err
	}
	return s, nil
}

func holdAll(all []*frozenDisk) []*frozenDisk {
	for _, f := range all {
		f.hold()
	}
	return slices.Clone(all)
}

func closeAll(all []*frozenDisk) {
	for _, f := range all {
		f.close()
	}
}

// show mounts it read-only, attached nowhere. All mounts of it share one file system, and so its pages in memory.
func (f *frozenDisk) show() (*os.File, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mount == nil {
		loop, err := attachLoop(f.image, f.disks.mark, unix.LO_FLAGS_READ_ONLY|unix.LO_FLAGS_DIRECT_IO)
		if err != nil {
			return nil, err
		}
		defer loop.Close()
		// noload: what has a journal was frozen, and so has nothing in it.
		if f.mount, err = mountImage(loop.Name(), "ro", "noload"); err != nil {
			return nil, err
		}
		f.device = loop.Name()
	}
	// Not a clone of the first mount: before Linux 6.15 nothing that is attached nowhere can be cloned.
	return mountImage(f.device, "ro", "noload")
}

// open gives the image of a template, once for all who use it. The caller closes it.
func (d *disks) open(path string) (*frozenDisk, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if f := d.named[path]; f != nil {
		f.users++
		return f, nil
	}
	image, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Uid != 0 || st.Mode&0o022 != 0 {
		image.Close()
		return nil, fmt.Errorf("%s is not an image that root alone can change: %w", path, err)
	}
	f := &frozenDisk{disks: d, name: path, image: image, size: st.Size, users: 1}
	d.named[path] = f
	return f, nil
}

// canReflink tells whether files in a directory can be copied by reference, whatever their size.
func canReflink(dir string) error {
	from, err := nameless(dir)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := nameless(dir)
	if err != nil {
		return err
	}
	defer to.Close()
	if _, err := from.Write(make([]byte, 64<<10)); err != nil {
		return err
	}
	return unix.IoctlFileClone(int(to.Fd()), int(from.Fd()))
}

// thawLeft thaws disks that a maker left frozen because it was killed in that very moment: what waits to write there
// could not even be killed.
func thawLeft(dir string) {
	devices, _ := filepath.Glob("/sys/block/loop*/loop")
	for _, name := range devices {
		device := "/dev/" + strings.Split(name, "/")[3]
		loop, err := os.Open(device)
		if err != nil {
			continue
		}
		info, err := unix.IoctlLoopGetStatus64(int(loop.Fd()))
		if err == nil && unix.ByteSliceToString(info.File_name[:]) == markOf(dir) && info.Flags&unix.LO_FLAGS_READ_ONLY == 0 {
			thawDevice(device)
		}
		loop.Close()
	}
}

func thawDevice(device string) {
	mount, err := mountImage(device)
	if err != nil {
		return // gone since
	}
	defer mount.Close()
	if root, err := openRoot(mount); err == nil {
		_ = unix.IoctlSetInt(int(root.Fd()), fiThaw, 0)
		root.Close()
	}
}

// diskBytes is what a sandbox holds on disk.
func (s *shell) diskBytes() int64 {
	if s.disk == nil {
		return 0
	}
	return s.disk.bytes()
}
