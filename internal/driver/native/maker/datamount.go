package maker

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/covehq/cove/internal/fault"
	"github.com/covehq/cove/internal/sandbox"
)

// dataDirs is where the server keeps directories of datasets, below the data directory. It is the server's to change, so
// nothing on the way there is believed: no link is followed, and no mount.
const dataDirs = "server/datasets/sessions"

// showData opens a directory of datasets. Its files are links to content that other sandboxes of the tenant's see too, so it is
// read-only whoever asks, and nothing in it can be run.
func (m *Maker) showData(asked sandbox.Mount) (*os.File, error) {
	if m.cfg.Host == nil {
		return nil, fault.New(fault.Unsupported, "this maker cannot see the server's datasets")
	}
	var mount *os.File
	err := onThrowawayThread(func() (err error) {
		mount, err = m.cloneDataDir(asked.Source)
		return err
	})
	if err == nil {
		err = m.unowned(mount, safely|unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOEXEC)
	}
	if err == nil {
		return mount, nil
	}
	if mount != nil {
		mount.Close()
	}
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, fault.Wrap(fault.NotFound, err, "the datasets %s are not there", asked.Source)
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV), errors.Is(err, unix.ENOTDIR):
		return nil, fault.Wrap(fault.Denied, err, "a link, a mount or a file lies on the way to the datasets %s, and none is followed: the server's directory is one file system", asked.Source)
	}
	return nil, err
}

// cloneDataDir finds the directory where the server has it, and copies its mount. The thread is of no use for anything else
// afterwards: it is in the host's mount namespace, since the server's files may lie on a mount that the maker has let go of.
func (m *Maker) cloneDataDir(name string) (*os.File, error) {
	if err := m.enterHost(); err != nil {
		return nil, err
	}
	data, err := os.OpenFile(m.cfg.DataDir, unix.O_PATH|unix.O_DIRECTORY, 0) // root's own: links above it are the operator's
	if err != nil {
		return nil, err
	}
	defer data.Close()
	dir, err := besides(data, filepath.Join(dataDirs, name))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	if err := m.serversOwn(dir); err != nil {
		return nil, err
	}
	return cloneDir(dir)
}

// besides is beneath where nothing may be mounted on the way either: the server can do that where it is allowed to mount files
// that a program of its own makes up, and root would wait for that program.
func besides(dir *os.File, path string) (*os.File, error) {
	fd, err := unix.Openat2(int(dir.Fd()), path, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// serversOwn refuses a directory that is not the server's: one that was moved there is not for sandboxes.
func (m *Maker) serversOwn(dir *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return err
	}
	if st.Uid != 0 && int(st.Uid) != m.cfg.ServerUID || st.Mode&0o022 != 0 {
		return fault.New(fault.Denied, "the directory of datasets %s is not the server's alone, so no sandbox gets it", filepath.Base(dir.Name()))
	}
	return plainFiles(dir)
}
