// Branching: a running kernel becomes several, each in a sandbox of its own.
//
// A process can only be forked into namespaces below its own, so the kernel does not fork itself: its anchor is forked
// (see shim.c), from outside the sandbox, by the maker. Here is the kernel's part. Between two cells it calls cove_branch,
// which keeps what a fork would lose, says that it stands still, and waits until it may go on. Whoever copied the memory
// meanwhile goes on in cove_resume, as another process, in another sandbox.

#define _GNU_SOURCE
#include "shim.h"
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SIGNALS = 65 };

// ---- what a fork does not copy, or what the anchor does not have

static struct sigaction actions[SIGNALS];
static stack_t alternate;
static sigset_t blocked;
static char name[16];
static int niceness;
static void *point[5]; // where branches go on
static void *room;     // what the maker mapped into a branch to put it together
static unsigned long room_size;
static uint32_t float_state;

static void save_state(void) {
    for (int i = 1; i < SIGNALS; i++)
        sigaction(i, 0, &actions[i]);
    sigaltstack(0, &alternate);
    sigprocmask(SIG_SETMASK, 0, &blocked);
    prctl(PR_GET_NAME, name, 0, 0, 0);
    niceness = getpriority(PRIO_PROCESS, 0);
#if defined(__x86_64__)
    __asm__ volatile("stmxcsr %0" : "=m"(float_state));
#endif
}

static void restore_state(void) {
    munmap(room, room_size);
    cove_register_thread();
    for (int i = 1; i < SIGNALS; i++)
        if (i != SIGKILL && i != SIGSTOP)
            sigaction(i, &actions[i], 0); // glibc refuses its own two, which nobody can have set
    if (!(alternate.ss_flags & SS_DISABLE))
        sigaltstack(&alternate, 0);
    prctl(PR_SET_NAME, name, 0, 0, 0);
    setpriority(PRIO_PROCESS, 0, niceness);
#if defined(__x86_64__)
    __asm__ volatile("ldmxcsr %0" ::"m"(float_state));
#endif
    sigprocmask(SIG_SETMASK, &blocked, 0);
}

// stand says that memory may be copied now, and waits until it was, or will not be.
static void stand(int talk) {
    char word = 'R';
    if (send(talk, &word, 1, MSG_NOSIGNAL) == 1)
        while (recv(talk, &word, 1, 0) < 0 && errno == EINTR)
            ;
}

// cove_branch is called by the kernel. It returns 1 there, and 0 in each branch, whose socket is KERNEL_SOCKET.
__attribute__((noinline)) int cove_branch(int talk) {
    save_state();
    cove_before_fork();
    if (__builtin_setjmp(point) == 0) {
        stand(talk);
        cove_after_parent();
        return 1;
    }
    restore_state();
    cove_after_child();
    return 0;
}

int cove_branch_socket(void) { return KERNEL_SOCKET; }

// cove_resume is where the maker has a branch begin: on a stack in the room, with every signal blocked.
static __attribute__((noinline, used)) _Noreturn void cove_resume(void *at, unsigned long size) {
    room = at, room_size = size;
    *cove_tid_address = (int)cove_call(SYS_set_tid_address, (long)cove_tid_address, 0, 0, 0, 0, 0);
    __builtin_longjmp(point, 1);
}

// cove_park is where an anchor stays. The maker stops it here, takes its registers as those of every call that it will
// order, and never lets it go on by itself; cove_resume is in one of them.
_Noreturn void cove_park(void) {
    for (;;) {
#if defined(__x86_64__)
        long ret;
        register long r10 __asm__("r10") = 0, r8 __asm__("r8") = 0;
        __asm__ volatile("syscall" : "=a"(ret) : "a"(SYS_ppoll), "D"(0), "S"(0), "d"(0), "r"(r10), "r"(r8), "b"(cove_resume) : "rcx", "r11", "memory");
#else
        register long x8 __asm__("x8") = SYS_ppoll, x0 __asm__("x0") = 0, x1 __asm__("x1") = 0, x2 __asm__("x2") = 0;
        register long x3 __asm__("x3") = 0, x4 __asm__("x4") = 0, x19 __asm__("x19") = (long)cove_resume;
        __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x19) : "memory");
#endif
    }
}
