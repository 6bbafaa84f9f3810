package agent

import (
	"os"
	"path"
	"strings"
	"syscall"

	"github.com/covehq/cove/internal/fault"
)

// absolute is a path as the user means it: relative ones start at home.
func absolute(p string, u user) string {
	if !strings.HasPrefix(p, "/") {
		p = u.home + "/" + p
	}
	return path.Clean(p)
}

// target checks a path that a client named.
func target(p string, u user) (string, error) {
	if p == "" || strings.Contains(p, "\x00") {
		return "", fault.New(fault.Invalid, "the path %q is empty or holds a NUL byte", p)
	}
	return absolute(p, u), nil
}

// open opens a path without following magic links such as /proc/PID/fd/3 or /proc/PID/root: through those the agent
// would be led to its own descriptors or out of the caller's rights.
func open(dir int, name string, flags int, mode uint32) (int, error) {
	if flags&oPath == 0 {
		flags |= syscall.O_NOCTTY
	}
	fd, err := openat2(dir, name, flags, mode)
	if err == syscall.ENOSYS {
		fd, err = openWalking(dir, name, flags, mode)
	}
	if err != nil {
		return -1, err
	}
	if err := refuseProc(fd); err != nil {
		syscall.Close(fd)
		return -1, err
	}
	return fd, nil
}

// openWalking does the same on a kernel without openat2 (before 5.6), one part of the path at a time.
func openWalking(dir int, name string, flags int, mode uint32) (int, error) {
	at, err := dupDir(dir, strings.HasPrefix(name, "/"))
	if err != nil {
		return -1, err
	}
	defer func() { syscall.Close(at) }()
	parts := strings.FieldsFunc(name, func(r rune) bool { return r == '/' })
	for links := 0; len(parts) > 1 || len(parts) == 1 && flags&syscall.O_NOFOLLOW == 0; {
		if len(parts) == 0 {
			break
		}
		next, err := syscall.Openat(at, parts[0], oPath|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
		if err == syscall.ENOENT && len(parts) == 1 {
			break // to be created
		}
		if err != nil {
			return -1, err
		}
		var st syscall.Stat_t
		err = syscall.Fstat(next, &st)
		if err == nil && st.Mode&syscall.S_IFMT == syscall.S_IFLNK {
			var to string
			to, err = readlinkat(next, "")
			syscall.Close(next)
			if links++; err == nil && (links > 40 || onProc(at) && !strings.HasSuffix(procPath(at), "/proc")) {
				err = syscall.ELOOP
			}
			if err != nil {
				return -1, err
			}
			if strings.HasPrefix(to, "/") {
				root, rerr := dupDir(atFDCWD, true)
				if rerr != nil {
					return -1, rerr
				}
				syscall.Close(at)
				at = root
			}
			parts = append(strings.FieldsFunc(to, func(r rune) bool { return r == '/' }), parts[1:]...)
			continue
		}
		if err != nil || len(parts) == 1 {
			syscall.Close(next)
			if err != nil {
				return -1, err
			}
			break
		}
		syscall.Close(at)
		at, parts = next, parts[1:]
	}
	last := "."
	if len(parts) > 0 {
		last = parts[0]
	}
	return syscall.Openat(at, last, flags|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, mode)
}

func dupDir(dir int, root bool) (int, error) {
	name := "."
	if root {
		dir, name = atFDCWD, "/"
	}
	return syscall.Openat(dir, name, oPath|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
}

func onProc(fd int) bool {
	var st syscall.Statfs_t
	return syscall.Fstatfs(fd, &st) == nil && st.Type == procMagic
}

func procPath(fd int) string {
	p, _ := os.Readlink(fdPath(fd))
	return p
}

// openToAll are the files of a process that every other one may read and nobody may write, and that tell no address.
var openToAll = map[string]bool{
	"cmdline": true, "status": true, "statm": true, "mounts": true, "mountinfo": true, "limits": true, "cgroup": true,
}

// refuseProc refuses what belongs to a process under /proc: to the kernel this thread is the agent, which may read its
// own memory, descriptors and environment whatever its rights are, and "self", its number and its threads' all lead
// there. Commands look at processes; file operations do not.
func refuseProc(fd int) error {
	if !onProc(fd) {
		return nil
	}
	p := procPath(fd)
	if p == "" {
		return syscall.EACCES
	}
	if dir, name := path.Split(p); openToAll[name] && strings.Count(dir, "/") == 3 { // /proc/PID/name
		return nil
	}
	for part := range strings.SplitSeq(p, "/") {
		if part != "" && strings.Trim(part, "0123456789") == "" {
			return syscall.EACCES
		}
	}
	return nil
}

// fdPath names a descriptor for calls that take only paths.
func fdPath(fd int) string { return "/proc/self/fd/" + itoa(fd) }

// openParent opens the directory that holds a path, for operations on its last part.
func openParent(p string) (dir int, name string, err error) {
	if p == "/" {
		return -1, "", fault.New(fault.Invalid, "/ itself cannot be changed")
	}
	dir, err = open(atFDCWD, path.Dir(p), oPath|syscall.O_DIRECTORY, 0)
	if err == nil && onProc(dir) {
		syscall.Close(dir)
		return -1, "", syscall.EACCES
	}
	return dir, path.Base(p), err
}

// openRegular opens a regular file for reading and never waits for a pipe or a device.
func openRegular(p string) (int, error) {
	fd, err := open(atFDCWD, p, syscall.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	if err := requireRegular(fd, p); err != nil {
		syscall.Close(fd)
		return -1, err
	}
	return fd, nil
}

func requireRegular(fd int, p string) error {
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return err
	}
	return regular(&st, p)
}

func regular(st *syscall.Stat_t, p string) error {
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		return nil
	case syscall.S_IFDIR:
		return syscall.EISDIR
	default:
		return fault.New(fault.Invalid, "%s: is not a regular file", p)
	}
}

// makeDirs makes a directory and its parents as whoever this thread is, and gives them to owner.
func makeDirs(p string, mode uint32, owner *user) error {
	fd, err := open(atFDCWD, p, oPath|syscall.O_DIRECTORY, 0)
	if err == nil {
		syscall.Close(fd)
		return nil
	}
	if err != syscall.ENOENT || p == "/" {
		return err
	}
	if err := makeDirs(path.Dir(p), 0o755, owner); err != nil {
		return err
	}
	dir, name, err := openParent(p)
	if err != nil {
		return err
	}
	defer syscall.Close(dir)
	switch err := syscall.Mkdirat(dir, name, mode); err {
	case nil:
		return give(dir, name, owner)
	case syscall.EEXIST:
		return nil
	default:
		return err
	}
}

// give makes a new entry of a directory somebody's; nil: it stays its maker's.
func give(dir int, name string, owner *user) error {
	if owner == nil {
		return nil
	}
	return syscall.Fchownat(dir, name, owner.uid, owner.gid, atSymlinkNoFollow)
}
