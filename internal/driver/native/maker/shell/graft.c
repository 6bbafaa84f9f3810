// What makes the copy of a kernel's memory a kernel in another sandbox.
//
// The maker forks the anchor of a kernel (anchor.go), maps a room into the copy, puts this there and lets it run. The copy
// is as the sandbox left it, but nobody runs in it any more, and of it nothing is used here: neither its code nor its
// stack, its libc or its descriptors. Three take part, all on this memory: the new anchor, which stays outside; its
// helper, which enters the sandbox and is gone; and the helper's child, which gives up all rights there, sees to it that
// it shares nothing with the kernel that it was copied from, and only then goes on in the sandbox's own code.
//
// Linked to a flat file: the first function is at its beginning.

typedef unsigned char u8;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long u64;
typedef long i64;

#define NO_START
#include "syscalls.h"

enum { CLONE_VM = 0x100, CLONE_FILES = 0x400, CLONE_PIDFD = 0x1000, CLONE_VFORK = 0x4000, CLONE_UNTRACED = 0x800000 };
#define NAMESPACES                                                                                                     \
	(CLONE_NEWUSER | CLONE_NEWNS | 0x20000000 /* pid */ | 0x40000000 /* net */ | 0x08000000 /* ipc */ | 0x04000000 /* uts */ | CLONE_NEWCGROUP)
enum { PROT_READ = 1, PROT_WRITE = 2, MAP_SHARED = 1, MAP_PRIVATE = 2, MAP_ANONYMOUS = 32, MREMAP_MAYMOVE = 1, MREMAP_FIXED = 2 };
enum { O_RDWR = 2, O_NOCTTY = 0400, O_NONBLOCK = 04000, SOL_SOCKET = 1, SCM_RIGHTS = 1, PR_SET_DUMPABLE = 4, PR_CAP_AMBIENT = 47, CLEAR_ALL = 4 };
enum { MSG_PEEK = 2, MSG_DONTWAIT = 0x40, ANCHOR_SOCKET = 3, KERNEL_SOCKET = 3, FIRST_FREE = 16, EXIT_SETUP = 71, STACK = 16 << 10 };
enum { FDS = 4, MAX_JOINS = 28 /* mirrored in anchor.go */ };

// Mirrored in anchor.go and memory.go: change both.
struct op {
	u32 kind, prot;
	u64 addr, len;
	u64 off;  // in the file; of SHARE and OWN: how much is copied, the rest is zeros
	u32 path; // from the beginning of this struct graft
	u32 keep; // how many KEEP follow
};
enum {
	SHARE = 1, // what was shared with the other kernel becomes a copy, shared with whom this one forks
	OWN,       // a file that cannot be opened here becomes memory
	OPEN,      // the same file of this sandbox
	OPEN_SHARED,
	KEEP, // of the last OPEN: pages that were written
};

struct graft {
	u64 resume, room, size;
	u64 word; // that the message with our descriptors begins with
	u32 uid, gid;
	u32 filter, filter_len; // where it is; instructions
	u32 ops, ops_len;
	u32 nofile, joins; // 0: as it is; how many cgroups it joins
	i32 pidfd, error;  // told by the helper
	i32 fd[FDS];       // the sandbox's PID 1, socket, standard output, standard error
};

// spawn is clone with a stack for the child, which calls f with g.
i64 spawn(u64 flags, u64 stack, void (*f)(struct graft *), struct graft *g, i32 *pidfd);
#if defined(__x86_64__)
__asm__("spawn: sub $16, %rsi\n mov %rdx, (%rsi)\n mov %rcx, 8(%rsi)\n mov %r8, %rdx\n xor %r10d, %r10d\n xor %r8d, %r8d\n"
	" mov $56, %eax\n syscall\n test %rax, %rax\n jnz 1f\n xor %ebp, %ebp\n pop %rax\n pop %rdi\n call *%rax\n hlt\n1: ret\n");
#define TRAP(value) __asm__ volatile("int3" ::"a"(value) : "memory")
static inline void copy(u64 to, u64 from, u64 len)
{
	len /= 8;
	__asm__ volatile("rep movsq" : "+D"(to), "+S"(from), "+c"(len)::"memory");
}
#else
__asm__("spawn: stp x2, x3, [x1, #-16]!\n mov x2, x4\n mov x3, xzr\n mov x4, xzr\n mov x8, #220\n svc #0\n cbnz x0, 1f\n"
	" mov x29, xzr\n ldp x1, x0, [sp], #16\n blr x1\n brk #0\n1: ret\n");
static inline void trap(i64 value)
{
	register i64 x0 __asm__("x0") = value;
	__asm__ volatile("brk #0" ::"r"(x0) : "memory");
}
#define TRAP(value) trap(value)
static inline void copy(u64 to, u64 from, u64 len)
{
	for (u64 i = 0; i < len; i += 8)
		*(volatile u64 *)(to + i) = *(volatile u64 *)(from + i);
}
#endif

static u64 stack(struct graft *g, int number)
{
	return g->room + g->size - number * STACK;
}

static void check(struct graft *g, i64 ret, char what)
{
	if (ret >= 0 || ret < -4095)
		return;
	char text[] = "kernel: the branch could not be put together at ?\n";
	text[sizeof text - 3] = what;
	sys3(NR_write, g->fd[3], (i64)text, sizeof text - 1);
	sys1(NR_exit_group, EXIT_SETUP);
}

static void drop_privileges(struct graft *g)
{
	u32 group = g->gid;
	check(g, sys2(NR_setgroups, 1, (i64)&group), 'g');
	check(g, sys3(NR_setresgid, g->gid, g->gid, g->gid), 'g');
	for (int cap = 0; cap < 64; cap++) {
		i64 ret = sys5(NR_prctl, PR_CAPBSET_DROP, cap, 0, 0, 0);
		if (ret == -EINVAL)
			break; // beyond the last one this host knows
		check(g, ret, 'b');
	}
	check(g, sys3(NR_setresuid, g->uid, g->uid, g->uid), 'u');
	sys5(NR_prctl, PR_SET_DUMPABLE, 0, 0, 0, 0); // some hosts' fs.suid_dumpable has just set it
	check(g, sys5(NR_prctl, PR_CAP_AMBIENT, CLEAR_ALL, 0, 0, 0), 'a');
	u32 header[2] = {0x20080522, 0};
	u32 none[6] = {0};
	check(g, sys2(NR_capset, (i64)header, (i64)none), 'c');
	check(g, sys5(NR_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 'n');
	struct {
		unsigned short len;
		u64 at;
	} program = {(unsigned short)g->filter_len, (u64)g + g->filter};
	check(g, sys3(NR_seccomp, SECCOMP_SET_MODE_FILTER, 0, (i64)&program), 's');
}

static void arrange_descriptors(struct graft *g)
{
	i64 null = sys4(NR_openat, AT_FDCWD, (i64)"/dev/null", O_RDWR | O_CLOEXEC, 0), high[4];
	for (int i = 1; i < 4; i++)
		check(g, high[i] = sys3(NR_fcntl, g->fd[i], F_DUPFD_CLOEXEC, FIRST_FREE), 'd');
	g->fd[3] = (i32)high[3];
	check(g, null, 'd');
	if (null)
		check(g, sys3(NR_dup3, null, 0, 0), 'd');
	check(g, sys3(NR_dup3, high[2], 1, 0), 'd');
	check(g, sys3(NR_dup3, high[3], 2, 0), 'd');
	g->fd[3] = 2;
	check(g, sys3(NR_dup3, high[1], KERNEL_SOCKET, O_CLOEXEC), 'd');
	check(g, sys3(NR_close_range, KERNEL_SOCKET + 1, ~0U, 0), 'd');
}

static i64 map(u64 len, u32 flags, i64 fd, u64 off)
{
	return sys6(NR_mmap, 0, len, PROT_READ | (flags & MAP_SHARED && fd >= 0 ? 0 : PROT_WRITE), flags, fd, off);
}

// part ends whatever this memory has in common with that of the other kernel: shared memory, which the anchor copies while
// the other still stands, and its sandbox's files, which the kernel opens where it is then.
static void part(struct graft *g, int files)
{
	const struct op *o = (struct op *)((u64)g + g->ops), *end = o + g->ops_len;
	while (o < end) {
		i64 fd = -1, at;
		if (files != (o->kind == OPEN || o->kind == OPEN_SHARED)) {
			o += 1 + o->keep;
			continue;
		}
		u32 flags = o->kind == SHARE || o->kind == OPEN_SHARED ? MAP_SHARED : MAP_PRIVATE;
		if (o->kind == OPEN || o->kind == OPEN_SHARED) {
			const int how = o->kind == OPEN_SHARED && o->prot & PROT_WRITE ? O_RDWR : 0;
			fd = sys4(NR_openat, AT_FDCWD, (i64)g + o->path, how | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0);
			check(g, fd, 'o');
		} else
			flags |= MAP_ANONYMOUS;
		check(g, at = map(o->len, flags, fd, fd < 0 ? 0 : o->off), 'm');
		if (fd < 0) {
			check(g, sys3(NR_mprotect, o->addr, o->len, PROT_READ), 'r');
			copy(at, o->addr, o->off);
		} else
			sys1(NR_close, fd);
		const struct op *first = o;
		for (u32 i = 0; i < first->keep; i++) {
			o++;
			check(g, sys3(NR_mprotect, o->addr, o->len, PROT_READ), 'r');
			copy(at + (o->addr - first->addr), o->addr, o->len);
		}
		check(g, sys5(NR_mremap, at, first->len, first->len, MREMAP_MAYMOVE | MREMAP_FIXED, first->addr), 'v');
		check(g, sys3(NR_mprotect, first->addr, first->len, first->prot), 'p');
		o++;
	}
}

static void be_kernel(struct graft *g)
{
	drop_privileges(g);
	arrange_descriptors(g);
	part(g, 1);
	u64 files[2] = {g->nofile, g->nofile};
	if (g->nofile)
		sys4(NR_prlimit64, 0, RLIMIT_NOFILE, (i64)files, 0);
	sys0(NR_setsid);
	sys1(NR_umask, 022);
	check(g, sys1(NR_chdir, (i64)"/"), 'w');
	// The first word of the maker's: by then it has done all it wants to do with this memory.
	char word;
	if (sys6(NR_recvfrom, KERNEL_SOCKET, (i64)&word, 1, MSG_PEEK, 0, 0) != 1)
		sys1(NR_exit_group, EXIT_SETUP);
	// Only now: until here the sandbox's other processes could not look into this one.
	sys5(NR_prctl, PR_SET_DUMPABLE, 1, 0, 0, 0);
	((void (*)(u64, u64))g->resume)(g->room, g->size);
}

static void help(struct graft *g)
{
	i64 ret = sys2(NR_setns, g->fd[0], NAMESPACES);
	if (ret >= 0)
		ret = spawn(CLONE_VM | CLONE_PARENT | CLONE_UNTRACED | CLONE_PIDFD, stack(g, 2), be_kernel, g, &g->pidfd);
	if (ret < 0)
		g->error = (i32)ret;
	sys1(NR_exit, 0);
}

// join makes this process one of the cgroup of a descriptor. A thread that moves itself does not wait for every fork on the
// host to finish, as one that is moved does; in version 2 of cgroups it does so too.
static i64 join(i32 fd)
{
	i64 ret = sys3(NR_write, fd, (i64)"0", 1);
	sys1(NR_close, fd);
	return ret;
}

// receive takes the descriptors that are meant for this copy, and has it join its cgroups; older ones were for others that did
// not come to take them.
static i64 receive(struct graft *g)
{
	for (;;) {
		u64 word = 0;
		struct {
			void *at;
			u64 len;
		} part = {&word, sizeof word};
		struct {
			u64 len;
			i32 level, type;
			i32 fd[FDS + MAX_JOINS];
		} control;
		control.len = 0;
		struct {
			void *name;
			u32 name_len;
			void *parts;
			u64 part_count;
			void *control;
			u64 control_len;
			i32 flags;
		} m = {0, 0, &part, 1, &control, sizeof control, 0};
		i64 n = sys3(NR_recvmsg, ANCHOR_SOCKET, (i64)&m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
		if (n <= 0)
			return n ? n : -EINVAL;
		u64 head = sizeof control - sizeof control.fd, count = 0;
		if (control.len > head && control.len <= sizeof control && control.type == SCM_RIGHTS)
			count = (control.len - head) / sizeof control.fd[0];
		const int mine = n == sizeof word && word == g->word && count == FDS + g->joins;
		i64 ret = 0;
		for (u64 i = 0; i < count; i++)
			if (!mine)
				sys1(NR_close, control.fd[i]);
			else if (i < FDS)
				g->fd[i] = control.fd[i];
			else if (ret >= 0)
				ret = join(control.fd[i]);
		if (mine)
			return ret;
	}
}

// begin is run by the new anchor. It stops twice: to say how it went, and when it holds nothing any more.
__attribute__((section(".text.begin"), used)) void begin(struct graft *g)
{
	sys5(NR_prctl, PR_SET_DUMPABLE, 0, 0, 0, 0); // the other kernel was
	i64 ret = receive(g);
	if (ret >= 0) {
		part(g, 0);
		ret = spawn(CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_PARENT | CLONE_UNTRACED, stack(g, 1), help, g, 0);
	}
	if (ret >= 0)
		ret = g->error ? g->error : g->pidfd;
	TRAP(ret);
	sys3(NR_close_range, 0, ANCHOR_SOCKET - 1, 0);
	sys3(NR_close_range, ANCHOR_SOCKET + 1, ~0U, 0);
	for (;;)
		TRAP(0);
}
