package maker

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
)

// longFile is memory that branches share until they write to it. It is on a file system of its own, so that the host can
// make sure that nobody writes to it any more.
type longFile struct {
	mount  *os.File
	list   *os.File
	file   *os.File
	sealed *os.File
}

// longFileName is how it shows in a branch's list of mappings.
const longFileName = ".cove-branch"

func newLongFile(runs []run, kernel *layout) (_ *longFile, err error) {
	l := &longFile{}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	var ops []memoryOp
	i := 0
	for _, r := range runs {
		if at(kernel.maps, &i, r.from) == nil {
			return nil, errMaps
		}
		whole := neighbours(kernel.maps, i)
		ops = append(ops, memoryOp{Kind: opLong, Addr: r.from, Len: r.to - r.from, A: whole.from, B: whole.to})
	}
	if l.list, err = listFile(listHead{}, ops, nil, 0); err != nil {
		return nil, err
	}
	if l.mount, err = mountMemory(runsBytes(runs) + uint64(len(runs))*2*hugePage); err != nil {
		return nil, err
	}
	fd, err := unix.Openat(int(l.mount.Fd()), longFileName, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o400)
	if err != nil {
		return nil, err
	}
	l.file = os.NewFile(uintptr(fd), "long")
	// A page is at the offset of its address, so that huge pages fit.
	return l, l.file.Truncate(1 << 47)
}

// mountMemory makes a file system in memory that is attached nowhere, with huge pages where the host has them: then
// copying costs a third.
//
// It has a size: what a branch reads where nothing was written would be part of the file until its last user ends.
func mountMemory(size uint64) (*os.File, error) {
	fsfd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fsfd)
	_ = unix.FsconfigSetString(fsfd, "huge", "always") // a kernel without them has small ones
	if err := unix.FsconfigSetString(fsfd, "size", strconv.FormatUint(size, 10)); err != nil {
		return nil, err
	}
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return nil, fmt.Errorf("mount memory: %w", err)
	}
	fd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("mount memory: %w", err)
	}
	return os.NewFile(uintptr(fd), "memory"), nil
}

// seal makes the file one that nobody can write to. It fails while anybody still could: the copy is the user's code.
func (l *longFile) seal() error {
	fd, err := unix.Openat(int(l.mount.Fd()), longFileName, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	l.sealed = os.NewFile(uintptr(fd), "sealed")
	l.file.Close()
	l.file = nil
	return unlessBusy(func() error { return setAttr(l.mount, unix.MOUNT_ATTR_RDONLY, nil) })
}

// sealList makes a list or what is behind it one that nobody can write to, however they hold it.
func sealList(list *os.File) error {
	if list == nil {
		return nil
	}
	return unlessBusy(func() error {
		_, err := unix.FcntlInt(list.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL)
		return err
	})
}

// unlessBusy tries for a moment: a shell that is being made has our descriptors until its exec.
func unlessBusy(seal func() error) error {
	for wait := 100 * time.Microsecond; ; wait *= 2 {
		err := seal()
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || wait > 200*time.Millisecond {
			return fault.Wrap(fault.Denied, err, "the kernel's copy did not let go of the memory it wrote")
		}
		time.Sleep(wait)
	}
}

func (l *longFile) close() {
	for _, f := range []*os.File{l.mount, l.list, l.file, l.sealed} {
		if f != nil {
			f.Close()
		}
	}
}
