// The zygote's shim: forks a kernel straight into a sandbox, and arranges memory so that the fork is cheap.
//
// A kernel is two processes that share one memory: the kernel itself, inside the sandbox, and its anchor, which stays
// where the zygote is, holds no descriptor but one socket and never runs again. What cannot be done from inside, to fork
// this memory into another sandbox, can be done from there: see branch.c and the maker's anchor.go, which keeps every
// anchor stopped from before its kernel hears of anybody.
//
// libc only and no Python headers: the few functions of the interpreter that are needed are found by name at run time,
// so one build serves every Python. Loaded with ctypes.PyDLL (the GIL is held throughout); amd64 and arm64.

#define _GNU_SOURCE
#undef _FORTIFY_SOURCE // its longjmp refuses to leave the helper's stack, which is exactly what we do
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <poll.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shim.h"

#ifndef PR_GET_TID_ADDRESS
#define PR_GET_TID_ADDRESS 40
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef SYS_rseq
#if defined(__x86_64__)
#define SYS_rseq 334
#else
#define SYS_rseq 293
#endif
#endif

#define NAMESPACES                                                                                                     \
    (CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)

enum { SHIM_VERSION = 5, ANCHOR_SOCKET = 3 };

void (*cove_before_fork)(void), (*cove_after_child)(void), (*cove_after_parent)(void);
int *cove_tid_address;
static void *robust_head;
static size_t robust_length;

int cove_version(void) { return SHIM_VERSION; }

// cove_init finds what a fork needs; 0, or a negative number where this interpreter or host cannot do it.
int cove_init(void) {
    cove_before_fork = dlsym(RTLD_DEFAULT, "PyOS_BeforeFork");
    cove_after_child = dlsym(RTLD_DEFAULT, "PyOS_AfterFork_Child");
    cove_after_parent = dlsym(RTLD_DEFAULT, "PyOS_AfterFork_Parent");
    if (!cove_before_fork || !cove_after_child || !cove_after_parent)
        return -1;
    // glibc keeps its thread id where the kernel clears it at thread exit; a raw clone has to write the new one there.
    if (prctl(PR_GET_TID_ADDRESS, &cove_tid_address, 0, 0, 0) || !cove_tid_address)
        return -2;
    syscall(SYS_get_robust_list, 0, &robust_head, &robust_length);
    return cove_family();
}

// --- fork ------------------------------------------------------------------------------------------------------------

static jmp_buf back;
static const struct request *want;
static int report_fd; // where the anchor tells how it went
static sigset_t usual; // the signals that are blocked in the zygote: none
static pid_t zygote;
static struct report {
    int32_t pid, error;
    char step[8];
} told;
static char anchor_stack[16 << 10] __attribute__((aligned(64)));
static char helper_stack[16 << 10] __attribute__((aligned(64)));
static char kernel_stack[16 << 10] __attribute__((aligned(64)));

#define TOP(stack) (stack + sizeof stack)

static int be_kernel(void *unused) {
    (void)unused;
    _longjmp(back, 1);
}

// The helper shares the anchor's memory, so it costs no page tables; only it changes namespaces. Its child is the kernel:
// CLONE_PARENT makes that the zygote's, which then hears of its end, and the jump puts it on the stack of cove_fork.
//
// clone and not clone3: its flags travel in registers, where the filter sees that none of them makes a namespace.
static int helper(void *unused) {
    (void)unused;
    strcpy(told.step, "setns");
    if (setns(want->pidfd, NAMESPACES)) {
        told.error = errno;
        syscall(SYS_exit, 1);
    }
    strcpy(told.step, "clone");
    const int flags = CLONE_VM | CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID;
    pid_t p = clone(be_kernel, TOP(kernel_stack), flags, 0, 0, 0, cove_tid_address);
    if (p < 0)
        told.error = errno;
    told.pid = p;
    syscall(SYS_exit, 0);
    return 0;
}

static void set_rseq(int flags);

// The anchor runs on a stack of its own, beside the kernel. It leaves nothing of this thread registered with the host,
// since that would be the kernel's.
static int anchor(void *unused) {
    (void)unused;
    struct request r = *want;
    const int report = report_fd;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, 0);
    // One that nobody has come to hold yet hears of nothing else that could end it.
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (getppid() != zygote)
        _exit(EXIT_SETUP);
    set_rseq(1); // unregister; the maker looks whether that was so
    syscall(SYS_set_robust_list, 0, robust_length);
    strcpy(told.step, "cgroup");
    for (int i = 0; i < r.ncgroups && !told.error; i++)
        if (write(r.cgroups[i], "0", 1) != 1)
            told.error = errno;
    if (!told.error) {
        strcpy(told.step, "clone");
        if (clone(helper, TOP(helper_stack), CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_PARENT, 0) < 0)
            told.error = errno;
    }
    struct report mine = told;
    // The kernel runs from here on, on the same memory: raw calls only, and nothing but this stack.
    cove_call(SYS_write, report, (long)&mine, sizeof mine, 0, 0, 0);
    if (mine.error || mine.pid <= 0)
        cove_call(SYS_exit_group, EXIT_SETUP, 0, 0, 0, 0, 0);
    cove_call(SYS_dup3, r.anchor, ANCHOR_SOCKET, 0, 0, 0, 0);
    cove_call(SYS_close_range, 0, ANCHOR_SOCKET - 1, 0, 0, 0, 0);
    cove_call(SYS_close_range, ANCHOR_SOCKET + 1, ~0U, 0, 0, 0, 0);
    cove_park();
}

// set_rseq registers this thread's area for restartable sequences with the host, or takes that back.
static void set_rseq(int flags) {
    ptrdiff_t *offset = dlsym(RTLD_DEFAULT, "__rseq_offset");
    unsigned *size = dlsym(RTLD_DEFAULT, "__rseq_size");
    if (!offset || !size || !*size)
        return;
#if defined(__x86_64__)
    char *self;
    __asm__("mov %%fs:0, %0" : "=r"(self));
    uint32_t signature = 0x53053053;
#else
    char *self = __builtin_thread_pointer();
    uint32_t signature = 0xd428bc00;
#endif
    uint32_t *area = (uint32_t *)(self + *offset);
    // What glibc has registered is at least 32 bytes, and more than it says that it uses.
    for (unsigned long length = 32; length <= 512; length += 32)
        if (length >= *size && !syscall(SYS_rseq, area, length, flags, signature))
            return;
    if (!flags)
        area[1] = (uint32_t)-2; // RSEQ_CPU_ID_REGISTRATION_FAILED: sched_getcpu then asks the kernel
}

// A raw clone that shares memory loses what glibc registered with the host for this thread.
void cove_register_thread(void) {
    if (robust_head)
        syscall(SYS_set_robust_list, robust_head, robust_length);
    set_rseq(0);
}

static void fail(const struct request *r, const char *step) {
    dprintf(r->err, "kernel: %s: %s\n", step, strerror(errno));
    _exit(EXIT_SETUP);
}

static void drop_privileges(const struct request *r) {
    if (setgroups(r->ngroups, r->groups))
        fail(r, "setgroups");
    if (setresgid(r->gid, r->gid, r->gid))
        fail(r, "setresgid");
    // The bounding set can only be lowered while there are capabilities, which setresuid may take.
    for (int cap = 0; cap < 64; cap++)
        if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0)) {
            if (errno == EINVAL)
                break; // beyond the last one this host knows
            fail(r, "drop bounding set");
        }
    if (setresuid(r->uid, r->uid, r->uid))
        fail(r, "setresuid");
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); // some hosts' fs.suid_dumpable has just set it
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct d[2];
    memset(d, 0, sizeof d);
    if (syscall(SYS_capset, &h, d))
        fail(r, "capset");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        fail(r, "no_new_privs");
    if (r->nfilter) {
        struct sock_fprog program = {r->nfilter, (struct sock_filter *)r->filter};
        if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program))
            fail(r, "seccomp");
    }
}

// After this only 0, 1, 2 and the kernel's socket are open; all that fails before can still be told on r->err.
static void arrange_descriptors(struct request *r) {
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    // Move ours out of the way of 0 to 3 first.
    int sock = fcntl(r->sock, F_DUPFD_CLOEXEC, 16), out = fcntl(r->out, F_DUPFD_CLOEXEC, 16);
    int err = fcntl(r->err, F_DUPFD_CLOEXEC, 16);
    if (sock < 0 || out < 0 || err < 0)
        fail(r, "duplicate descriptors");
    r->err = err;
    if ((null >= 0 && dup2(null, 0) < 0) || dup2(out, 1) < 0 || dup2(err, 2) < 0 ||
        dup3(sock, KERNEL_SOCKET, O_CLOEXEC) < 0)
        fail(r, "dup2");
    r->err = 2;
    if (syscall(SYS_close_range, KERNEL_SOCKET + 1, ~0U, 0))
        for (int fd = KERNEL_SOCKET + 1; fd < 65536; fd++)
            close(fd);
}

static void settle(struct request *r) {
    cove_register_thread();
    drop_privileges(r); // the cgroup is the anchor's
    arrange_descriptors(r);
    setsid();
    umask(022);
    if (chdir(r->cwd) && chdir("/"))
        fail(r, "chdir");
    struct rlimit limit;
    if (r->nofile > 0 && !getrlimit(RLIMIT_NOFILE, &limit)) {
        if ((rlim_t)r->nofile < limit.rlim_max)
            limit.rlim_max = r->nofile;
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

// cove_visible lets the sandbox's other processes look at this one; setns and setresuid had cleared it. The caller has
// heard from the maker: until then they could write to the memory of an anchor that is not stopped yet.
void cove_visible(void) { prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); }

// same_as_expected reads what agentapi.KernelBirth looks like when there is no more in it than that, and a limit of open files.
static int same_as_expected(const char *text, const char *end, long *open_files) {
    static const char files[] = "{\"open_files\":", same[] = "\"same\":true}";
    *open_files = 0;
    if (!strncmp(text, files, sizeof files - 1)) {
        char *after;
        *open_files = strtol(text + sizeof files - 1, &after, 10);
        if (*open_files <= 0 || *after != ',')
            return 0;
        text = after + 1;
    } else if (*text++ != '{') {
        return 0;
    }
    return !strcmp(text, same) && text + sizeof same - 1 == end;
}

// cove_born waits, in a kernel that has prepared for what most callers want, for the frame that says whose it is. Where that is as
// expected, it does here what is left, says what it was given to say and waits for the first request: in Python the same would
// touch so much memory that whoever waits would wait far longer. 0: the frame is another one, and still to be read.
int cove_born(int sock, const void *ready, size_t length) {
    enum { HEADER = 8, CONTROL = 8 };
    static const char zeros[6];
    char frame[HEADER + 128];
    long open_files;
    ssize_t n;
    while ((n = recv(sock, frame, sizeof frame - 1, MSG_PEEK)) < 0 && errno == EINTR)
        ;
    if (n < HEADER || frame[0] != CONTROL || memcmp(frame + 1, zeros, sizeof zeros))
        return 0;
    ssize_t whole = HEADER + (unsigned char)frame[HEADER - 1]; // a request may be behind it
    if (whole > n)
        return 0;
    frame[whole] = 0;
    if (!same_as_expected(frame + HEADER, frame + whole, &open_files) || recv(sock, frame, whole, 0) != whole)
        return 0;
    cove_visible();
    if (open_files > 0) {
        struct rlimit limit;
        if (!getrlimit(RLIMIT_NOFILE, &limit)) {
            if (limit.rlim_max == RLIM_INFINITY || limit.rlim_max > (rlim_t)open_files)
                limit.rlim_max = open_files;
            limit.rlim_cur = limit.rlim_max;
            setrlimit(RLIMIT_NOFILE, &limit);
        }
    }
    if (send(sock, ready, length, MSG_NOSIGNAL) == (ssize_t)length) { // whoever left is found out by the next read
        struct pollfd asked = {sock, POLLIN, 0};
        poll(&asked, 1, -1); // a signal ends it: Python knows what to do with one
    }
    return 1;
}

// cove_fork forks a kernel into the sandbox of r->pidfd. Its pid, 0 in the child, or −errno; *step then says where. The
// interpreter has been told that a fork comes, and is told of it in the child.
int cove_fork(struct request *r, int *anchor_pidfd, const char **step) {
    int report[2];
    want = r;
    memset(&told, 0, sizeof told);
    *step = told.step;
    strcpy(told.step, "pipe");
    if (pipe2(report, O_CLOEXEC))
        return -errno;
    report_fd = report[1];
    strcpy(told.step, "clone");
    sigprocmask(SIG_SETMASK, 0, &usual);
    zygote = getpid();
    if (_setjmp(back) == 0) {
        // No memory is shared with us: a fork that goes on elsewhere.
        pid_t a = clone(anchor, TOP(anchor_stack), CLONE_PIDFD | SIGCHLD, 0, anchor_pidfd);
        int failed = errno;
        close(report[1]);
        ssize_t n = 0;
        while (a > 0 && (n = read(report[0], &told, sizeof told)) < 0 && errno == EINTR)
            ; // the helper's end is told by a signal
        if (n != sizeof told)
            told.error = ECHILD;
        close(report[0]);
        if (a < 0)
            return -failed;
        if (told.error || told.pid <= 0) {
            close(*anchor_pidfd);
            return told.error ? -told.error : -ECHILD;
        }
        return told.pid;
    }
    sigprocmask(SIG_SETMASK, &usual, 0); // it was born with the anchor's
    cove_after_child();
    settle(r);
    return 0;
}

// --- memory ----------------------------------------------------------------------------------------------------------

enum { HUGE = 2 << 20, ARENA_ROOM = 1 << 30, MAX_FREE = 1024 };

struct arena_allocator {
    void *context;
    void *(*alloc)(void *, size_t);
    void (*free)(void *, void *, size_t);
};

static char *room;
static size_t used, arena_size;
static void *returned[MAX_FREE];
static int nreturned;

// Arenas are 1 MiB (256 KiB before Python 3.10). Since 3.12 the interpreter's frame stacks, of other sizes, come from
// here, too; they are short-lived and mapped as ever.
static void *arena_alloc(void *context, size_t n) {
    (void)context;
    if (!arena_size && n >= 256 << 10)
        arena_size = n;
    if (nreturned && n == arena_size)
        return returned[--nreturned];
    if (n == arena_size && used + n <= ARENA_ROOM) {
        used += n;
        return room + used - n;
    }
    void *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? 0 : p;
}

static void arena_free(void *context, void *p, size_t n) {
    (void)context;
    char *at = p;
    if (at >= room && at < room + ARENA_ROOM && n == arena_size && nreturned < MAX_FREE) {
        madvise(p, n, MADV_DONTNEED);
        returned[nreturned++] = p;
    } else
        munmap(p, n); // also what Python itself mapped before us
}

// cove_arena gives the interpreter's small objects one contiguous place and keeps large ones in one heap, so that both
// can be collapsed into huge pages later. Before the imports.
int cove_arena(void) {
    void (*set)(struct arena_allocator *) = dlsym(RTLD_DEFAULT, "PyObject_SetArenaAllocator");
    if (!set)
        return -1;
    char *m = mmap(0, ARENA_ROOM + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m == MAP_FAILED)
        return -errno;
    room = (char *)(((uintptr_t)m + HUGE - 1) & ~((uintptr_t)HUGE - 1));
    struct arena_allocator a = {0, arena_alloc, arena_free};
    set(&a);
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TOP_PAD, 8 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    return 0;
}

// cove_arena_done gives malloc its usual behaviour back for the children. What they add to the arena stays on small
// pages: khugepaged would otherwise rebuild, privately and in each of them, the huge pages that their writes split.
void cove_arena_done(void) {
    if (room)
        madvise(room, ARENA_ROOM, MADV_NOHUGEPAGE);
    mallopt(M_MMAP_THRESHOLD, 128 << 10);
    mallopt(M_TOP_PAD, 128 << 10);
    mallopt(M_TRIM_THRESHOLD, 128 << 10);
}

// cove_fill takes what is free inside the heap, largest first, and never gives it back: children then allocate from its
// untouched end, where a page is zeroed, instead of from holes, where a page of ours is copied. The bytes taken.
long cove_fill(void) {
    char *end = sbrk(0);
    long taken = 0;
    for (size_t size = 64 << 10; size >= 16; size = size > 1024 ? size / 2 : size - 16)
        for (;;) {
            char *p = malloc(size - 8);
            if (!p)
                return taken;
            if (p + size + (256 << 10) >= end || p > (char *)sbrk(0)) { // the end, or a mapping of its own
                free(p);
                break;
            }
            taken += size;
        }
    return taken;
}

static int collapse_range(uintptr_t from, uintptr_t to) {
    int done = 0;
    for (uintptr_t at = from; at < to; at += HUGE) {
        unsigned char in[512];
        int resident = 0;
        if (mincore((void *)at, HUGE, in))
            continue;
        for (int i = 0; i < 512; i++)
            resident += in[i] & 1;
        if (resident < 64)
            continue;
        done += madvise((void *)at, HUGE, MADV_COLLAPSE) == 0;
    }
    return done;
}

// cove_collapse turns what is resident of our anonymous memory into huge pages (Linux ≥ 6.1), so that a fork copies one
// entry where it copied 512. The number of huge pages, or −1.
int cove_collapse(void) {
    static struct {
        uintptr_t from, to;
    } found[2048];
    int n = 0, done = 0;
    char line[1024];
    FILE *f = fopen("/proc/self/maps", "re");
    if (!f)
        return -1;
    while (n < 2048 && fgets(line, sizeof line, f)) {
        unsigned long from, to, inode;
        char mode[8], name[256] = "";
        if (sscanf(line, "%lx-%lx %7s %*x %*s %lu %255s", &from, &to, mode, &inode, name) < 4)
            continue;
        if (strcmp(mode, "rw-p") || inode || !strncmp(name, "[stack", 6) || !strncmp(name, "[v", 2))
            continue;
        found[n].from = (from + HUGE - 1) & ~((uintptr_t)HUGE - 1);
        found[n].to = to & ~((uintptr_t)HUGE - 1);
        n += found[n].from < found[n].to;
    }
    fclose(f);
    for (int i = 0; i < n; i++)
        done += collapse_range(found[i].from, found[i].to);
    return done;
}

// --- immortal objects ------------------------------------------------------------------------------------------------

// Offsets into objects that zygote.py has checked against the running interpreter before it calls us.
struct layout {
    int32_t type_flags, type_traverse, type_is_gc;
    int32_t ncode, code[12];   // objects that a code object holds
    const void *code_type;
    int32_t nskip;             // frames, generators and the like: short-lived by nature
    const void *skip[8];
};

#define TYPE_OF(o) (((void **)(o))[1])
#define AT(o, offset, kind) (*(kind *)((char *)(o) + (offset)))
#define HAVE_GC (1UL << 14)

static void **stack, **seen;
static size_t depth, stack_room, seen_room, nseen;

static size_t slot(void **table, size_t room_of_table, void *o) {
    size_t k = ((uintptr_t)o >> 4) * 0x9E3779B97F4A7C15ull >> 20 & (room_of_table - 1);
    while (table[k] && table[k] != o)
        k = (k + 1) & (room_of_table - 1);
    return k;
}

static void *fresh(size_t words) {
    void *p = mmap(0, words * sizeof(void *), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        abort();
    return p;
}

static void grow_seen(void) {
    size_t old_room = seen_room;
    void **old = seen;
    seen_room = old_room ? old_room * 2 : 1 << 16;
    seen = fresh(seen_room);
    for (size_t i = 0; i < old_room; i++)
        if (old[i])
            seen[slot(seen, seen_room, old[i])] = old[i];
    if (old)
        munmap(old, old_room * sizeof(void *));
}

static int visit(void *o, void *unused) {
    (void)unused;
    if (!o)
        return 0;
    if (nseen * 2 >= seen_room)
        grow_seen();
    size_t k = slot(seen, seen_room, o);
    if (seen[k])
        return 0;
    seen[k] = o;
    nseen++;
    if (depth == stack_room) {
        size_t room_now = stack_room ? stack_room * 2 : 1 << 16;
        void **bigger = fresh(room_now);
        if (stack) {
            memcpy(bigger, stack, depth * sizeof(void *));
            munmap(stack, stack_room * sizeof(void *));
        }
        stack = bigger;
        stack_room = room_now;
    }
    stack[depth++] = o;
    return 0;
}

static int skipped(const struct layout *l, void *type) {
    for (int i = 0; i < l->nskip; i++)
        if (type == l->skip[i])
            return 1;
    return 0;
}

// cove_immortalise walks from the given objects and makes everything it reaches immortal (Python 3.12 and 3.13: a
// reference count of 2^32−1 is never written again), so that children read it without copying its page.
long cove_immortalise(void **objects, long n, const struct layout *l) {
    long changed = 0;
    for (long i = 0; i < n; i++)
        visit(objects[i], 0);
    while (depth) {
        void *o = stack[--depth], *type = TYPE_OF(o);
        visit(type, 0);
        if (skipped(l, type))
            continue;
        int (*traverse)(void *, int (*)(void *, void *), void *) = AT(type, l->type_traverse, void *);
        int (*is_gc)(void *) = AT(type, l->type_is_gc, void *);
        if (traverse && AT(type, l->type_flags, unsigned long) & HAVE_GC && (!is_gc || is_gc(o)))
            traverse(o, visit, 0);
        if (type == l->code_type)
            for (int i = 0; i < l->ncode; i++)
                visit(AT(o, l->code[i], void *), 0);
        if ((int32_t)AT(o, 0, int64_t) >= 0) {
            AT(o, 0, int64_t) = 0xFFFFFFFF;
            changed++;
        }
    }
    munmap(seen, seen_room * sizeof(void *));
    munmap(stack, stack_room * sizeof(void *));
    seen = stack = 0;
    seen_room = stack_room = nseen = 0;
    return changed;
}
