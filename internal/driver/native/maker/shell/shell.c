// shell: the steps between the birth of a sandbox's first process and the start of its agent, or of a zygote.
//
// The maker clones this program into fresh namespaces and sends it one plan with descriptors. It runs alone there, in
// one thread, before any code of a template or a user: that is why it is not Go. It needs no libc: it is 10 KiB,
// starts in a fifth of a millisecond and touches a few pages. Every step that fails is named to the maker.
//
// The layout of struct plan is mirrored in plan.go; a test compares their sizes.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long u64;
typedef long i64;

#include "syscalls.h"

#define SOCK 3
#define MAX_TREES 8
#define MAX_FILTER 1024
#define MAX_MOUNTS 16
#define MAX_TARGET 248
#define MAX_FDS 253 // as many as a message carries

enum { MODE_SANDBOX = 1, MODE_ZYGOTE = 2, MODE_REROOT = 3 };
enum { STORAGE_GIVEN = 0, STORAGE_TMPFS = 1 };

struct tree {
	u32 first, count; // directories, uppermost first
	char target[MAX_TARGET]; // path inside, without the leading slash; empty for the root
};

struct plan {
	u32 mode, storage, volatile_, nofile;
	u32 layers, trees, cgroups, filter_len;
	u32 uid, gid, argc, images; // images are the first of the layers: each has a layer of every tree
	u32 work, mounts;           // which of the two work directories of every tree
	u64 bound, heir, tmpfs_bytes;
	char base[256];
	char hostname[64];
	struct tree tree[MAX_TREES];
	char argv[1024];
	u64 filter[MAX_FILTER];
	char mount[MAX_MOUNTS][MAX_TARGET]; // places for what the sandbox's owner wants there, without the leading slash
};

struct report {
	char step[60];
	u32 err;
};

static struct plan plan;
static int fds[MAX_FDS];
static int sock;
static int base = -1; // where the new file tree is put together
static int root = -1; // of that tree
static int boot_id = -1; // a file to be mounted there

// ---- the little of a C library that is needed

void *memset(void *d, int c, u64 n) { for (u8 *p = d; n--;) *p++ = (u8)c; return d; }
void *memcpy(void *d, const void *s, u64 n) { u8 *p = d; const u8 *q = s; while (n--) *p++ = *q++; return d; }
static u64 len(const char *s) { u64 n = 0; while (s[n]) n++; return n; }
static char *put(char *at, const char *s) { u64 n = len(s); memcpy(at, s, n + 1); return at + n; }
static char *put_number(char *at, u64 v)
{
	char digits[24]; int n = 0;
	do digits[n++] = (char)('0' + v % 10); while (v /= 10);
	while (n) *at++ = digits[--n];
	*at = 0;
	return at;
}

static void die(const char *step, i64 ret)
{
	struct report r;
	memset(&r, 0, sizeof r);
	u64 n = len(step);
	memcpy(r.step, step, n < sizeof r.step - 1 ? n : sizeof r.step - 1);
	r.err = (u32)-ret;
	sys3(NR_write, sock, (i64)&r, sizeof r);
	sys1(NR_exit_group, 111);
}

static i64 must(const char *step, i64 ret)
{
	if (ret < 0) die(step, ret);
	return ret;
}

// ---- receiving the plan

struct iov { void *base; u64 len; };
struct msg { void *name; u32 namelen; struct iov *iov; u64 iovlen; void *control; u64 controllen; int flags; };
struct cmsg { u64 len; int level, type; };

static int receive(void)
{
	static u8 control[sizeof(struct cmsg) + MAX_FDS * sizeof(int)] __attribute__((aligned(8)));
	struct iov iov = { &plan, sizeof plan };
	struct msg m = { 0, 0, &iov, 1, control, sizeof control, 0 };
	i64 n = must("receive plan", sys3(NR_recvmsg, sock, (i64)&m, MSG_CMSG_CLOEXEC));
	if (n != sizeof plan) die("plan has another size", -EINVAL);
	struct cmsg *c = (struct cmsg *)control;
	if (m.controllen < sizeof *c) die("plan without descriptors", -EINVAL);
	u64 count = (c->len - sizeof *c) / sizeof(int);
	memcpy(fds, control + sizeof *c, count * sizeof(int));
	return (int)count;
}

// ---- mounting

static i64 mount(const char *src, const char *at, const char *type, u64 flags, const char *data)
{
	return sys5(NR_mount, (i64)src, (i64)at, (i64)type, (i64)flags, (i64)data);
}

static i64 move(int fd, const char *at)
{
	return sys5(NR_move_mount, fd, (i64)"", AT_FDCWD, (i64)at, MOVE_MOUNT_F_EMPTY_PATH);
}

static i64 make_dir(const char *path, u32 mode) { return sys3(NR_mkdirat, AT_FDCWD, (i64)path, mode); }

static char *layer_path(char *at, u32 i) { return put_number(put(at, "l/"), i); }

// ---- names in the new root
//
// What is there was written by others: a snapshot may have a link in every place. We are still outside, where a link would
// lead through the host's own files. So every name is looked up with the new root as the root, and what is mounted there is
// mounted on what was found: by descriptor, or on the working directory.

static i64 open_in(int tree, const char *name, u64 flags)
{
	struct { u64 flags, mode, resolve; } how = { O_PATH | O_CLOEXEC | flags, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS };
	// A ".." in a link is not followed while somebody mounts, and neighbours do all the time.
	i64 fd = -EAGAIN;
	for (int tries = 0; fd == -EAGAIN && tries < 1000; tries++)
		fd = sys4(NR_openat2, tree, (i64)name, (i64)&how, sizeof how);
	return fd;
}

static void refuse(const char *name, i64 ret)
{
	static char step[300];
	put(put(put(step, "/"), name), " of the new root");
	die(step, ret);
}

// place_in finds a directory. A link in its last name is refused: two places must not be one, and none the root itself.
static int place_in(int tree, const char *name)
{
	i64 fd = open_in(tree, name, O_DIRECTORY | O_NOFOLLOW);
	if (fd < 0) refuse(name, fd);
	return (int)fd;
}

static void stand_in(int tree, const char *name) { must("chdir", sys1(NR_fchdir, place_in(tree, name))); }
static void stand_in_base(void) { must("chdir base", sys1(NR_fchdir, base)); }

static void mount_at(const char *name, const char *type, u64 flags, const char *data)
{
	stand_in(root, name);
	i64 ret = mount(type, ".", type, flags, data);
	if (ret < 0) refuse(name, ret);
	stand_in_base();
}

// attach moves a mount, given by its descriptor or by a path of ours.
static void attach(int fd, const char *path, const char *name)
{
	i64 ret = sys5(NR_move_mount, fd, (i64)path, place_in(root, name), (i64)"", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
	if (ret < 0) refuse(name, ret);
}

static int single(const struct tree *t) { return plan.mode == MODE_ZYGOTE && t->count + plan.images == 1; }

static void mount_tree(u32 index)
{
	static char options[4096]; // the most that mount takes; 200 layers need less than half
	const struct tree *t = &plan.tree[index];
	if (single(t)) {
		// An overlay of one layer and nothing above is refused; the layer itself is read-only already.
		must("move single layer", move(fds[t->first], "r"));
		return;
	}
	char *o = put(options, "lowerdir=");
	for (u32 i = 0; i < plan.images; i++)
		o = put(put_number(put(layer_path(o, i), "/"), index), "/u:");
	for (u32 i = 0; i < t->count; i++)
		o = put(layer_path(o, t->first + i), ":");
	o--; // after the last there is none
	u64 flags = MS_NODEV | MS_NOSUID;
	if (plan.mode != MODE_ZYGOTE) {
		o = put_number(put(o, ",upperdir=s/"), index);
		o = put_number(put(o, "/u,workdir=s/"), index);
		o = put(o, plan.work ? "/x" : "/w");
		if (plan.volatile_) o = put(o, ",volatile");
	} else {
		flags |= MS_RDONLY;
	}
	put(o, ",userxattr");
	must("mount overlay", mount("overlay", "r", "overlay", flags, options));
}

// mount_trees begins with the root, in which the others have their places. Each is first mounted at r, on top of the root.
static void mount_trees(void)
{
	for (u32 i = 0; i < plan.trees; i++) {
		mount_tree(i);
		if (plan.tree[i].target[0])
			attach(AT_FDCWD, "r", plan.tree[i].target);
		else
			root = (int)must("open root", sys4(NR_openat, AT_FDCWD, (i64)"r", O_PATH | O_DIRECTORY | O_CLOEXEC, 0));
	}
}

static void mount_layers(void)
{
	char at[32];
	for (u32 i = 0; i < plan.images; i++) {
		layer_path(at, i);
		must("move image", move(fds[i], at));
	}
	for (u32 i = 0; i < plan.trees; i++) {
		const struct tree *t = &plan.tree[i];
		if (single(t)) continue;
		for (u32 k = 0; k < t->count; k++) {
			layer_path(at, t->first + k);
			must("move layer", move(fds[t->first + k], at));
		}
	}
}

static void make_tmpfs_state(void)
{
	char options[64], at[32];
	put_number(put(options, "mode=0755,size="), plan.tmpfs_bytes);
	must("mount state", mount("tmpfs", "s", "tmpfs", MS_NODEV | MS_NOSUID, options));
	for (u32 i = 0; i < plan.trees; i++) {
		char *end = put_number(put(at, "s/"), i);
		must("make state", make_dir(at, 0755));
		put(end, "/u");
		must("make upper", make_dir(at, 0755));
		put(end, "/w");
		must("make work", make_dir(at, 0755));
	}
}

// step_into opens one directory by one name. No link is followed: the name that somebody asked for is then the place where
// the mount is, and nothing of the template or image leads it elsewhere.
static i64 step_into(int dir, const char *name)
{
	struct { u64 flags, mode, resolve; } how = { O_PATH | O_CLOEXEC | O_DIRECTORY, 0, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS };
	return sys4(NR_openat2, dir, (i64)name, (i64)&how, sizeof how);
}

// make_target finds the place of a mount, name by name. What is missing is made, in the layer that is the sandbox's own.
static i64 make_target(const char *path)
{
	static char name[MAX_TARGET];
	i64 at = root;
	while (*path) {
		u64 n = 0;
		while (path[n] && path[n] != '/') n++;
		memcpy(name, path, n);
		name[n] = 0;
		path += path[n] ? n + 1 : n;
		i64 next = step_into((int)at, name);
		if (next == -ENOENT) {
			sys3(NR_mkdirat, at, (i64)name, 0755);
			next = step_into((int)at, name);
		}
		if (at != root) sys1(NR_close, at);
		if (next < 0) return next;
		at = next;
	}
	return at;
}

// mount_asked mounts what the sandbox's owner asked for. Before /dev, /proc and our own: those lie above it whatever it is.
static void mount_asked(int first)
{
	static char step[32];
	for (u32 i = 0; i < plan.mounts; i++) {
		i64 ret = make_target(plan.mount[i]);
		if (ret == root) ret = -EINVAL;
		if (ret >= 0) ret = sys5(NR_move_mount, fds[first + (int)i], (i64)"", ret, (i64)"", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
		put_number(put(step, "mount "), i);
		must(step, ret);
	}
}

// Files of /proc that tell of the host or act on it. What this kernel does not have is not there to hide.
static const char *const hidden_files[] = {
	"kcore", "keys", "key-users", "timer_list", "kallsyms", "interrupts", "softirqs", "sysrq-trigger", "kmsg", "kpagecount",
	"kpageflags", "kpagecgroup", "vmallocinfo", "slabinfo", "iomem", "ioports", "modules", "mtrr", "pagetypeinfo",
	"sched_debug", "cmdline", "consoles", "zoneinfo", "buddyinfo", "crypto", "devices", "misc", "latency_stats", "config.gz", "version_signature", "vmcore", "diskstats", "partitions", "swaps", 0
};
static const char *const hidden_dirs[] = { "acpi", "scsi", "bus", "irq", "fs", "driver", "asound", "pressure", "dynamic_debug", 0 };

static void mount_proc(void)
{
	char hidden[300], empty[300];
	u64 flags = MS_NOSUID | MS_NODEV | MS_NOEXEC;
	if (plan.mode == MODE_ZYGOTE) {
		mount_at("proc", "proc", flags, "subset=pid,hidepid=invisible");
		return;
	}
	mount_at("proc", "proc", flags, 0);
	stand_in(root, "proc"); // from here on all names are the kernel's and ours
	put(put(hidden, plan.base), "/c/hidden");
	put(put(empty, plan.base), "/c/empty");
	for (int i = 0; hidden_files[i]; i++) {
		i64 ret = mount(hidden, hidden_files[i], 0, MS_BIND, 0);
		if (ret < 0 && ret != -ENOENT) die("hide a file of proc", ret);
	}
	for (int i = 0; hidden_dirs[i]; i++) {
		i64 ret = mount(empty, hidden_dirs[i], 0, MS_BIND, 0);
		if (ret < 0 && ret != -ENOENT) die("hide a directory of proc", ret);
	}
	// What is not there to hide and what is not there to hide it with look the same above.
	must("find what hides", sys4(NR_openat, AT_FDCWD, (i64)hidden, O_PATH | O_CLOEXEC, 0));
	must("bind proc/sys", mount("sys", "sys", 0, MS_BIND, 0));
	must("freeze proc/sys", mount(0, "sys", 0, MS_BIND | MS_REMOUNT | MS_RDONLY | flags, 0));
	must("mount boot id", move(boot_id, "sys/kernel/random/boot_id"));
	sys1(NR_close, boot_id);
	stand_in_base();
}

// bind_names: names are asked of the maker's resolver, whatever the template or image says; some have no such file. A link
// is usual there, and leads to a file of the new root or to none.
static void bind_names(int cove, const char *file)
{
	i64 at = open_in(root, "etc/resolv.conf", 0);
	if (at == -ENOENT) return;
	if (at < 0) refuse("etc/resolv.conf", at);
	i64 names = must("clone resolv.conf", sys3(NR_open_tree, cove, (i64)file, OPEN_TREE_CLONE | O_CLOEXEC));
	i64 ret = sys5(NR_move_mount, names, (i64)"", at, (i64)"", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
	if (ret < 0) refuse("etc/resolv.conf", ret);
}

// make_places: a template or snapshot may lack them; the layer is the sandbox's own. Where they are, nothing happens.
static void make_places(void)
{
	if (plan.mode == MODE_SANDBOX) {
		sys3(NR_mkdirat, root, (i64)"dev", 0755);
		sys3(NR_mkdirat, root, (i64)"proc", 0555);
		sys3(NR_mkdirat, root, (i64)"run", 0755);
		sys3(NR_mkdirat, root, (i64)"sys", 0555);
	} else {
		mount_at("run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=64k");
	}
	i64 run = open_in(root, "run", O_DIRECTORY);
	if (run < 0) refuse("run", run);
	sys3(NR_mkdirat, run, (i64)"cove", 0755);
}

// make_boot_id makes a file with an id of its own, which a sandbox has instead of its host's. It is a file of the sandbox's
// /dev/shm, which loses its name there, and only root of the sandbox may write it: its agent does, when a boot ends.
static int make_boot_id(void)
{
	static const char digits[] = "0123456789abcdef";
	u8 random[16];
	char text[37];
	u32 n = 0;
	must("random", sys3(NR_getrandom, (i64)random, sizeof random, 0));
	random[6] = (u8)((random[6] & 0x0f) | 0x40); // version 4, as the kernel's is
	random[8] = (u8)((random[8] & 0x3f) | 0x80);
	for (u32 i = 0; i < sizeof random; i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10) text[n++] = '-';
		text[n++] = digits[random[i] >> 4];
		text[n++] = digits[random[i] & 15];
	}
	text[n++] = '\n';
	int file = (int)must("make boot id", sys4(NR_openat, AT_FDCWD, (i64)"shm/boot_id", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0444));
	must("write boot id", sys3(NR_write, file, (i64)text, n));
	int mounted = (int)must("clone boot id", sys3(NR_open_tree, AT_FDCWD, (i64)"shm/boot_id", OPEN_TREE_CLONE | O_CLOEXEC));
	sys1(NR_close, file);
	return mounted;
}

static void mount_dev(int dev)
{
	attach(dev, "", "dev");
	must("chdir dev", sys1(NR_fchdir, dev));
	must("mount shm", mount("tmpfs", "shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=256m"));
	must("mount pts", mount("devpts", "pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,max=256"));
	if (plan.mode == MODE_SANDBOX) boot_id = make_boot_id();
	stand_in_base();
}

static void mount_rest(int dev, int cove)
{
	make_places();
	mount_dev(dev);
	// All sandboxes share this tree. An overlay gives each its own inodes, so that none can watch or lock another's.
	must("move cove", move(cove, "c"));
	must("mount cove", mount("overlay", "c", "overlay", MS_RDONLY | MS_NOSUID | MS_NODEV, "lowerdir=c:e"));
	mount_proc();
	// Not before: a file without a name cannot be mounted.
	if (boot_id >= 0) must("unlink boot id", sys3(NR_unlinkat, dev, (i64)"shm/boot_id", 0));
	bind_names(AT_FDCWD, "c/resolv.conf");
	attach(AT_FDCWD, "c", "run/cove");
	if (plan.mode == MODE_ZYGOTE) mount_at("tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=64m");
}

static void enter_root(void)
{
	must("chdir root", sys1(NR_chdir, (i64)"r"));
	must("pivot", sys2(NR_pivot_root, (i64)".", (i64)"."));
	must("leave old root", sys2(NR_umount2, (i64)".", MNT_DETACH));
	must("chdir /", sys1(NR_chdir, (i64)"/"));
}

static void become(u32 uid, u32 gid);

// keep moves a mount of the old root to the same name in the new one.
static int keep(int old, const char *name)
{
	int from = place_in(old, name);
	attach(from, "", name);
	return from;
}

// reroot gives a sandbox that nobody lives in yet another file tree: the same layers below another disk. Whoever is in it,
// its agent and a kernel that waits, has the new root when this is done. /sys is empty in every sandbox: the old one's is
// where the new tree is put together.
static void reroot(int state, int sandbox)
{
	char at[32];
	must("enter sandbox", sys2(NR_setns, sandbox, CLONE_NEWUSER | CLONE_NEWNS));
	become(0, 0);
	int old = (int)must("open old root", sys4(NR_openat, AT_FDCWD, (i64)"/", O_PATH | O_DIRECTORY | O_CLOEXEC, 0));
	stand_in(old, "sys");
	must("mount workplace", mount("tmpfs", ".", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0700,size=256k"));
	stand_in(old, "sys"); // in what is mounted there now
	make_dir("l", 0755); make_dir("s", 0755); make_dir("r", 0755);
	for (u32 i = 0; i < plan.layers; i++) {
		layer_path(at, i);
		must("make place for a layer", make_dir(at, 0755));
	}
	mount_layers();
	must("move state", move(state, "s"));
	mount_trees(); // of a disk that a sandbox ran on: every place is there
	keep(old, "dev");
	keep(old, "proc");
	bind_names(keep(old, "run/cove"), "resolv.conf");
	enter_root();
	sys1(NR_exit_group, 0);
}

// ---- identity and limits

static void loopback_up(void)
{
	struct { char name[16]; short flags; char rest[22]; } r;
	i64 s = sys3(NR_socket, AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (s < 0) return;
	memset(&r, 0, sizeof r);
	put(r.name, "lo");
	r.flags = IFF_UP | IFF_RUNNING;
	sys3(NR_ioctl, s, SIOCSIFFLAGS, (i64)&r);
	sys1(NR_close, s);
}

static void set_limit(int what, u64 value)
{
	u64 limit[2] = { value, value };
	must("limit", sys4(NR_prlimit64, 0, what, (i64)limit, 0));
}

// bequeath has capabilities pass the exec that the bounding set will not have. Whoever gets them gives up passing them on.
static void bequeath(void)
{
	u32 header[2] = { 0x20080522, 0 }, sets[6]; // version 3; effective, permitted and inheritable, low words first
	must("read capabilities", sys2(NR_capget, (i64)header, (i64)sets));
	sets[2] = (u32)plan.heir;
	sets[5] = (u32)(plan.heir >> 32);
	must("set capabilities", sys2(NR_capset, (i64)header, (i64)sets));
}

static void drop_bounding(void)
{
	if (plan.heir) bequeath(); // before: what the bounding set lacks cannot be made inheritable
	for (int cap = 0; cap < 64; cap++) {
		if (plan.bound >> cap & 1) continue;
		i64 ret = sys5(NR_prctl, PR_CAPBSET_DROP, cap, 0, 0, 0);
		if (ret == -EINVAL) break; // past the last capability of this kernel
		must("drop bounding set", ret);
	}
}

static void become(u32 uid, u32 gid)
{
	must("setgroups", sys2(NR_setgroups, 0, 0));
	must("setgid", sys3(NR_setresgid, gid, gid, gid));
	must("setuid", sys3(NR_setresuid, uid, uid, uid));
}

static void filter(void)
{
	struct { unsigned short len; u64 *filter; } program = { (unsigned short)plan.filter_len, plan.filter };
	must("no_new_privs", sys5(NR_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	must("seccomp", sys3(NR_seccomp, SECCOMP_SET_MODE_FILTER, 0, (i64)&program));
}

static void join_cgroups(int first)
{
	for (u32 i = 0; i < plan.cgroups; i++)
		must("join cgroup", sys3(NR_write, fds[first + (int)i], (i64)"0", 1));
	if (plan.mode == MODE_SANDBOX)
		must("cgroup namespace", sys1(NR_unshare, CLONE_NEWCGROUP));
}

// usual_signals gives every signal its usual meaning: what whoever started the maker ignores would stay ignored.
static void usual_signals(void)
{
	u64 action[4] = { 0, 0, 0, 0 }, none = 0;
	for (int number = 1; number <= 64; number++)
		sys4(NR_rt_sigaction, number, (i64)action, 0, 8); // SIGKILL and SIGSTOP refuse, and need nothing
	must("signal mask", sys4(NR_rt_sigprocmask, SIG_SETMASK, (i64)&none, 0, 8));
}

static void start(int program)
{
	// The agent's runtime reads it before anything of ours runs: with one processor no thread wakes another for work.
	char *argv[32], *env[2] = { program >= 0 ? "GOMAXPROCS=1" : 0, 0 };
	u32 n = 0;
	for (char *p = plan.argv; n < plan.argc && n < 31; p += len(p) + 1) argv[n++] = p;
	argv[n] = 0;
	if (program >= 0)
		must("exec agent", sys5(NR_execveat, program, (i64)"", (i64)argv, (i64)env, AT_EMPTY_PATH));
	must("exec", sys3(NR_execve, (i64)argv[0], (i64)argv, (i64)env));
}

// move_away makes a child in new namespaces whose parent is ours, and leaves. The maker could clone it itself, but with a
// user namespace only by a copy of its whole memory. It writes the id maps while the child waits.
static void move_away(const char *namespaces)
{
	u64 flags = 0;
	while (*namespaces) flags = flags * 10 + (u64)(*namespaces++ - '0');
	i64 child = must("clone", sys6(NR_clone, (i64)(flags | CLONE_PARENT), 0, 0, 0, 0, 0));
	if (child) {
		must("tell", sys3(NR_write, SOCK, (i64)&child, sizeof child));
		sys1(NR_exit_group, 0);
	}
	char word;
	if (sys6(NR_recvfrom, SOCK, (i64)&word, 1, 0, 0, 0) != 1) sys1(NR_exit_group, 1);
	become(0, 0);
}

// run is given the stack: argc, argv. A second argument is the namespaces to make.
void run(const u64 *stack)
{
	sock = SOCK;
	if (stack[0] > 1) move_away((const char *)stack[2]);
	sock = (int)must("keep socket", sys3(NR_fcntl, SOCK, F_DUPFD_CLOEXEC, 64));
	int count = receive();
	int at = (int)plan.layers;
	if (plan.mode == MODE_REROOT) {
		if (at + 2 != count) die("plan with other descriptors", -EINVAL);
		reroot(fds[at], fds[at + 1]);
	}
	int state = plan.mode == MODE_SANDBOX && plan.storage == STORAGE_GIVEN ? fds[at++] : -1;
	int dev = fds[at++], cove = fds[at++];
	int program = plan.mode == MODE_SANDBOX ? fds[at++] : -1;
	int channel = fds[at++], asked = at;
	at += (int)plan.mounts;
	if (plan.mounts > MAX_MOUNTS || at + (int)plan.cgroups != count) die("plan with other descriptors", -EINVAL);

	sys1(NR_umask, 022);
	join_cgroups(at);
	must("private mounts", mount(0, "/", 0, MS_REC | MS_PRIVATE, 0));
	base = (int)must("open base", sys4(NR_openat, AT_FDCWD, (i64)plan.base, O_PATH | O_DIRECTORY | O_CLOEXEC, 0));
	stand_in_base();
	mount_layers();
	if (plan.mode == MODE_SANDBOX) {
		if (state >= 0) must("move state", move(state, "s"));
		else make_tmpfs_state();
	}
	mount_trees();
	mount_asked(asked);
	mount_rest(dev, cove);
	must("hostname", sys2(NR_sethostname, (i64)plan.hostname, (i64)len(plan.hostname)));
	enter_root();
	if (plan.mode == MODE_SANDBOX) loopback_up();

	usual_signals();
	must("session", sys0(NR_setsid));
	set_limit(RLIMIT_CORE, 1); // not 0: that would still start a handler that dumps are piped to
	if (plan.nofile) set_limit(RLIMIT_NOFILE, plan.nofile);
	must("channel", sys3(NR_dup3, channel, SOCK, 0));
	drop_bounding();
	become(plan.uid, plan.gid);
	filter();
	start(program);
}
