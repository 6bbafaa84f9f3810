package app

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// dropPrivilege leaves a root server with its uid, which owns its files, and with nothing else that makes root: no
// capability in any set of any thread, and no program it starts can win one back.
func dropPrivilege() error {
	if os.Geteuid() != 0 {
		return nil
	}
	// The bounding set goes first: dropping from it needs a capability.
	for c := uintptr(0); c <= unix.CAP_LAST_CAP; c++ {
		if err := everyThread(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.EPERM) {
			return fmt.Errorf("drop capability %d from the bounding set: %w", c, err)
		}
	}
	if err := everyThread(unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0); err != nil && !errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("clear ambient capabilities: %w", err)
	}
	if err := everyThread(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3} // pid 0: the calling thread
	var none [2]unix.CapUserData
	if err := everyThread(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&none[0])), 0); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	// Another process of this uid must not read keys out of this one's memory.
	return unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

// everyThread makes a system call that is about one thread on all of them. A binary with cgo cannot: it has threads that
// the runtime does not know.
func everyThread(call, a, b, c uintptr) error {
	_, _, errno := syscall.AllThreadsSyscall6(call, a, b, c, 0, 0, 0)
	switch errno {
	case 0:
		return nil
	case syscall.ENOTSUP:
		return errors.New("this binary was built with cgo and cannot drop privilege; build it with CGO_ENABLED=0")
	}
	return errno
}
