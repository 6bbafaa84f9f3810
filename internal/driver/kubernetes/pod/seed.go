package pod

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Seed copies directories of the image that it runs in to the volumes which the sandbox will have in their place, so that they hide nothing. What its
// user may not read is left out: the sandbox could not read it either. Files are the sandbox's user's, or, where that is root, whose they were. It runs
// in an init container. The arguments are the directory below which each volume is under its later place, how many bytes may be copied, and directories.
func Seed(args []string) error {
	if len(args) < 2 {
		return errors.New("seed needs a directory, a number of bytes, and directories")
	}
	left, err := strconv.ParseInt(args[1], 10, 64)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	s := &seed{left: left, to: args[0]}
	return s.all(args[2:], filepath.Dir(self), s.to)
}

// seed is one copy of several directories.
type seed struct {
	to     string
	left   int64 // bytes that may still be copied
	device uint64
	dirs   []seeded
	ours   []fs.FileInfo // directories that are in no image
}

// kernelDirs are not of the image, and hold more than any disk does.
var kernelDirs = []string{"/proc", "/sys", "/dev"}

func (s *seed) all(dirs []string, ours ...string) error {
	for _, dir := range ours {
		if info, err := os.Stat(dir); err == nil {
			s.ours = append(s.ours, info)
		}
	}
	for _, dir := range dirs {
		from, err := filepath.EvalSymlinks(dir)
		if err != nil {
			continue // the image has no such directory
		}
		if from == "/" || slices.ContainsFunc(kernelDirs, func(kernel string) bool { return strings.HasPrefix(from+"/", kernel+"/") }) {
			return fmt.Errorf("the image's %s is a link to %s, of which there is no copy", dir, from)
		}
		if err := s.copy(from, s.to+dir); err != nil {
			return fmt.Errorf("copy the image's %s: %w", dir, err)
		}
	}
	return nil
}

// seeded is a directory that gets its mode and time when all is in it.
type seeded struct {
	name string
	info fs.FileInfo
}

var errSeedRoom = errors.New("the image has more in the directories that a sandbox may write to than its disk may hold; give the sandbox a larger disk")

func (s *seed) copy(from, to string) error {
	info, err := os.Stat(from)
	if err != nil || !info.IsDir() {
		return err
	}
	s.dirs, s.device = nil, deviceOf(info)
	err = filepath.WalkDir(from, func(name string, d fs.DirEntry, err error) error {
		if err == nil {
			err = s.one(name, to+strings.TrimPrefix(name, from), d)
		}
		if errors.Is(err, fs.ErrPermission) {
			return nil
		}
		return err
	})
	for i := len(s.dirs) - 1; i >= 0; i-- { // the innermost first: whoever writes into a directory changes its time
		d := s.dirs[i]
		if d.name != to || os.Getuid() == 0 { // the volume itself belongs to nobody else
			err = errors.Join(err, like(d.name, d.info, 0o700))
		}
	}
	return err
}

// one copies a directory, a link or a file; there is nothing else that an image needs.
func (s *seed) one(from, to string, d fs.DirEntry) error {
	info, err := d.Info()
	if err != nil {
		return err
	}
	switch {
	case d.IsDir() && deviceOf(info) != s.device:
		return fs.SkipDir // a mount, which is in no image
	case d.IsDir() && slices.ContainsFunc(s.ours, func(own fs.FileInfo) bool { return os.SameFile(own, info) }):
		return fs.SkipDir // a volume of the image's may be on the same disk as ours are
	case d.IsDir():
		if err := os.Mkdir(to, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		s.dirs = append(s.dirs, seeded{to, info})
		return nil
	case d.Type() == fs.ModeSymlink:
		target, err := os.Readlink(from)
		if err != nil {
			return err
		}
		if err := os.Symlink(target, to); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		return give(to, info)
	case d.Type().IsRegular():
		return s.file(from, to, info)
	}
	return nil
}

func (s *seed) file(from, to string, info fs.FileInfo) (err error) {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	// An init container may be started again.
	target, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	n, err := io.Copy(target, io.LimitReader(source, s.left+1)) // not all files say how long they are
	if s.left -= n; s.left < 0 || errors.Is(err, syscall.ENOSPC) {
		target.Close()
		return errSeedRoom
	}
	if err != nil {
		target.Close()
		return err
	}
	if err := target.Close(); err != nil {
		return err
	}
	return like(to, info, 0o600)
}

// like gives a copy the owner, mode and time of what it is a copy of. One that belongs to the sandbox's user may be written by it.
func like(name string, info fs.FileInfo, least fs.FileMode) error {
	mode := info.Mode().Perm() | info.Mode()&fs.ModeSticky
	if os.Getuid() != 0 {
		mode |= least
	}
	if err := give(name, info); err != nil {
		return err
	}
	if err := os.Chmod(name, mode); err != nil {
		return err
	}
	return os.Chtimes(name, time.Time{}, info.ModTime())
}

func deviceOf(info fs.FileInfo) uint64 {
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		return stat.Dev
	}
	return 0
}

// give gives a copy to the owner of what it is a copy of, where we are root.
func give(name string, info fs.FileInfo) error {
	owner, ok := info.Sys().(*syscall.Stat_t)
	if os.Getuid() != 0 || !ok {
		return nil
	}
	return os.Lchown(name, int(owner.Uid), int(owner.Gid))
}
