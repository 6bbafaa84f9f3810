// Branching: a running kernel becomes several, each in a sandbox of its own.
//
// A process can only be forked into namespaces below its own, so a branch is not forked: it is a fresh child of the same
// zygote, which shares every page that the kernel has not changed, and into which the rest is copied. Three processes
// take part, none with any privilege:
//   - the kernel calls cove_branch between two cells; it forks its copy and goes on;
//   - the copy stands still and writes the pages it is told into files that the maker gave it, then exits;
//   - the newborn, which waits in cove_become in its new sandbox, rearranges its memory by a plan, reads those files, and
//     goes on where the copy was made: in cove_branch, which then returns 0.
// Only the maker can tell which pages are the same (it compares page frames); it reads no word of the kernel's. What it
// writes and what we read here are the structs below, mirrored in internal/driver/native/maker/memory.go: change both.

#define _GNU_SOURCE
#include "shim.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
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
#include <unistd.h>

enum { BRANCH_MAGIC = 0x6e617262, MAX_FILES = 1024, SIGNALS = 65, STACK = 64 << 10 };

// What is done to a range of memory. The first are for the newborn, COPY and LONG for both.
enum kind {
    UNMAP = 1,    // it has something there and the kernel has not
    ANON,         // map fresh memory; flags
    OPEN,         // map a file of the sandbox: path, off; flags
    PROTECT,      // prot
    DROP,         // forget its own pages
    COPY,         // the copy writes it at off of the pages' file, the newborn reads it from there
    LONG,         // the copy writes it at addr of the long file and says from where (a) to where (b) the newborn maps that
                  // file, so that branches share it; the rest is read
    ALLOW,        // make it accessible for now: prot
};

enum { SHARED = 1, WRITABLE = 2 };

struct op {
    uint32_t kind, prot;
    uint64_t addr, len, off;
    uint64_t a, b; // OPEN: path's offset, flags; ANON: –, flags; LONG: the mapping it is in
};

struct list {
    uint32_t magic, count;
    uint64_t room, room_len; // in a plan: addresses that are free before and after
    uint64_t brk;            // in the pages' file: filled in by the copy
    struct op op[];
};

// ---- what a fork does not copy, or what the newborn does not have

static struct sigaction actions[SIGNALS];
static stack_t alternate;
static sigset_t blocked;
static char name[16];
static int niceness;
static void *point[5]; // where branches go on
static volatile int become_socket;
static volatile uint64_t room_at, room_len;
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
    munmap((void *)room_at, room_len);
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

// ---- the copy

static int64_t send_word(int fd, char word) {
    return send(fd, &word, 1, MSG_NOSIGNAL);
}

// receive_word waits for one byte with descriptors; the byte, or −1.
static int receive_word(int fd, int *fds, int *nfds) {
    char word = 0, control[CMSG_SPACE(8 * sizeof(int))];
    struct iovec iov = {&word, 1};
    struct msghdr m = {0};
    m.msg_iov = &iov;
    m.msg_iovlen = 1;
    m.msg_control = control;
    m.msg_controllen = sizeof control;
    ssize_t n;
    while ((n = recvmsg(fd, &m, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR)
        ;
    *nfds = 0;
    if (n != 1)
        return -1;
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
        *nfds = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(fds, CMSG_DATA(c), *nfds * sizeof(int));
    }
    return (unsigned char)word;
}

static struct list *map_list(int fd, int prot, int flags, void *at, uint64_t *size) {
    struct stat st;
    if (fstat(fd, &st) || (uint64_t)st.st_size < sizeof(struct list))
        return 0;
    struct list *l = mmap(at, st.st_size, prot, flags, fd, 0);
    if (l == MAP_FAILED)
        return 0;
    if (l->magic != BRANCH_MAGIC || l->count > (st.st_size - sizeof *l) / sizeof(struct op)) {
        munmap(l, st.st_size);
        return 0;
    }
    *size = st.st_size;
    return l;
}

static int write_all(int fd, uint64_t addr, uint64_t len, uint64_t off) {
    while (len) {
        ssize_t n = pwrite(fd, (void *)addr, len, off);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return -1;
        addr += n, off += n, len -= n;
    }
    return 0;
}

// chunk is the size of what malloc has mapped at an address, by its header, or 0.
static uint64_t chunk(uint64_t at, uint64_t end) {
    const uint64_t *word = (uint64_t *)at;
    uint64_t size = word[1] & ~7UL;
    return word[0] || (word[1] & 7) != 2 || size < 128 << 10 || size & 4095 || size > end - at ? 0 : size;
}

// choose says which part of a range can become a private mapping of a file. An allocator that drops pages with
// MADV_DONTNEED and then takes them for zeroed would find old bytes again: so only memory whose owner is known not to. That
// is the interpreter's arenas, the heap, and what malloc has mapped, which begins with a header that gives its length.
static void choose(struct op *o) {
    const uint64_t end = o->addr + o->len, first = o->a, last = o->b, before = 2 << 20;
    o->a = o->b = end;
    if (cove_arena_holds(o->addr, o->len) ||
        (cove_heap_start && o->addr >= cove_heap_start && end <= (uint64_t)sbrk(0))) {
        o->a = o->addr;
        return;
    }
    // The range may begin a little behind the header. The page of the header itself stays ordinary memory: mremap then
    // meets two mappings and fails, and realloc copies, instead of growing into what the file does not have.
    uint64_t size;
    for (uint64_t at = o->addr - first < before ? first : o->addr - before; at < end; at += size ? size : 4096) {
        size = chunk(at, last);
        if (!size)
            continue;
        uint64_t from = at + 4096 > o->addr ? at + 4096 : o->addr, to = at + size < end ? at + size : end;
        if (from < to && to - from > o->b - o->a)
            o->a = from, o->b = to;
    }
}

static int write_pages(int fd) {
    uint64_t size;
    struct list *l = map_list(fd, PROT_READ | PROT_WRITE, MAP_SHARED, 0, &size);
    if (!l)
        return -1;
    l->brk = (uint64_t)sbrk(0);
    room_at = l->room, room_len = l->room_len;
    for (uint32_t i = 0; i < l->count; i++) {
        struct op *o = &l->op[i];
        if (o->kind == ALLOW) {
            if (mprotect((void *)o->addr, o->len, PROT_READ | o->prot))
                return -1;
        } else if (o->kind == COPY && write_all(fd, o->addr, o->len, o->off))
            return -1;
    }
    return 0;
}

static int write_long(int list, int file) {
    uint64_t size;
    struct list *l = map_list(list, PROT_READ | PROT_WRITE, MAP_SHARED, 0, &size);
    if (!l)
        return -1;
    for (uint32_t i = 0; i < l->count; i++) {
        struct op *o = &l->op[i];
        if (o->kind != LONG)
            continue;
        if (write_all(file, o->addr, o->len, o->addr))
            return -1;
        choose(o);
    }
    return 0;
}

// be_copy serves the maker until it has all it wants. Limits that code has set on itself are not meant for this.
static void be_copy(int talk) {
    int fds[8], n;
    const int own[] = {RLIMIT_FSIZE, RLIMIT_AS, RLIMIT_DATA, RLIMIT_CPU};
    for (unsigned i = 0; i < sizeof own / sizeof *own; i++) {
        struct rlimit limit;
        if (!getrlimit(own[i], &limit)) {
            limit.rlim_cur = limit.rlim_max;
            setrlimit(own[i], &limit);
        }
    }
    if (send_word(talk, 'R') != 1)
        _exit(0);
    for (;;) {
        int word = receive_word(talk, fds, &n), failed = -1;
        if (word == 'S' && n == 1)
            failed = write_pages(fds[0]);
        else if (word == 'L' && n == 2)
            failed = write_long(fds[0], fds[1]);
        else
            _exit(0);
        for (int i = 0; i < n; i++)
            close(fds[i]);
        if (send_word(talk, failed ? 'E' : 'D') != 1)
            _exit(0);
    }
}

// cove_branch is called by the kernel. It returns the copy's pid there, −errno when there is none, and 0 in each branch.
__attribute__((noinline)) int cove_branch(int talk, int *socket) {
    save_state();
    cove_before_fork();
    if (__builtin_setjmp(point) == 0) {
        // The copy's parent is ours, so that no zombie of it and no signal disturbs what runs here.
        pid_t pid = cove_clone_copy();
        if (pid == 0)
            be_copy(talk);
        int failed = errno;
        cove_after_parent();
        return pid > 0 ? pid : -failed;
    }
    restore_state();
    *socket = become_socket;
    cove_after_child();
    return 0;
}

// ---- the newborn

// Raw system calls: from here on neither errno nor anything else of libc's may be relied upon.
static inline __attribute__((always_inline)) long call(long n, long a, long b, long c, long d, long e, long f) {
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

// What the restorer knows; it lives in the room, like its stack.
struct become {
    struct list *plan, *pages, *longs; // longs may be 0
    int socket, pages_fd, long_fd;
    int file[MAX_FILES]; // by op of the plan that opens one
};

static inline __attribute__((always_inline)) void check(long ret, char what) {
    if (ret >= 0 || ret < -4095)
        return;
    char text[] = "kernel: the branch's memory could not be put together at ?\n";
    text[sizeof text - 3] = what;
    call(SYS_write, 2, (long)text, sizeof text - 1, 0, 0, 0);
    call(SYS_exit_group, EXIT_SETUP, 0, 0, 0, 0, 0);
}

static inline __attribute__((always_inline)) void read_back(int fd, uint64_t addr, uint64_t len, uint64_t off) {
    while (len) {
        long n = call(SYS_pread64, fd, addr, len, off, 0, 0);
        if (n == -EINTR)
            continue;
        check(n ? n : -EIO, 'r');
        addr += n, off += n, len -= n;
    }
}

static __attribute__((noinline, used, optimize("no-stack-protector", "no-tree-loop-distribute-patterns"))) void restore(struct become *b) {
    const long fixed = MAP_PRIVATE | MAP_FIXED;
    call(SYS_brk, b->pages->brk, 0, 0, 0, 0, 0);
    int files = 0;
    for (uint32_t i = 0; i < b->plan->count; i++) {
        const struct op *o = &b->plan->op[i];
        if (o->kind == UNMAP)
            check(call(SYS_munmap, o->addr, o->len, 0, 0, 0, 0), 'u');
        else if (o->kind == ANON) {
            long flags = (o->b & SHARED ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE;
            check(call(SYS_mmap, o->addr, o->len, o->prot, flags, -1, 0), 'a');
        } else if (o->kind == OPEN) {
            long flags = (o->b & SHARED ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED;
            check(call(SYS_mmap, o->addr, o->len, o->prot, flags, b->file[files], o->off), 'f');
            call(SYS_close, b->file[files++], 0, 0, 0, 0, 0);
        } else if (o->kind == DROP)
            check(call(SYS_madvise, o->addr, o->len, MADV_DONTNEED, 0, 0, 0), 'd');
        else if (o->kind == ALLOW)
            check(call(SYS_mprotect, o->addr, o->len, o->prot, 0, 0, 0), 'w');
    }
    for (uint32_t i = 0; i < b->pages->count; i++) {
        const struct op *o = &b->pages->op[i];
        if (o->kind == COPY)
            read_back(b->pages_fd, o->addr, o->len, o->off);
    }
    for (uint32_t i = 0; b->longs && i < b->longs->count; i++) {
        const struct op *o = &b->longs->op[i];
        const uint64_t end = o->addr + o->len;
        uint64_t from = o->a, to = o->b;
        if (from < o->addr || from > to || to > end)
            from = to = end;
        if (from < to)
            check(call(SYS_mmap, from, to - from, PROT_READ | PROT_WRITE, fixed, b->long_fd, from), 'l');
        read_back(b->long_fd, o->addr, from - o->addr, o->addr);
        read_back(b->long_fd, to, end - to, to);
    }
    for (uint32_t i = 0; i < b->plan->count; i++) {
        const struct op *o = &b->plan->op[i];
        if (o->kind == PROTECT)
            check(call(SYS_mprotect, o->addr, o->len, o->prot, 0, 0, 0), 'p');
    }
    call(SYS_close, b->pages_fd, 0, 0, 0, 0, 0);
    if (b->long_fd >= 0)
        call(SYS_close, b->long_fd, 0, 0, 0, 0, 0);
    *cove_tid_address = (int)call(SYS_gettid, 0, 0, 0, 0, 0, 0);
    become_socket = b->socket;
    room_at = b->plan->room, room_len = b->plan->room_len;
    __builtin_longjmp(point, 1);
}

// open_files opens what the plan maps, in its order, while there still is a libc to do it with.
static const char *open_files(struct become *b, uint64_t size) {
    int files = 0;
    for (uint32_t i = 0; i < b->plan->count; i++) {
        const struct op *o = &b->plan->op[i];
        if (o->kind != OPEN)
            continue;
        if (files == MAX_FILES || o->a >= size)
            return "too many files";
        const char *path = (char *)b->plan + o->a;
        int fd = open(path, (o->b & WRITABLE ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
        if (fd < 0)
            return path;
        b->file[files++] = fd;
    }
    return 0;
}

// cove_become makes this process a branch; it returns only to say what is wrong. It first says that it is at rest: from
// then on it changes no page that the plan's maker has compared.
const char *cove_become(int socket) {
    int fds[8], n;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, 0);
    if (send_word(socket, 'N') != 1)
        return "nobody waits for it";
    int word = receive_word(socket, fds, &n);
    if (word != 'G' || n != 2 + 2 * (n == 4))
        return "no plan came";
    struct stat st;
    struct list head;
    if (fstat(fds[0], &st) || pread(fds[0], &head, sizeof head, 0) != sizeof head || head.magic != BRANCH_MAGIC)
        return "the plan cannot be read";
    char *room = mmap((void *)head.room, head.room_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (room != (char *)head.room)
        return "there is no room for the plan";
    // The room: the restorer's stack, what it knows, then the lists.
    struct become *b = (struct become *)(room + STACK);
    char *at = room + STACK + ((sizeof *b + 4095) & ~4095UL);
    struct list **into[3] = {&b->plan, &b->pages, &b->longs};
    uint64_t size[3] = {0};
    for (int i = 0; i < (n == 4 ? 3 : 2); i++) {
        if (fstat(fds[i], &st) || at + st.st_size > room + head.room_len)
            return "the plan is too long";
        *into[i] = map_list(fds[i], PROT_READ, MAP_PRIVATE | MAP_FIXED, at, &size[i]);
        if (!*into[i])
            return "a list cannot be read";
        at += (st.st_size + 4095) & ~4095UL;
    }
    b->socket = socket;
    b->pages_fd = fds[1];
    b->long_fd = n == 4 ? fds[3] : -1;
    const char *wrong = open_files(b, size[0]);
    if (wrong)
        return wrong;
    close(fds[0]);
    if (n == 4)
        close(fds[2]);
#if defined(__x86_64__)
    __asm__ volatile("mov %0, %%rsp\n\txor %%ebp, %%ebp\n\tcall *%1\n\tud2" ::"r"(room + STACK), "r"(restore), "D"(b) : "memory");
#else
    register struct become *x0 __asm__("x0") = b;
    __asm__ volatile("mov sp, %0\n\tblr %1\n\tbrk #0" ::"r"(room + STACK), "r"(restore), "r"(x0) : "memory", "x30");
#endif
    __builtin_unreachable();
}
