// System calls of amd64 and arm64 without a libc.
#pragma once

#if defined(__x86_64__)
static inline i64 sys6(i64 n, i64 a, i64 b, i64 c, i64 d, i64 e, i64 f)
{
	i64 ret;
	register i64 r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
	__asm__ volatile("syscall" : "=a"(ret) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return ret;
}
#ifndef NO_START
__asm__(".globl _start\n_start: xor %rbp, %rbp\n mov %rsp, %rdi\n and $-16, %rsp\n call run\n hlt\n");
#endif
enum {
	NR_write = 1, NR_close = 3, NR_mmap = 9, NR_mprotect = 10, NR_mremap = 25, NR_exit = 60, NR_capget = 125, NR_capset = 126, NR_close_range = 436, NR_rt_sigaction = 13, NR_rt_sigprocmask = 14, NR_ioctl = 16, NR_socket = 41, NR_recvfrom = 45, NR_clone = 56, NR_recvmsg = 47, NR_execve = 59, NR_fcntl = 72, NR_chdir = 80, NR_fchdir = 81, NR_umask = 95,
	NR_setsid = 112, NR_setgroups = 116, NR_setresuid = 117, NR_setresgid = 119, NR_pivot_root = 155, NR_prctl = 157, NR_mount = 165,
	NR_umount2 = 166, NR_sethostname = 170, NR_exit_group = 231, NR_openat = 257, NR_mkdirat = 258, NR_unshare = 272, NR_dup3 = 292, NR_prlimit64 = 302,
	NR_setns = 308, NR_seccomp = 317, NR_execveat = 322, NR_open_tree = 428, NR_move_mount = 429, NR_openat2 = 437, NR_unlinkat = 263, NR_getrandom = 318,
};
#elif defined(__aarch64__)
static inline i64 sys6(i64 n, i64 a, i64 b, i64 c, i64 d, i64 e, i64 f)
{
	register i64 x8 __asm__("x8") = n;
	register i64 x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c, x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
	__asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
}
#ifndef NO_START
__asm__(".globl _start\n_start: mov x29, #0\n mov x30, #0\n mov x0, sp\n bl run\n brk #0\n");
#endif
enum {
	NR_exit = 93, NR_capget = 90, NR_capset = 91, NR_mremap = 216, NR_mmap = 222, NR_mprotect = 226, NR_close_range = 436, NR_fcntl = 25, NR_dup3 = 24, NR_ioctl = 29, NR_mkdirat = 34, NR_umount2 = 39, NR_mount = 40, NR_pivot_root = 41, NR_chdir = 49, NR_fchdir = 50,
	NR_openat = 56, NR_close = 57, NR_write = 64, NR_exit_group = 94, NR_unshare = 97, NR_setresuid = 147, NR_setresgid = 149, NR_setsid = 157,
	NR_rt_sigaction = 134, NR_rt_sigprocmask = 135, NR_setgroups = 159, NR_sethostname = 161, NR_umask = 166, NR_prctl = 167, NR_socket = 198, NR_recvfrom = 207, NR_clone = 220, NR_recvmsg = 212, NR_execve = 221,
	NR_prlimit64 = 261, NR_setns = 268, NR_seccomp = 277, NR_execveat = 281, NR_open_tree = 428, NR_move_mount = 429, NR_openat2 = 437, NR_unlinkat = 35, NR_getrandom = 278,
};
#else
#error "unknown architecture"
#endif

#define sys5(n, a, b, c, d, e) sys6(n, a, b, c, d, e, 0)
#define sys4(n, a, b, c, d) sys6(n, a, b, c, d, 0, 0)
#define sys3(n, a, b, c) sys6(n, a, b, c, 0, 0, 0)
#define sys2(n, a, b) sys6(n, a, b, 0, 0, 0, 0)
#define sys1(n, a) sys6(n, a, 0, 0, 0, 0, 0)
#define sys0(n) sys6(n, 0, 0, 0, 0, 0, 0)

#if defined(__x86_64__)
enum { O_DIRECTORY = 0200000, O_NOFOLLOW = 0400000 };
#else
enum { O_DIRECTORY = 040000, O_NOFOLLOW = 0100000 };
#endif
enum { EAGAIN = 11, O_WRONLY = 01, O_CREAT = 0100, O_EXCL = 0200, O_PATH = 010000000, O_CLOEXEC = 02000000, RESOLVE_NO_MAGICLINKS = 2, RESOLVE_NO_SYMLINKS = 4, RESOLVE_BENEATH = 8, RESOLVE_IN_ROOT = 16, OPEN_TREE_CLONE = 1 };
enum { ENOENT = 2, EINVAL = 22 };
enum { AT_FDCWD = -100, AT_EMPTY_PATH = 0x1000, MOVE_MOUNT_F_EMPTY_PATH = 4, MOVE_MOUNT_T_EMPTY_PATH = 0x40, MSG_CMSG_CLOEXEC = 0x40000000, F_DUPFD_CLOEXEC = 1030 };
enum { MS_RDONLY = 1, MS_NOSUID = 2, MS_NODEV = 4, MS_NOEXEC = 8, MS_REMOUNT = 32, MS_BIND = 4096, MS_REC = 16384, MS_PRIVATE = 1 << 18, MNT_DETACH = 2 };
enum { AF_INET = 2, SOCK_DGRAM = 2, SOCK_CLOEXEC = 02000000, SIOCSIFFLAGS = 0x8914, IFF_UP = 1, IFF_RUNNING = 0x40 };
enum { RLIMIT_CORE = 4, RLIMIT_NOFILE = 7, SIG_SETMASK = 2 };
enum { PR_CAPBSET_DROP = 24, PR_SET_NO_NEW_PRIVS = 38, SECCOMP_SET_MODE_FILTER = 1, CLONE_NEWCGROUP = 0x02000000, CLONE_PARENT = 0x8000, CLONE_NEWUSER = 0x10000000, CLONE_NEWNS = 0x00020000 };
