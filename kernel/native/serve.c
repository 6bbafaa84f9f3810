// How the zygote waits: for orders to fork and to adopt, which it carries out here, and for the ends of its children, which
// it tells.
//
// None of it is Python. Between two forks the interpreter would write to some 130 pages all over its memory, each of them
// shared with a child: every one is copied again, and each huge page with one in it has to be forked in 512 pieces from then
// on. What is written here is a few pages, and what has to be remembered lies in memory that no fork copies.

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shim.h"

#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

enum { FORK = 'F', ADOPT = 'A', MAX_CHILDREN = 1 << 15, MAX_STRAYS = 256, MAX_TOKEN = 63, MAX_PATH = 4096, MAX_DESCRIPTORS = 16, FIXED_DESCRIPTORS = 4 };

// An order to fork, little-endian. The groups follow it, then the token, then where the kernel works, to the end.
struct order {
    uint8_t kind, ahead, ngroups, ntoken;
    uint32_t uid, gid, nofile;
};
_Static_assert(sizeof(struct order) == 16, "the maker writes it byte by byte");

// An order to tell the end of a child that somebody else made in our name, little-endian. The token follows it, to the end.
struct adoption {
    uint8_t kind, unused[3];
    int32_t pid;
};
_Static_assert(sizeof(struct adoption) == 8, "the maker writes it byte by byte");

// Children that somebody knows by a token, and ended ones that nobody knows yet: helpers, anchors, and branches that we
// are told of later.
static struct family {
    int high; // no child is at or above it
    pid_t pids[MAX_CHILDREN];
    char tokens[MAX_CHILDREN][MAX_TOKEN + 1];
    unsigned next;
    struct {
        pid_t pid;
        int status;
    } strays[MAX_STRAYS];
} *family;

// cove_family makes the memory for them, which is empty in every child and costs what is used of it.
int cove_family(void) {
    family = mmap(0, sizeof *family, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (family == MAP_FAILED || madvise(family, sizeof *family, MADV_WIPEONFORK))
        return -3;
    return 0;
}

static int find(pid_t pid) {
    for (int i = 0; i < family->high; i++)
        if (family->pids[i] == pid)
            return i;
    return -1;
}

static int full(void) { return family->high == MAX_CHILDREN && find(0) < 0; }

// What a token is made of: it goes into messages as it is.
static int usable(const char *token, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!((token[i] | 32) >= 'a' && (token[i] | 32) <= 'z') && !(token[i] >= '0' && token[i] <= '9'))
            return 0;
    return n > 0 && n <= MAX_TOKEN;
}

// know gives a child its token; a number that was known before is another's now. There is room: see full.
static void know(pid_t pid, const char *token) {
    int i = find(pid);
    if (i < 0)
        i = find(0);
    if (i < 0)
        i = family->high++;
    family->pids[i] = pid;
    strcpy(family->tokens[i], token);
}

// stray gives how a child ended that nobody had named, and forgets it; zero where there was none.
static int stray(pid_t pid, int *status) {
    for (int i = 0; i < MAX_STRAYS; i++)
        if (family->strays[i].pid == pid) {
            family->strays[i].pid = 0;
            *status = family->strays[i].status;
            return 1;
        }
    return 0;
}

int cove_children(void) {
    int n = 0;
    for (int i = 0; i < family->high; i++)
        n += family->pids[i] != 0;
    return n;
}

// say sends a message, with descriptors or without.
static void say(int control, const int *fds, int nfds, const char *form, ...) {
    char text[512];
    va_list list;
    va_start(list, form);
    int n = vsnprintf(text, sizeof text, form, list);
    va_end(list);
    struct iovec v = {text, n < (int)sizeof text ? n : (int)sizeof text - 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(2 * sizeof(int))];
    } rights;
    if (nfds) {
        m.msg_control = &rights, m.msg_controllen = CMSG_SPACE(nfds * sizeof(int));
        memset(&rights, 0, sizeof rights);
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(nfds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, nfds * sizeof(int));
    }
    ssize_t sent;
    while ((sent = sendmsg(control, &m, MSG_NOSIGNAL)) < 0 && errno == EINTR)
        ;
    if (sent < 0)
        _exit(0); // nobody to tell
}

static const char no_token[] = "the token is none, a long one, or of something else than letters and digits", no_room[] = "there are too many children";

static void say_failed(int control, const char *token, const char *why) {
    say(control, 0, 0, "{\"type\":\"failed\",\"token\":\"%s\",\"error\":\"%s\"}", token, why);
}

static void tell_end(int control, const char *token, int status) {
    static const char *const names[] = {"", "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM",
        "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS"};
    if (!WIFSIGNALED(status)) {
        say(control, 0, 0, "{\"type\":\"exit\",\"token\":\"%s\",\"code\":%d}", token, WEXITSTATUS(status));
        return;
    }
    unsigned number = WTERMSIG(status);
    char name[16];
    if (number < sizeof names / sizeof *names)
        snprintf(name, sizeof name, "SIG%s", names[number]);
    else
        snprintf(name, sizeof name, "signal %u", number);
    say(control, 0, 0, "{\"type\":\"exit\",\"token\":\"%s\",\"code\":-1,\"signal\":\"%s\"}", token, name);
}

static void reap(int control) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        int i = find(pid);
        if (i < 0) {
            int older;
            stray(pid, &older); // that had the same number
            unsigned at = family->next++ % MAX_STRAYS;
            family->strays[at].pid = pid, family->strays[at].status = status;
            continue;
        }
        family->pids[i] = 0;
        tell_end(control, family->tokens[i], status);
    }
}

// An order as it came.
struct received {
    union {
        struct order head;
        char data[sizeof(struct order) + MAX_GROUPS * sizeof(uint32_t) + 255 + MAX_PATH];
    };
    ssize_t size;
    int fds[MAX_DESCRIPTORS], nfds;
};

// receive takes a message; false where it did not come whole.
static int receive(int control, struct received *r) {
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(MAX_DESCRIPTORS * sizeof(int))];
    } rights;
    struct iovec v = {r->data, sizeof r->data - 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = &rights, .msg_controllen = sizeof rights};
    while ((r->size = recvmsg(control, &m, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR)
        ;
    r->nfds = 0;
    if (r->size < 0)
        return 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            r->nfds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(r->fds, CMSG_DATA(c), r->nfds * sizeof(int));
        }
    return !(m.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
}

// understand makes a request of an order; what is wrong with it, or nothing. The token is empty until it is known.
static const char *understand(struct received *in, int whole, struct request *out, char token[MAX_TOKEN + 1]) {
    const struct order *o = &in->head;
    if (in->size < (ssize_t)sizeof *o)
        return "the order is cut off";
    size_t groups = o->ngroups * sizeof(uint32_t), before = sizeof *o + groups + o->ntoken;
    if ((size_t)in->size < before)
        return "the order is cut off";
    const char *name = in->data + sizeof *o + groups;
    if (!usable(name, o->ntoken))
        return no_token;
    memcpy(token, name, o->ntoken);
    token[o->ntoken] = 0;
    if (!whole)
        return "the order did not come whole";
    if (o->ngroups > MAX_GROUPS)
        return "there are too many groups";
    if (in->nfds < FIXED_DESCRIPTORS || in->nfds > FIXED_DESCRIPTORS + MAX_CGROUPS)
        return "this is not the right number of descriptors";
    if (full())
        return no_room;
    out->sock = in->fds[0], out->out = in->fds[1], out->err = in->fds[2], out->pidfd = in->fds[3];
    out->ncgroups = in->nfds - FIXED_DESCRIPTORS;
    memcpy(out->cgroups, in->fds + FIXED_DESCRIPTORS, out->ncgroups * sizeof(int));
    out->uid = o->uid, out->gid = o->gid, out->nofile = o->nofile, out->ngroups = o->ngroups;
    memcpy(out->groups, in->data + sizeof *o, groups);
    in->data[in->size] = 0;
    out->cwd = in->data[before] ? in->data + before : "/";
    return 0;
}

// carry_out forks what an order asks for; false in the child. What came with it is closed.
static int carry_out(int control, struct received *in, int whole, struct request *request) {
    char token[MAX_TOKEN + 1] = "";
    const char *wrong = understand(in, whole, request, token);
    const char *step = "";
    int fds[2] = {-1, -1};
    pid_t pid = -EINVAL;
    if (!wrong) {
        pid = cove_fork(request, &fds[1], &step);
        if (pid == 0)
            return 0;
        if (pid > 0) {
            know(pid, token);
            fds[0] = (int)syscall(SYS_pidfd_open, pid, 0); // nobody but us can reap it: the number still means the same process
        }
    }
    if (wrong)
        say_failed(control, token, wrong);
    else if (pid < 0)
        say(control, 0, 0, "{\"type\":\"failed\",\"token\":\"%s\",\"error\":\"%s: %s\"}", token, step, strerror(-pid));
    else if (fds[0] < 0) {
        say(control, 0, 0, "{\"type\":\"failed\",\"token\":\"%s\",\"error\":\"pidfd: %s\"}", token, strerror(errno));
        kill(pid, SIGKILL); // nobody would have it
        syscall(SYS_pidfd_send_signal, fds[1], SIGKILL, 0, 0);
    } else
        say(control, fds, 2, "{\"type\":\"forked\",\"token\":\"%s\",\"pid\":%d}", token, pid);
    for (int i = 0; i < 2; i++)
        if (pid > 0 && fds[i] >= 0)
            close(fds[i]);
    for (int i = 0; i < in->nfds; i++)
        close(in->fds[i]);
    return 1;
}

// adopt notes a branch of one of our kernels, which is our child too: its end is told like that of any other.
static void adopt(int control, const struct received *in) {
    const struct adoption *o = (const struct adoption *)in->data;
    for (int i = 0; i < in->nfds; i++)
        close(in->fds[i]);
    ssize_t length = in->size - (ssize_t)sizeof *o;
    const char *name = in->data + sizeof *o;
    if (length < 0 || !usable(name, length)) {
        say_failed(control, "", no_token);
        return;
    }
    char token[MAX_TOKEN + 1] = "";
    memcpy(token, name, length);
    int status = 0;
    stray(o->pid, &status);
    siginfo_t there;
    if (waitid(P_PID, o->pid, &there, WEXITED | WNOHANG | WNOWAIT) && errno == ECHILD)
        tell_end(control, token, status);
    else if (full() && find(o->pid) < 0)
        say_failed(control, token, no_room);
    else
        know(o->pid, token); // ours, and not reaped yet: what was known by that number was another
}

// cove_serve returns 1 when there is a message that is no order of these, or none will come any more, and 0 in a child,
// which is then inside its sandbox. While it waits the interpreter is as it has to be for a fork.
int cove_serve(int control, int wake, int anchor, const struct sock_filter *filter, uint32_t nfilter, int *ahead) {
    cove_before_fork();
    for (;;) {
        struct pollfd ready[2] = {{control, POLLIN, 0}, {wake, POLLIN, 0}};
        if (poll(ready, 2, -1) < 0) {
            if (errno != EINTR)
                _exit(EXIT_SETUP);
            reap(control); // the interpreter's handler has also said so on wake, unless a library has taken that away
            continue;
        }
        if (ready[1].revents) {
            char said[256];
            while (read(wake, said, sizeof said) == sizeof said)
                ;
            reap(control);
        }
        if (!ready[0].revents)
            continue;
        char first;
        ssize_t n = recv(control, &first, 1, MSG_PEEK);
        if (n < 0 && errno == EINTR)
            continue;
        if (n != 1 || (first != FORK && first != ADOPT))
            break;
        struct received order;
        int whole = receive(control, &order);
        if (first == ADOPT) {
            adopt(control, &order);
            continue;
        }
        struct request request = {.anchor = anchor, .filter = filter, .nfilter = nfilter};
        if (!carry_out(control, &order, whole, &request)) {
            *ahead = order.head.ahead;
            return 0;
        }
    }
    cove_after_parent();
    return 1;
}
