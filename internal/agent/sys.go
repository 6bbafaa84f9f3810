package agent

import (
	"os"
	"runtime"
	"syscall"
	"unsafe"
)

// Numbers that the syscall package does not name. Those from 424 on are the same on every architecture.
const (
	sysPidfdSendSignal = 424
	sysPidfdOpen       = 434
	sysCloseRange      = 436
	sysOpenat2         = 437

	oPath = 0x200000

	atFDCWD           = -100
	atRemoveDir       = 0x200
	atSymlinkNoFollow = 0x100
	atNoAutomount     = 0x800
	atEmptyPath       = 0x1000

	resolveNoMagiclinks = 0x02
	closeRangeCloexec   = 0x04

	procMagic = 0x9fa0

	pollIn    = 0x1
	pollRDHUP = 0x2000
	pollHUP   = 0x10
	pollErr   = 0x8
)

func pidfdOpen(pid int) (int, error) {
	fd, _, errno := syscall.Syscall(sysPidfdOpen, uintptr(pid), 0, 0)
	if errno != 0 {
		return -1, errno
	}
	return int(fd), nil
}

// pidfdSignalGroup sends to the process group that the process leads (Linux 6.9).
const pidfdSignalGroup = 1 << 2

func pidfdSignal(fd int, sig syscall.Signal, flags uintptr) error {
	_, _, errno := syscall.Syscall6(sysPidfdSendSignal, uintptr(fd), uintptr(sig), 0, flags, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func openat2(dir int, path string, flags int, mode uint32) (int, error) {
	p, err := syscall.BytePtrFromString(path)
	if err != nil {
		return -1, err
	}
	how := struct{ flags, mode, resolve uint64 }{uint64(flags | syscall.O_CLOEXEC), uint64(mode), resolveNoMagiclinks}
	return retry(func() (int, error) {
		fd, _, errno := syscall.Syscall6(sysOpenat2, uintptr(dir), uintptr(unsafe.Pointer(p)), uintptr(unsafe.Pointer(&how)), unsafe.Sizeof(how), 0, 0)
		runtime.KeepAlive(&how)
		if errno != 0 {
			return -1, errno
		}
		return int(fd), nil
	})
}

func readlinkat(dir int, name string) (string, error) {
	p, err := syscall.BytePtrFromString(name)
	if err != nil {
		return "", err
	}
	buf := make([]byte, 4096)
	n, _, errno := syscall.Syscall6(syscall.SYS_READLINKAT, uintptr(dir), uintptr(unsafe.Pointer(p)), uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)), 0, 0)
	if errno != 0 {
		return "", errno
	}
	return string(buf[:n]), nil
}

// lstatat looks at a name of a directory and follows nothing.
func lstatat(dir int, name string, st *syscall.Stat_t) error {
	p, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	_, _, errno := syscall.Syscall6(sysFstatat, uintptr(dir), uintptr(unsafe.Pointer(p)), uintptr(unsafe.Pointer(st)), atSymlinkNoFollow|atNoAutomount, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func unlinkat(dir int, name string, flags int) error {
	p, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	_, _, errno := syscall.Syscall(syscall.SYS_UNLINKAT, uintptr(dir), uintptr(unsafe.Pointer(p)), uintptr(flags))
	if errno != 0 {
		return errno
	}
	return nil
}

func symlinkat(target string, dir int, name string) error {
	t, err := syscall.BytePtrFromString(target)
	if err != nil {
		return err
	}
	p, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	_, _, errno := syscall.Syscall(syscall.SYS_SYMLINKAT, uintptr(unsafe.Pointer(t)), uintptr(dir), uintptr(unsafe.Pointer(p)))
	if errno != 0 {
		return errno
	}
	return nil
}

// chownFD changes the owner of what fd names, also when it was opened with O_PATH.
func chownFD(fd, uid, gid int) error { return syscall.Fchownat(fd, "", uid, gid, atEmptyPath) }

func ioctl(fd int, request uintptr, arg unsafe.Pointer) error {
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	if errno != 0 {
		return errno
	}
	return nil
}

type pollfd struct {
	fd      int32
	events  int16
	revents int16
}

// poll waits for events on descriptors; a nil timeout waits for ever.
func poll(fds []pollfd, timeout *syscall.Timespec) (int, error) {
	if len(fds) == 0 {
		return 0, nil
	}
	return retry(func() (int, error) {
		n, _, errno := syscall.Syscall6(syscall.SYS_PPOLL, uintptr(unsafe.Pointer(&fds[0])), uintptr(len(fds)), uintptr(unsafe.Pointer(timeout)), 0, 0, 0)
		if errno != 0 {
			return 0, errno
		}
		return int(n), nil
	})
}

// nonblocking wraps a descriptor so that reads of it wait in the runtime's poller and can be given deadlines.
func nonblocking(fd int, name string) (*os.File, error) {
	if err := syscall.SetNonblock(fd, true); err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}
