package seccomp

import (
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// unpackerCalls are what a Go program needs that writes files below a directory and starts nothing.
var unpackerCalls = []int{
	unix.SYS_OPENAT, unix.SYS_OPENAT2, unix.SYS_CLOSE, unix.SYS_READ, unix.SYS_PREAD64, unix.SYS_WRITE, unix.SYS_LSEEK, unix.SYS_FSTAT, unix.SYS_FSTATFS,
	unix.SYS_NEWFSTATAT, unix.SYS_GETDENTS64, unix.SYS_MKDIRAT, unix.SYS_MKNODAT, unix.SYS_SYMLINKAT, unix.SYS_LINKAT, unix.SYS_UNLINKAT,
	unix.SYS_FCHOWN, unix.SYS_FCHOWNAT, unix.SYS_FCHMOD, unix.SYS_UTIMENSAT, unix.SYS_FSETXATTR, unix.SYS_FCNTL, unix.SYS_FADVISE64,

	// the runtime: memory, threads, signals, time
	unix.SYS_MMAP, unix.SYS_MUNMAP, unix.SYS_MPROTECT, unix.SYS_MADVISE, unix.SYS_BRK, unix.SYS_FUTEX, unix.SYS_EXIT, unix.SYS_EXIT_GROUP,
	unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK, unix.SYS_GETPID, unix.SYS_GETTID,
	unix.SYS_TGKILL, unix.SYS_NANOSLEEP, unix.SYS_CLOCK_GETTIME, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY,
	unix.SYS_GETRANDOM, unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EVENTFD2, unix.SYS_PIPE2,
	unix.SYS_TIMER_CREATE, unix.SYS_TIMER_SETTIME, unix.SYS_TIMER_DELETE, unix.SYS_SETITIMER, unix.SYS_RESTART_SYSCALL,
	unix.SYS_SET_ROBUST_LIST, unix.SYS_RSEQ, unix.SYS_PRLIMIT64, unix.SYS_MINCORE,
}

// Unpacker is the filter of the process that reads layers of images. Of clone it has what makes a thread.
func Unpacker() []bpf.RawInstruction {
	rules := ruleSet{}
	for _, nr := range unpackerCalls {
		rules[nr] = allow
	}
	rules[unix.SYS_CLONE] = []bpf.Instruction{
		bpf.LoadAbsolute{Off: argLow(0), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: newNamespaces, SkipTrue: 2},
		bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: unix.CLONE_THREAD, SkipFalse: 1},
		allow[0], eperm[0],
	}
	return assemble(rules)
}
