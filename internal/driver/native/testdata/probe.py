"""Tries what a sandbox must refuse and prints what happened, as JSON: name -> errno name, "ok", or a short note."""
import ctypes, errno, json, mmap, os, platform, socket, stat, struct, sys

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
X86 = platform.machine() == "x86_64"
NR = {}
for row in """
mount 165 40|umount2 166 39|pivot_root 155 41|unshare 272 97|setns 308 268|clone 56 220|clone3 435 435|ptrace 101 117
process_vm_readv 310 270|process_vm_writev 311 271|pidfd_open 434 434|pidfd_getfd 438 438|bpf 321 280|perf_event_open 298 241
io_uring_setup 425 425|io_uring_enter 426 426|io_uring_register 427 427|userfaultfd 323 282|keyctl 250 219|add_key 248 217
request_key 249 218|kexec_load 246 104|kexec_file_load 320 294|init_module 175 105|finit_module 313 273|delete_module 176 106
open_by_handle_at 304 265|name_to_handle_at 303 264|quotactl 179 60|quotactl_fd 443 443|swapon 167 224|swapoff 168 225
settimeofday 164 170|clock_settime 227 112|clock_adjtime 305 266|reboot 169 142|personality 135 92|vmsplice 278 75
fsopen 430 430|fsconfig 431 431|fsmount 432 432|fspick 433 433|open_tree 428 428|move_mount 429 429|mount_setattr 442 442
sethostname 170 161|setdomainname 171 162|acct 163 89|syslog 103 116|vhangup 153 58|fanotify_init 300 262|kcmp 312 272
mbind 237 235|move_pages 279 239|migrate_pages 256 238|set_mempolicy 238 237|iopl 172 -|ioperm 173 -|modify_ldt 154 -|memfd_secret 447 447
""".replace("\n", "|").split("|"):
    if row.strip():
        name, x86, arm = row.split()
        if (x86 if X86 else arm) != "-":
            NR[name] = int(x86 if X86 else arm)

results = {}


def note(name, fn):
    try:
        value = fn()
        results[name] = "ok" if value is None else str(value)
    except OSError as e:
        results[name] = errno.errorcode.get(e.errno, str(e.errno))
    except Exception as e:  # noqa: BLE001
        results[name] = type(e).__name__


def call(name, *args):
    ctypes.set_errno(0)
    r = libc.syscall(ctypes.c_long(NR[name]), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if r < 0:
        raise OSError(ctypes.get_errno(), "")
    return "ok"


NS = dict(user=0x10000000, mnt=0x20000, pid=0x20000000, net=0x40000000, ipc=0x8000000, uts=0x4000000, cgroup=0x2000000, time=0x80)
for n, flag in NS.items():
    note("unshare " + n, lambda: call("unshare", flag))
    if n != "time":
        note("clone " + n, lambda: call("clone", flag | 17, 0, 0, 0, 0))
with open("/proc/self/ns/net") as own:
    note("setns", lambda: call("setns", own.fileno(), 0))
note("mount", lambda: call("mount", b"none", b"/mnt", b"tmpfs", 0, 0))
for n in NR:
    if n in ("mount", "unshare", "clone", "setns", "pidfd_open", "personality"):
        continue
    note(n, lambda: call(n, 0, 0, 0, 0, 0))
note("ptrace pid 1", lambda: call("ptrace", 16, 1, 0, 0))
note("personality no ASLR", lambda: call("personality", 0x40000))
note("reboot for real", lambda: call("reboot", 0xFEE1DEAD, 672274793, 0x1234567, 0))
if X86:
    def i386():
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(b"\xb8\x66\x00\x00\x00\x31\xdb\x31\xc9\xcd\x80\xc3")  # socketcall by int 0x80
        f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
        return errno.errorcode.get(-f(), "?")
    note("i386 socketcall", i386)


def call_number(nr, *args):
    ctypes.set_errno(0)
    if libc.syscall(ctypes.c_long(nr), *map(ctypes.c_long, args)) < 0:
        raise OSError(ctypes.get_errno(), "")
    return "ok"


if X86:
    note("x32 socket", lambda: call_number(0x40000000 | 41, 2, 1, 0))

FAMILIES = dict(alg=38, packet=17, vsock=40, rxrpc=33, key=15, bluetooth=31, tipc=30, can=29, rds=21, nfc=39, xdp=44, smc=43, kcm=41, qipcrtr=42, appletalk=5, ax25=3, x25=9, ieee802154=36, phonet=35, caif=37)
for n, family in FAMILIES.items():
    note("socket " + n, lambda: socket.socket(family, socket.SOCK_DGRAM if n not in ("packet",) else socket.SOCK_RAW).close())
for n, protocol in dict(xfrm=6, netfilter=12, audit=9, uevent=15, generic=16, crypto=21, sockdiag=4, selinux=7).items():
    note("netlink " + n, lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol).close())
note("netlink route", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close())
note("raw icmp", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close())
note("raw ip", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 255).close())
note("sctp", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132).close())
note("tcp ulp", lambda: socket.socket().setsockopt(6, 31, b"tls"))
note("udp encap", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).setsockopt(17, 100, 2))
note("mptcp", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262).close())


def read(path):
    with open(path, "rb") as f:
        return "ok" if f.read(1) else "empty"


for f in "kcore keys key-users timer_list kallsyms interrupts kmsg vmallocinfo slabinfo iomem ioports modules".split():
    if os.path.exists("/proc/" + f):
        note("read /proc/" + f, lambda: read("/proc/" + f))


def write(path, data=b"1"):
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


for p in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/net/ipv4/ip_forward", "/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches", "/proc/sys/fs/file-max"):
    note("write " + p, lambda: write(p))
for f in ("mem", "environ", "maps", "auxv", "stack", "syscall", "pagemap"):
    note("read /proc/1/" + f, lambda: read("/proc/1/" + f))
note("follow /proc/1/fd", lambda: [os.readlink("/proc/1/fd/" + f) for f in os.listdir("/proc/1/fd")] and None)
note("open /proc/1/fd", lambda: [open("/proc/1/fd/" + f).close() for f in os.listdir("/proc/1/fd")] and None)
for f in ("root", "cwd", "exe"):
    note("link /proc/1/" + f, lambda: os.readlink("/proc/1/" + f) and None)
note("list /sys", lambda: "empty" if not os.listdir("/sys") else "ok")
note("list /proc/fs", lambda: "empty" if not os.listdir("/proc/fs") else "ok")
note("mknod block", lambda: os.mknod("/tmp/probe-b", stat.S_IFBLK | 0o600, os.makedev(7, 0)))
note("mknod char", lambda: os.mknod("/tmp/probe-c", stat.S_IFCHR | 0o600, os.makedev(1, 1)))
for d in ("mem", "kmsg", "kvm", "loop-control", "loop0", "vda", "sda", "net/tun", "fuse", "port"):
    note("open /dev/" + d, lambda: os.close(os.open("/dev/" + d, os.O_RDWR)))
note("write /run/cove", lambda: write("/run/cove/kernel/kernel.py"))
note("make in /run/cove", lambda: os.mkdir("/run/cove/x"))
note("make in /dev", lambda: os.mkdir("/dev/x"))
note("remount root", lambda: call("mount", 0, b"/", 0, 32, 0))
note("raise a hard limit", lambda: __import__("resource").setrlimit(7, (1 << 20, 1 << 20)))
note("negative nice", lambda: os.setpriority(0, 0, -5) if hasattr(os, "setpriority") else None)
note("better oom score", lambda: write("/proc/self/oom_score_adj", b"-500"))
note("set time by settimeofday", lambda: call("settimeofday", ctypes.byref(ctypes.create_string_buffer(16)), 0))
note("signal pid 1", lambda: os.kill(1, 9))
with open("/dev/ptmx", "rb", buffering=0) as terminal:
    note("trace by TIOCSTI", lambda: __import__("fcntl").ioctl(terminal, 0x5412, b"x") and None)

info = {}
status = dict(l.split(":", 1) for l in open("/proc/self/status").read().splitlines())
info["uid"] = os.getuid()
for k in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"):
    info[k] = status[k].strip()
info["pids"] = sorted(int(p) for p in os.listdir("/proc") if p.isdigit())
info["fds"] = {}
for f in os.listdir("/proc/self/fd"):
    try:
        info["fds"][f] = os.readlink("/proc/self/fd/" + f)
    except OSError:
        pass
info["env"] = dict(os.environ)
info["unix"] = [l.split()[-1] for l in open("/proc/net/unix").read().splitlines()[1:] if len(l.split()) == 8]
info["mounts"] = sorted(l.split()[1] for l in open("/proc/self/mounts"))
info["uid_map"] = open("/proc/self/uid_map").read().split()
info["cgroup"] = open("/proc/self/cgroup").read().split()
info["init"] = {k: v.strip() for k, v in (l.split(":", 1) for l in open("/proc/1/status").read().splitlines()) if k in ("CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Uid")}
json.dump({"results": results, "info": info}, sys.stdout)
