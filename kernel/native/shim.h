// What the files of the shim share; hidden from everybody else.
#ifndef COVE_SHIM_H
#define COVE_SHIM_H

#include <stdint.h>

#pragma GCC visibility push(hidden)

enum { EXIT_SETUP = 71, KERNEL_SOCKET = 3, MAX_CGROUPS = 8, MAX_GROUPS = 64 };

struct sock_filter;

// What a fork is told.
struct request {
    int32_t pidfd, sock, out, err, anchor;
    int32_t ncgroups, cgroups[MAX_CGROUPS];
    uint32_t uid, gid;
    int32_t ngroups;
    uint32_t groups[MAX_GROUPS];
    int64_t nofile;
    const struct sock_filter *filter;
    uint32_t nfilter;
    const char *cwd;
};

extern void (*cove_before_fork)(void), (*cove_after_child)(void), (*cove_after_parent)(void);
extern int *cove_tid_address;

int cove_fork(struct request *r, int *anchor_pidfd, const char **step);
int cove_family(void);
void cove_register_thread(void);
_Noreturn void cove_park(void);

// cove_call is a system call without libc: neither errno nor anything else of this thread's is touched.
static inline __attribute__((always_inline)) long cove_call(long n, long a, long b, long c, long d, long e, long f) {
#if defined(__x86_64__)
    long ret;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(ret) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return ret;
#else
    register long x8 __asm__("x8") = n, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#endif
}

#pragma GCC visibility pop
#endif
