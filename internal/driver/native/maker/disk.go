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
	"sync/atomic"
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
	making  map[master]*making     // masters that are not there yet: mkfs takes long, and whoever wants another need not wait
	spares  map[int64][]spare      // for forks, by size
	named   map[string]*frozenDisk // images of templates that somebody uses, by path
}

// maxMasters bounds what callers who choose their own sizes can make the maker hold.
const maxMasters = 16

// master is an empty file system that images are copied from: its few hundred kilobytes of metadata.
type master struct {
	bytes   int64
	journal bool
}

// making is a master that one caller makes and others of the same size wait for.
type making struct {
	done chan struct{} // closed when it is made, or is not
	err  error         // of those who waited; whoever asks later tries again
}

// spare is an image without content behind a device. The device comes first: when it is attached, the host's disk must take
// what the image has by then.
type spare struct {
	image, loop *os.File
	size        int64
}

func (d *disks) newSpare(size int64) (spare, error) {
	image, err := nameless(d.dir)
	if err != nil {
		return spare{}, err
	}
	err = image.Truncate(size)
	var loop *os.File
	if err == nil {
		loop, err = attachLoop(image, d.mark, 0)
	}
	if err != nil {
		image.Close()
		return spare{}, err
	}
	return spare{image, loop, size}, nil
}

// keepSpares has so many of a size ready.
func (d *disks) keepSpares(n int, size int64) error {
	for {
		d.mu.Lock()
		var gone []spare
		have := d.spares[size]
		if len(have) > n {
			gone, d.spares[size] = have[n:], have[:n]
		}
		short := n > len(have)
		d.mu.Unlock()
		for _, s := range gone {
			s.close()
		}
		if !short {
			return nil
		}
		s, err := d.newSpare(size)
		if err != nil {
			return err
		}
		d.mu.Lock()
		d.spares[size] = append(d.spares[size], s)
		d.mu.Unlock()
	}
}

// takeSpare gives one of a size, or a new image without a device.
func (d *disks) takeSpare(size int64) (spare, error) {
	d.mu.Lock()
	if have := d.spares[size]; len(have) > 0 {
		s := have[len(have)-1]
		d.spares[size] = have[:len(have)-1]
		d.mu.Unlock()
		return s, nil
	}
	d.mu.Unlock()
	image, err := nameless(d.dir)
	return spare{image: image, size: size}, err
}

// close lets go of what is kept ready.
func (d *disks) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range d.masters {
		f.Close()
	}
	clear(d.masters)
	for _, all := range d.spares {
		for _, s := range all {
			s.close()
		}
	}
	clear(d.spares)
}

func (s spare) close() {
	s.image.Close()
	if s.loop != nil {
		s.loop.Close()
	}
}

// disk is the own layer of one sandbox.
type disk struct {
	disks    *disks
	image    *os.File // without a name
	root     *os.File // its topmost directory, by which the file system as a whole is asked and told
	size     int64
	journal  bool
	work     int  // which of its two work directories is in use
	trees    int  // that it is for
	marked   bool // the other one is still marked by who used it before
	device   string
	empty    int64         // bytes that the file system uses for itself
	below    []*frozenDisk // layers between it and the template's, uppermost first; held
	failed   atomic.Bool   // the host could not write it
	question syncQuestion  // whether it has failed

	calm    *time.Timer // calls settle
	copying sync.Mutex  // a file system freezes once at a time, and is not let go of meanwhile
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
	return &disks{dir: dir, mark: markOf(dir), reflink: canReflink(dir) == nil, masters: map[master]*os.File{}, making: map[master]*making{}, spares: map[int64][]spare{}, named: map[string]*frozenDisk{}}, nil
}

// make gives a disk for so many trees and its mount, which is attached nowhere and holds a directory with u, w and x for each.
func (d *disks) make(f form, trees int) (_ *disk, mount *os.File, err error) {
	want := master{f.disk, f.storage == sandbox.StorageDurable}
	made := &disk{disks: d, size: want.bytes, journal: want.journal}
	copied := f.from != nil && (d.reflink || f.from.bytes <= smallLayer)
	var content spare
	if copied {
		made.size, made.journal, made.empty, made.below = f.from.size, f.from.journal, f.from.empty, holdAll(f.from.below)
		made.work = 1 - f.from.work
		content, err = f.from.copy(f.owns)
	} else {
		if f.from != nil {
			made.below = append(holdAll([]*frozenDisk{f.from}), holdAll(f.from.below)...)
		}
		content, err = d.blank(want)
	}
	if err != nil {
		made.close()
		return nil, nil, err
	}
	if mount, err = made.fill(content); err != nil {
		made.close()
		return nil, nil, err
	}
	if copied {
		made.trees, made.marked = trees, true
		if f.from.marked {
			err = forgetVolatile(made.root, made.work, trees)
		}
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

// blank is a copy of an empty file system.
func (d *disks) blank(want master) (spare, error) {
	from, err := d.master(want)
	if err != nil {
		return spare{}, err
	}
	defer from.Close()
	s, err := d.newSpare(want.bytes)
	if err != nil {
		return spare{}, err
	}
	if err := copyInto(s.image, from, want.bytes); err != nil {
		s.close()
		return spare{}, err
	}
	return s, nil
}

// fill makes an image the disk's, and mounts it.
func (k *disk) fill(content spare) (mount *os.File, err error) {
	k.image = content.image
	loop := content.loop
	if loop == nil {
		if loop, err = attachLoop(k.image, k.disks.mark, 0); err != nil {
			return nil, err
		}
	}
	if content.loop != nil {
		// Whoever looked at the device before the image had its content must not be believed.
		if err := unix.IoctlSetInt(int(loop.Fd()), unix.BLKFLSBUF, 0); err != nil {
			loop.Close()
			return nil, fmt.Errorf("flush device: %w", err)
		}
	}
	fetch(k.image, loop)
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
	k.calm = time.AfterFunc(settleTime, k.settle)
	return mount, nil
}

// fetch has the device read what a new file system will ask for: block by block it would wait for each.
func fetch(image, loop *os.File) {
	const most = 4 << 20
	for at, fetched := int64(0), int64(0); fetched < most; {
		start, err := unix.Seek(int(image.Fd()), at, unix.SEEK_DATA)
		if err != nil {
			return
		}
		if at, err = unix.Seek(int(image.Fd()), start, unix.SEEK_HOLE); err != nil {
			return
		}
		if unix.Fadvise(int(loop.Fd()), start, at-start, unix.FADV_WILLNEED) != nil {
			return
		}
		fetched += at - start
	}
}

// settleTime is how long a disk is read and written through the host's cache. Its image was just written: going past the
// cache would wait for the host's disk, and a sandbox that ends before needs that disk not once.
const settleTime = 2 * time.Second

// settle ends that: what is cached in the sandbox need not be cached by the host as well. It may wait for the host's disk,
// and so does the sandbox that writes meanwhile.
func (k *disk) settle() {
	k.copying.Lock()
	defer k.copying.Unlock()
	if k.closed {
		return
	}
	loop, err := os.OpenFile(k.device, os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer loop.Close()
	// A comfort: without it there are two caches.
	_ = unix.IoctlSetInt(int(loop.Fd()), unix.LOOP_SET_DIRECT_IO, 1)
	if k.marked {
		k.marked = forgetVolatile(k.root, 1-k.work, k.trees) != nil // a copy would do it too, while somebody waits
	}
}

// close lets go of the disk, when nobody copies it any more; its space is free when its last mount is gone too.
func (k *disk) close() {
	k.copying.Lock()
	defer k.copying.Unlock()
	if k.closed {
		return
	}
	k.closed = true
	if k.calm != nil {
		k.calm.Stop()
	}
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

// workDirs are the names of a tree's two work directories, which no sandbox sees.
var workDirs = [2]string{"w", "x"}

// forgetVolatile removes the mark that a volatile overlay leaves in its work directory: the next overlay that uses it
// would be refused, since a crash might have lost something. Ours was synced and frozen. A copy of a disk uses the other
// work directory, so that the mark can be removed when nobody waits.
func forgetVolatile(root *os.File, work, trees int) error {
	for i := range trees {
		marks := filepath.Join(strconv.Itoa(i), workDirs[work], "work/incompat")
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
	for d.masters[want] == nil {
		if err := d.await(want); err != nil {
			return nil, err
		}
	}
	f := d.masters[want]
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// await makes a master, or waits for whoever makes it. It is called with mu held, and lets go of it meanwhile.
func (d *disks) await(want master) error {
	if m := d.making[want]; m != nil {
		d.mu.Unlock()
		<-m.done
		d.mu.Lock()
		return m.err
	}
	m := &making{done: make(chan struct{})}
	d.making[want] = m
	d.mu.Unlock()
	f, err := d.makeMaster(want)
	d.mu.Lock()
	delete(d.making, want)
	defer close(m.done)
	if err != nil {
		m.err = d.perhapsFull(err)
		return m.err
	}
	d.keepMaster(want, f)
	return nil
}

func (d *disks) keepMaster(want master, f *os.File) {
	for old, file := range d.masters {
		if len(d.masters) < maxMasters {
			break
		}
		file.Close()
		delete(d.masters, old)
	}
	d.masters[want] = f
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
		for _, leaf := range []string{"u", workDirs[0], workDirs[1]} {
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
		return nil, fmt.Errorf("make image: %w", spaceless(err))
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

// pieces lends buffers to copy images with.
var pieces = sync.Pool{New: func() any { b := make([]byte, 128<<10); return &b }}

func copyData(to, from *os.File, size int64) error {
	piece := pieces.Get().(*[]byte)
	defer pieces.Put(piece)
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
		if _, err := io.CopyBuffer(io.NewOffsetWriter(to, start), io.NewSectionReader(from, start, end-start), *piece); err != nil {
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
