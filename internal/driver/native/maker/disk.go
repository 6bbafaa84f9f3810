package maker

import (
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

	"github.com/covehq/cove/internal/sandbox"
)

// disks makes a sandbox's own layer as a small file system of its own, so that it has an end: a sparse image file
// behind a loop device. The file has no name and the loop device clears itself, so whatever happens to the maker,
// nothing is left on the host. Project quotas would be cheaper, but few hosts' kernels and file systems have them on.
type disks struct {
	dir string

	mu      sync.Mutex
	masters map[master]*os.File // of the sizes asked for last; none has a name
}

// maxMasters bounds what callers who choose their own sizes can make the maker hold.
const maxMasters = 16

// master is an empty file system that images are copied from: its few hundred kilobytes of metadata.
type master struct {
	bytes   int64
	journal bool
}

func openDisks(dir string) (*disks, error) {
	// Named files are of an earlier maker, whose sandboxes are gone.
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return &disks{dir: dir, masters: map[master]*os.File{}}, nil
}

// make returns a mount that is attached nowhere, holding a directory with u and w for each tree.
func (d *disks) make(f form) (*os.File, error) {
	m, err := d.master(master{f.disk, f.storage == sandbox.StorageDurable})
	if err != nil {
		return nil, err
	}
	defer m.Close()
	image, err := d.copy(m, f.disk)
	if err != nil {
		return nil, err
	}
	defer image.Close()
	loop, err := attachLoop(image)
	if err != nil {
		return nil, err
	}
	// The mount keeps the device; the device clears itself when the last user is gone.
	defer loop.Close()
	return mountImage(loop.Name())
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
	features := "^has_journal"
	if want.journal {
		features = "has_journal"
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

// copy makes a nameless image with the master's data and its holes.
func (d *disks) copy(from *os.File, size int64) (*os.File, error) {
	fd, err := unix.Open(d.dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make image: %w", err)
	}
	image := os.NewFile(uintptr(fd), "image")
	if err := image.Truncate(size); err != nil {
		image.Close()
		return nil, err
	}
	if err := copyData(image, from, size); err != nil {
		image.Close()
		return nil, fmt.Errorf("copy image: %w", err)
	}
	return image, nil
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

// attachLoop puts an image behind a free loop device that clears itself.
func attachLoop(image *os.File) (*os.File, error) {
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
		config := unix.LoopConfig{Fd: uint32(image.Fd()), Size: 4096, Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO}}
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

func mountImage(device string) (*os.File, error) {
	fsfd, err := unix.Fsopen("ext4", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fsfd)
	for _, set := range []func() error{
		func() error { return unix.FsconfigSetString(fsfd, "source", device) },
		func() error { return unix.FsconfigSetFlag(fsfd, "noinit_itable") },
		func() error { return unix.FsconfigCreate(fsfd) },
	} {
		if err := set(); err != nil {
			return nil, fmt.Errorf("mount image: %w", err)
		}
	}
	fd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return nil, fmt.Errorf("mount image: %w", err)
	}
	return os.NewFile(uintptr(fd), "disk"), nil
}
