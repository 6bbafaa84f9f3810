package seccomp

import "golang.org/x/sys/unix"

// Arch is AUDIT_ARCH_X86_64, the only instruction set the filter answers for.
const Arch = 0xc000003e

// allowedArch are the older names of allowed calls, which only amd64 has.
var allowedArch = []int{
	unix.SYS_ACCESS, unix.SYS_ALARM, unix.SYS_ARCH_PRCTL, unix.SYS_CHMOD, unix.SYS_CHOWN, unix.SYS_CREAT, unix.SYS_DUP2,
	unix.SYS_EPOLL_CREATE, unix.SYS_EPOLL_WAIT, unix.SYS_EVENTFD, unix.SYS_FORK, unix.SYS_FUTIMESAT, unix.SYS_GETDENTS,
	unix.SYS_GETPGRP, unix.SYS_INOTIFY_INIT, unix.SYS_LCHOWN, unix.SYS_LINK, unix.SYS_LSTAT, unix.SYS_MAP_SHADOW_STACK,
	unix.SYS_MKDIR, unix.SYS_MKNOD, unix.SYS_OPEN, unix.SYS_PAUSE, unix.SYS_PIPE, unix.SYS_POLL, unix.SYS_READLINK,
	unix.SYS_RENAME, unix.SYS_RMDIR, unix.SYS_SELECT, unix.SYS_SIGNALFD, unix.SYS_STAT, unix.SYS_SYMLINK, unix.SYS_TIME,
	unix.SYS_UNLINK, unix.SYS_UTIME, unix.SYS_UTIMES, unix.SYS_VFORK,
}

// refusedArch are amd64's own ways to touch hardware, and mechanisms long gone.
var refusedArch = []int{
	unix.SYS_IOPL, unix.SYS_IOPERM, unix.SYS_MODIFY_LDT, unix.SYS_USELIB, unix.SYS_USTAT, unix.SYS_SYSFS,
	unix.SYS_CREATE_MODULE, unix.SYS_GET_KERNEL_SYMS, unix.SYS_QUERY_MODULE, unix.SYS__SYSCTL,
}
