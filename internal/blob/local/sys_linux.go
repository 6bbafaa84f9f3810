package local

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
)

// syncAll forces all of the file system to the disk: for many small files that is one wait instead of thousands.
func (s *Store) syncAll() error {
	if err := unix.Syncfs(int(s.root.Fd())); err != nil {
		return full(fmt.Errorf("sync blobs: %w", err))
	}
	return nil
}

// rename gives a file its name, unless another has it: fs.ErrExist.
func rename(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) {
		return over(from, to)
	}
	return err
}

// inUse tells whether somebody has a file open: the kernel lends a file to whoever is its only user.
func inUse(path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close() // ends the lease
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	return errors.Is(err, unix.EAGAIN)
}

// mark changes with every change of a file.
func mark(info fs.FileInfo) string {
	st := info.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%d-%d-%d-%d", st.Ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano())
}

// full says in plain words that the host's disk is full.
func full(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fault.Wrap(fault.DiskFull, err, "the server's disk is full: nothing can be kept")
	}
	return err
}
