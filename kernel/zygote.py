"""The zygote: a Python that has imported everything once and forks kernels straight into sandboxes.

It runs without privilege as the user that owns the sandboxes' user namespaces, takes orders on descriptor 3 (JSON on a
SEQPACKET socket, descriptors alongside; those to fork in the shim's own form, see serve.c) and runs no code of a sandbox: only what its template preloads. It has exactly
one thread, because a fork copies only the one that forks.

Run as `python3 -I zygote.py` with an empty environment.
"""

import array
import collections
import ctypes
import errno
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import platform
import re
import resource
import select
import signal
import site
import socket
import struct
import sys
import time
import types

CONTROL = 3
MAX_MESSAGE = 64 << 10
MAX_DESCRIPTORS = 16
MAX_CGROUPS = 8
MAX_GROUPS = 64
CHILD_SOCKET = 3
FRAME_REQUEST = 1
FRAME_CONTROL = 8
MAX_ENVIRONMENT = 1 << 20
EXIT_SETUP = 71  # a child that could not enter its sandbox; its stderr says why
SHIM_VERSION = 5

# In the environment while importing: no thread pools, whose threads a fork would lose, no windows, no files outside
# /tmp.
IMPORT_ENVIRONMENT = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # else pyarrow starts a thread at import
    "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "1",
    "GOTO_NUM_THREADS": "1", "VECLIB_MAXIMUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "RAYON_NUM_THREADS": "1",
    "ARROW_IO_THREADS": "1", "MPLBACKEND": "agg", "MPLCONFIGDIR": "/tmp/.matplotlib", "HOME": "/tmp",
    "IPYTHONDIR": "/tmp/.ipython", "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
}

TUNE = ("arena", "warmup", "pack", "join", "fill", "freeze", "immortal", "collapse")


# --- the ways into a sandbox ------------------------------------------------------------------------------------------


class Layout(ctypes.Structure):
    """struct layout of shim.c."""

    _fields_ = [
        ("type_flags", ctypes.c_int32), ("type_traverse", ctypes.c_int32), ("type_is_gc", ctypes.c_int32),
        ("ncode", ctypes.c_int32), ("code", ctypes.c_int32 * 12), ("code_type", ctypes.c_void_p),
        ("nskip", ctypes.c_int32), ("skip", ctypes.c_void_p * 8),
    ]


def make_request(message, fds, delta):
    groups = message.get("groups") or []
    if len(groups) > MAX_GROUPS or len(fds) > 4 + MAX_CGROUPS or len(fds) < 4:
        raise ValueError("%d groups and %d descriptors" % (len(groups), len(fds)))
    r = types.SimpleNamespace()
    r.sock, r.out, r.err, r.pidfd = fds[:4]
    r.cgroups = list(fds[4:])
    r.uid, r.gid, r.groups = message["uid"], message["gid"], groups
    r.nofile = message.get("nofile") or 0
    r.filter, r.nfilter = filter_of(delta)
    r.cwd = os.fsencode(message.get("cwd") or "/")
    return r


def filter_of(delta):
    """Where a filter is and how many instructions it has."""
    return (None, 0) if delta is None else (ctypes.addressof(delta), len(delta) // 8)


class Shim:
    """The C shim: one copy of the page tables, and the kernel is our own child. It takes orders to fork in its own form."""

    name = "shim"

    def __init__(self, path):
        self.lib = ctypes.PyDLL(path)
        if self.lib.cove_version() != SHIM_VERSION:
            raise OSError("%s is version %d, not %d" % (path, self.lib.cove_version(), SHIM_VERSION))
        status = self.lib.cove_init()
        if status:
            raise OSError("%s cannot be used here: %d" % (path, status))
        self.lib.cove_immortalise.restype = ctypes.c_long

    def wait(self, zygote):
        """None when a message is there, or what a child has to know of its order."""
        if threads() != 1:  # only Python can have made another, and it runs no more until we are back
            raise RuntimeError("the zygote has %d threads and must have one" % threads())
        ahead = ctypes.c_int(0)
        code, length = filter_of(zygote.delta)
        if self.lib.cove_serve(zygote.control.fileno(), zygote.wake, zygote.anchor, ctypes.c_void_p(code), length, ctypes.byref(ahead)):
            return None
        return {"ahead": bool(ahead.value)}

    def children(self):
        return self.lib.cove_children()

    def become_visible(self):
        self.lib.cove_visible()

    def born(self, sock, ready):
        """In a kernel that has prepared for what it will be asked for: whether it was that, and the rest is done too."""
        return bool(self.lib.cove_born(sock, ready, ctypes.c_size_t(len(ready))))

    def branch(self, talk):
        """In a kernel whose memory is to be copied: None, or its socket in each branch."""
        return None if self.lib.cove_branch(talk) else self.lib.cove_branch_socket()


class Slow:
    """The same without the shim: two full forks, the second with its parent set to us. Right, if slower."""

    name = "python"

    NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
    CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
    NUMBERS = {  # clone, capset, seccomp
        "x86_64": (56, 126, 317),
        "aarch64": (220, 91, 277),
    }
    PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_GET_TID_ADDRESS, PR_CAP_AMBIENT = 4, 24, 38, 40, 47
    CLEAR_ALL = 4

    def __init__(self):
        self.arm = platform.machine() == "aarch64"
        self.clone, self.capset, self.seccomp = self.NUMBERS[platform.machine()]
        self.libc = ctypes.PyDLL(None, use_errno=True)
        self.python = ctypes.pythonapi
        self.tokens = {}  # pid → token

    def wait(self, zygote):
        """As the shim's, but that a fork is a message like any other."""
        poll = select.poll()
        poll.register(zygote.control, select.POLLIN)
        poll.register(zygote.wake, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if zygote.wake in ready:
                self.reap(zygote)
            if zygote.control.fileno() in ready:
                return None

    def reap(self, zygote):
        try:
            os.read(zygote.wake, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            token = self.tokens.pop(pid, None)
            if token is not None:
                zygote.send(dict(type="exit", token=token, **how_it_ended(status)))

    def know(self, pid, token):
        self.tokens[pid] = token

    def children(self):
        return len(self.tokens)

    def call(self, step, function, *arguments):
        result = function(*arguments)
        if result == -1:
            number = ctypes.get_errno()
            raise OSError(number, "%s: %s" % (step, os.strerror(number)))
        return result

    def prctl(self, step, *arguments):
        return self.call(step, self.libc.prctl, *[ctypes.c_ulong(a) for a in arguments + (0,) * (5 - len(arguments))])

    def fork(self, request):
        r, w = os.pipe()
        between = os.fork()
        if between == 0:
            try:
                pid = self.fork_inside(request)
                if pid == 0:
                    self.settle_or_die(request)
                    return 0, ()
                os.write(w, b"%d" % pid)
            except OSError as e:
                os.write(w, b"!%d %s" % (e.errno or 0, (e.strerror or str(e)).encode()))
            finally:
                if os.getpid() != CHILD_OF_SLOW[0]:
                    os._exit(0)
        os.close(w)
        answer = b""
        while True:
            chunk = os.read(r, 4096)
            if not chunk:
                break
            answer += chunk
        os.close(r)
        os.waitpid(between, 0)
        if not answer.isdigit():
            number, _, text = answer[1:].partition(b" ")
            raise OSError(int(number or 0), text.decode("utf-8", "replace") or "the helper died")
        # Nobody but us can reap it, so the number still means the same process.
        return int(answer), (pidfd_open(int(answer)),)

    def fork_inside(self, request):
        self.call("setns", self.libc.setns, request.pidfd, self.NAMESPACES)
        tid = ctypes.c_void_p()
        self.call("tid address", self.libc.prctl, ctypes.c_ulong(self.PR_GET_TID_ADDRESS), ctypes.byref(tid),
                  ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
        flags = self.CLONE_PARENT | self.CLONE_CHILD_SETTID | self.CLONE_CHILD_CLEARTID
        zero = ctypes.c_ulong(0)
        last = (zero, tid) if self.arm else (tid, zero)
        self.python.PyOS_BeforeFork()
        pid = self.libc.syscall(ctypes.c_long(self.clone), ctypes.c_ulong(flags), zero, zero, *last)
        if pid == 0:
            self.python.PyOS_AfterFork_Child()
            CHILD_OF_SLOW[0] = os.getpid()
            return 0
        self.python.PyOS_AfterFork_Parent()
        if pid < 0:
            number = ctypes.get_errno()
            raise OSError(number, "clone: " + os.strerror(number))
        return pid

    def become_visible(self):
        pass  # it has no anchor, and is already

    def born(self, sock, ready):
        return False

    def settle_or_die(self, request):
        try:
            self.settle(request)
        except BaseException as e:
            os.write(request.err, ("kernel: %s\n" % e).encode("utf-8", "replace"))
            os._exit(EXIT_SETUP)

    def settle(self, request):
        """What settle() of shim.c does, in the same order."""
        for fd in request.cgroups:
            os.write(fd, b"0")
        self.drop_privileges(request)
        self.arrange_descriptors(request)
        self.prctl("dumpable", self.PR_SET_DUMPABLE, 1)
        self.furnish(request)

    def furnish(self, request):
        try:
            os.setsid()
        except OSError:
            pass
        os.umask(0o022)
        try:
            os.chdir(request.cwd)
        except OSError:
            os.chdir("/")
        if request.nofile > 0:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            limit = request.nofile if hard == resource.RLIM_INFINITY else min(request.nofile, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    def drop_privileges(self, request):
        os.setgroups(request.groups)
        os.setresgid(request.gid, request.gid, request.gid)
        for capability in range(64):
            try:
                self.prctl("drop bounding set", self.PR_CAPBSET_DROP, capability)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                break  # beyond the last one this host knows
        os.setresuid(request.uid, request.uid, request.uid)
        self.libc.prctl(*[ctypes.c_ulong(a) for a in (self.PR_CAP_AMBIENT, self.CLEAR_ALL, 0, 0, 0)])
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        self.call("capset", self.libc.syscall, ctypes.c_long(self.capset), header, data)
        self.prctl("no_new_privs", self.PR_SET_NO_NEW_PRIVS, 1)
        if request.nfilter:
            program = struct.pack("@HP", request.nfilter, request.filter)
            self.call("seccomp", self.libc.syscall, ctypes.c_long(self.seccomp), ctypes.c_ulong(1), ctypes.c_ulong(0),
                      ctypes.create_string_buffer(program, len(program)))

    def arrange_descriptors(self, request):
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (request.sock, request.out, request.err)]
        request.err = high[2]
        try:
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, 0)
        except OSError:
            pass
        os.dup2(high[1], 1)
        os.dup2(high[2], 2)
        os.dup2(high[0], CHILD_SOCKET, inheritable=False)
        request.err = 2
        close_from(CHILD_SOCKET + 1)


class Plain(Slow):
    """A fork and nothing else, for a zygote that lives in its sandbox itself and has all that its kernels may have."""

    name = "plain"

    def fork(self, request):
        pid = os.fork()
        if pid == 0:
            self.settle_or_die(request)
            return 0, ()
        return pid, (pidfd_open(pid),)  # nobody but us can reap it, so the number still means the same process

    def settle(self, request):
        self.arrange_descriptors(request)
        self.furnish(request)

    def become_visible(self):
        self.prctl("dumpable", self.PR_SET_DUMPABLE, 1)


CHILD_OF_SLOW = [0]  # the pid of a child that Slow made, known to itself only


def pidfd_open(pid):
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    fd = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(434), ctypes.c_long(pid), ctypes.c_ulong(0))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "pidfd_open")
    return fd


def close_from(first):
    if ctypes.CDLL(None).syscall(ctypes.c_long(436), ctypes.c_uint(first), ctypes.c_uint(0xFFFFFFFF), ctypes.c_uint(0)):
        os.closerange(first, 65536)


def find_way(kernel_dir):
    """The shim where it can be loaded, else plain Python; and why."""
    arch = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    path = os.path.join(kernel_dir, "native", "shim-%s.so" % arch)
    try:
        return Shim(path), ""
    except (OSError, AttributeError) as e:
        return Slow(), str(e)


# --- memory -----------------------------------------------------------------------------------------------------------


def find_layout():
    """Where this interpreter keeps what cove_immortalise reads, checked on live objects; None where unsure.

    Only versions whose reference counting was read: 3.12 and 3.13 (2^32−1 means immortal), with the GIL.
    """
    if sys.version_info[:2] not in ((3, 12), (3, 13)) or sys.implementation.name != "cpython":
        return None
    if not getattr(sys, "_is_gil_enabled", lambda: True)() or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None

    def word(address):
        return ctypes.c_uint64.from_address(address).value

    for kind in (int, dict, type, Layout):
        at = id(kind)
        checks = ((24 + 8, kind.__basicsize__), (24 + 16, kind.__itemsize__), (168, kind.__flags__),
                  (256, id(kind.__base__)), (336, id(kind.__bases__)), (344, id(kind.__mro__)))
        if any(word(at + offset) != value for offset, value in checks):
            return None
    if word(id(None)) & 0xFFFFFFFF != 0xFFFFFFFF or word(id(find_layout)) >> 32 or word(id(find_layout) + 8) != id(
            type(find_layout)):
        return None
    layout = Layout(type_flags=168, type_traverse=184, type_is_gc=328)
    code = find_layout.__code__
    words = {word(id(code) + offset): offset for offset in range(16, 160, 8)}
    for name in ("co_consts", "co_names", "co_exceptiontable", "co_filename", "co_name", "co_qualname", "co_linetable"):
        offset = words.get(id(getattr(code, name)))
        if offset is not None:
            layout.code[layout.ncode] = offset
            layout.ncode += 1
    layout.code_type = id(type(code))

    def generator():
        yield

    async def coroutine():
        pass

    async def stream():
        yield

    waiting = coroutine()
    short_lived = [type(sys._getframe()), type(generator()), type(waiting), type(stream()), socket.socket]
    waiting.close()
    for kind in short_lived:
        layout.skip[layout.nskip] = id(kind)
        layout.nskip += 1
    return layout


def immortalise(shim):
    layout = find_layout()
    if layout is None:
        return 0
    objects = gc.get_objects()
    pointers = (ctypes.c_void_p * len(objects))(*map(id, objects))
    count = len(objects)
    del objects
    return shim.lib.cove_immortalise(pointers, ctypes.c_long(count), ctypes.byref(layout))


def pack_code(order):
    """Put the code at these addresses side by side, in that order; how many there were.

    Since Python 3.11 code is written to while it runs: it counts how often it could not be specialised, and since 3.13 which
    branches were taken. Each page with some of it is copied in a child, and it lies among what is never written to.
    """
    wanted = {address: number for number, address in enumerate(order)}
    functions = [f for f in gc.get_objects() if type(f) is types.FunctionType]
    copies = {}

    def copy(code):
        """The copy of a code object, or itself where nothing in it is wanted."""
        if id(code) in copies:
            return copies[id(code)][1]
        consts = tuple(copy(c) if type(c) is types.CodeType else c for c in code.co_consts)
        changed = any(new is not old for new, old in zip(consts, code.co_consts))
        new = code.replace(co_consts=consts) if changed else code.replace() if id(code) in wanted else code
        copies[id(code)] = code, new  # the old one is kept: its address must not become another's
        return new

    functions.sort(key=lambda f: wanted.get(id(f.__code__), len(wanted)))
    for f in functions:
        new = copy(f.__code__)
        if new is not f.__code__:
            f.__code__ = new
    return sum(old is not new for old, new in copies.values())


FILLER = []


def fill_pools():
    """Take every free block of Python's own small-object pools, for the reason that cove_fill has.

    How many there are is told only as text, by the interpreter's statistics.
    """
    if not hasattr(sys, "_debugmallocstats") or not hasattr(os, "memfd_create"):
        return
    gc.collect()
    memory, kept = os.memfd_create("stats"), os.dup(2)
    try:
        os.dup2(memory, 2)
        sys._debugmallocstats()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    text = os.pread(memory, 1 << 20, 0).decode("ascii", "replace")
    os.close(memory)
    for line in text.split("\n\n", 1)[0].splitlines():
        fields = line.split()
        if len(fields) == 5 and all(field.isdigit() for field in fields):
            FILLER.append(fill_class(int(fields[1]), int(fields[4])))


def fill_class(size, count):
    if size <= 16:
        return [object() for _ in range(count)]
    if size <= 32:
        return [1 << 40 | i for i in range(count)]
    return [bytes(size - 33) for _ in range(count)]


def join_mappings():
    """Have fewer mappings, and return how many fewer: every child copies each of them when it is born and gives it back.

    A library is mapped in five parts: read, executed, read, written once by the loader and read, written. The parts that
    nobody wrote to become one and those that somebody did another. What the loader protects this way is from mistakes, and
    in a sandbox from nobody: all code there may ask for what it likes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    before = read_mappings()
    for run in library_runs(before):
        rights = 0
        for part in run:
            rights |= part.rights
        if rights & (WRITE | EXECUTE) != WRITE | EXECUTE:  # where it fails they stay apart
            libc.mprotect(run[0].start, run[-1].end - run[0].start, rights)
    return len(before) - len(read_mappings())


Mapping = collections.namedtuple("Mapping", "start end rights offset file written")
READ, WRITE, EXECUTE = 1, 2, 4


def read_mappings():
    """Ours, in the order of their addresses. Of what is shared and of what has no file, file is none."""
    found, head = [], re.compile("([0-9a-f]+)-([0-9a-f]+) ([-r])([-w])([-x])([ps]) ([0-9a-f]+) ([0-9a-f]+:[0-9a-f]+ [0-9]+)")
    with open("/proc/self/smaps") as lines:
        for line in lines:
            m = head.match(line)
            if m:
                rights = READ * (m[3] == "r") | WRITE * (m[4] == "w") | EXECUTE * (m[5] == "x")
                file = m[8] if m[6] == "p" and not m[8].endswith(" 0") else None
                found.append(Mapping(int(m[1], 16), int(m[2], 16), rights, int(m[7], 16), file, False))
            elif line.startswith("Anonymous:"):
                found[-1] = found[-1]._replace(written=line.split()[1] != "0")
    return found


def library_runs(mappings):
    """Mappings that could be one: side by side, of one file and without a gap in it, all written to or none."""
    runs, last = [], None
    for m in mappings:
        if m.file is None or not m.rights & READ:
            last = None
            continue
        written = m.written or bool(m.rights & WRITE)
        if last is not None and (last.end, last.file, last.offset + last.end - last.start) == (m.start, m.file, m.offset) and (
                was_written == written):
            runs[-1].append(m)
        else:
            runs.append([m])
        last, was_written = m, written
    return [run for run in runs if len(run) > 1]


def malloc_trim():
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # not glibc
        pass


def rss_kb():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10


def threads():
    """How many threads this process has, C's included: one link of the directory each, next to its usual two."""
    return os.stat("/proc/self/task").st_nlink - 2


# --- preload ----------------------------------------------------------------------------------------------------------


def add_user_site(path):
    """Where pip puts packages of the sandbox's user: on the path now, so that no child has to look for it."""
    if path not in sys.path:
        at = next((i for i, p in enumerate(sys.path) if p.endswith(("site-packages", "dist-packages"))), len(sys.path))
        sys.path.insert(at, path)
    # Without a home at its start the site module wrote "~" into these.
    site.USER_SITE, site.USER_BASE, site.ENABLE_USER_SITE = path, os.path.dirname(os.path.dirname(os.path.dirname(path))), True


def copy_fonts(home):
    """matplotlib reads its list of fonts from a folder it can write to, or searches the disk for seconds."""
    if not home:
        return
    source, target = os.path.join(home, ".config", "matplotlib"), IMPORT_ENVIRONMENT["MPLCONFIGDIR"]
    try:
        os.makedirs(target, exist_ok=True)
        for name in os.listdir(source):
            with open(os.path.join(source, name), "rb") as f, open(os.path.join(target, name), "wb") as to:
                to.write(f.read())
    except OSError:
        pass  # it will search


def hollow(module):
    """A package without its __init__.py can be imported as a namespace package: it has no file and nothing in it."""
    spec = getattr(module, "__spec__", None)
    return getattr(module, "__file__", None) is None and type(
        getattr(spec, "submodule_search_locations", None)).__name__ == "_NamespacePath"


MAX_REASON = 500  # characters of a failed import: all of them travel in one message


def preload(modules):
    """Import what the template wants. Returns what each took, or why it could not, and the names of hollow packages."""
    report, empty = {}, []
    for name in modules:
        start = time.monotonic()
        try:
            if hollow(importlib.import_module(name)):
                empty.append(name)
                raise ImportError("there is a directory of that name and no module: a part of its package is missing")
            report[name] = round(time.monotonic() - start, 4)
        except BaseException as e:  # a module may call sys.exit()
            report[name] = ("%s: %s" % (type(e).__name__, e))[:MAX_REASON]
    return report, empty


# What libraries put off until first use, done once here so that no child pays for it. Keyed by the module that must
# have been imported for it to make sense.
LAZY = (
    ("ssl", "import ssl, os; ssl.RAND_bytes(8); ssl.RAND_add(os.urandom(32), 32.0); ssl.create_default_context()"),
    ("hashlib", "import hashlib; hashlib.sha256(b'x').hexdigest()"),
    ("uuid", "import uuid; uuid.uuid4()"),
    ("tempfile", "import tempfile; tempfile.gettempdir()"),
    ("numpy", "import numpy as np, os\n"
              "np.random.seed(np.frombuffer(os.urandom(16), dtype=np.uint32)); np.random.rand(3)\n"
              "np.random.default_rng(1).normal(size=3); str(np.arange(20.0).reshape(4, 5))\n"
              "np.ones((4, 4)) @ np.ones((4, 4))\n"
              "np.linalg.solve(np.eye(3), np.ones(3)); repr(np.linspace(0, 1, 5))"),
    ("pandas", "import pandas as pd, numpy as np, io\n"
               "df = pd.DataFrame({'a': np.arange(10), 'b': np.arange(10) * 2.0, 'c': list('abcdefghij')})\n"
               "repr(df); df._repr_html_(); df.describe(); str(df[['a', 'b']].sum())\n"
               "df.groupby('a').sum(numeric_only=True); pd.read_csv(io.StringIO(df.to_csv(index=False)))\n"
               "df.merge(df, on='a'); df.sort_values('b'); df[df.a > 3]\n"
               "df.pivot_table(index='c', values='b'); pd.to_datetime(['2024-01-01']); df['a'].value_counts()"),
    ("matplotlib.pyplot", "import matplotlib.pyplot as plt, io\n"
                          "fig, ax = plt.subplots(); ax.plot([1, 2, 3]); ax.set_title('t'); ax.legend(['a'])\n"
                          "fig.savefig(io.BytesIO(), bbox_inches='tight'); plt.close('all')"),
    ("sklearn.linear_model", "from sklearn.linear_model import LinearRegression\n"
                             "LinearRegression().fit([[1.0], [2.0]], [1.0, 2.0]).predict([[3.0]])"),
)

# Cells that go once through the whole kernel, frames included.
REHEARSAL = ("1+1", "x = 1", "print(1)", "'text'", "[1, 2.5, {'a': 1}]")
REHEARSAL_ONCE = ("def f():\n    return 1/0\nf()", "a b", "!true")
REHEARSAL_WITH = (
    ("pandas", "import pandas as pd, numpy as np\n"
               "df = pd.DataFrame({'a': np.arange(1000), 'b': np.arange(1000) * 2.0})\nprint(df.sum())\ndf.head()"),
    ("pandas", "df.describe()"),
    ("matplotlib.pyplot", "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])"),
)


def cells_with(cells, more):
    """Cells, and those more whose module has been imported."""
    return cells + tuple(cell for name, cell in more if name in sys.modules)


# Since Python 3.11 a function's code is specialised while it runs the first few times; better here than in each child.
# (Its pages are copied in the child all the same: see pack_code.)
ROUNDS = 4


def warm_libraries(rounds):
    for name, code in LAZY:
        if name in sys.modules:
            try:
                program = compile(code, "<warm-up of %s>" % name, "exec")
                for _ in range(rounds):
                    exec(program, {"__name__": "warmup"})
            except Exception as e:
                print("zygote: warm-up of %s: %s" % (name, e), file=sys.stderr)


# --- a child ----------------------------------------------------------------------------------------------------------


MT19937 = 624 * 4  # bytes of that generator's state; the position in it follows
NUMPY_STATE = []  # where numpy's global generator keeps its state, if it could be found


def find_numpy_state():
    """Seed numpy's global generator and find its state, so that a child need only write new bytes there.

    np.random.seed() in each child would do the same for 0.6 ms.
    """
    mtrand = sys.modules.get("numpy.random.mtrand")
    if mtrand is None:
        return
    try:
        mtrand.seed(sys.modules["numpy"].frombuffer(os.urandom(16), dtype="u4"))
        generator = mtrand._rand._bit_generator
        address = generator.ctypes.state_address
        state = generator.state["state"]
        if generator.state["bit_generator"] == "MT19937" and state["pos"] == 624 and ctypes.string_at(
                address, MT19937) == state["key"].tobytes() and ctypes.c_int.from_address(address + MT19937).value == 624:
            NUMPY_STATE.append(address)
    except Exception as e:
        print("zygote: numpy's random state: %s" % e, file=sys.stderr)


def reseed():
    """No two children may share what was drawn from a random source before they were born.

    OpenSSL notices a fork by the pid, and siblings can have the same one, each in its own pid namespace.
    """
    loaded = sys.modules.get
    ssl = loaded("ssl")
    if ssl is not None:
        ssl.RAND_add(os.urandom(32), 32.0)
    # The generator behind the module random has seeded itself in its own fork hook.
    mtrand = loaded("numpy.random.mtrand")
    if mtrand is not None:
        if NUMPY_STATE:
            ctypes.memmove(NUMPY_STATE[0], os.urandom(MT19937), MT19937)
        else:
            mtrand.seed(loaded("numpy").frombuffer(os.urandom(16), dtype="u4"))
    tempfile = loaded("tempfile")
    if tempfile is not None:
        tempfile._name_sequence = None
        tempfile.tempdir = None
    uuid = loaded("uuid")
    if uuid is not None:
        uuid._node = uuid._last_timestamp = None
    process = loaded("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)


def frame(kind, message):
    payload = json.dumps(message).encode("ascii")
    return struct.pack(">B3xI", kind, len(payload)) + payload


def read_birth(sock):
    """The first frame on a kernel's socket: what is meant for one sandbox must not pass through the zygote, whose memory
    every later child inherits."""
    header = read_exactly(sock, 8)
    kind, length = header[0], int.from_bytes(header[4:], "big")
    if kind != FRAME_CONTROL or length > MAX_ENVIRONMENT:
        raise ValueError("no environment came first, but frame %d of %d bytes" % (kind, length))
    birth = json.loads(read_exactly(sock, length))
    birth["env"] = birth.get("env") or {}
    if not all(isinstance(k, str) and isinstance(v, str) for k, v in birth["env"].items()):
        raise ValueError("an environment of something else than text")
    return birth


def limit_open_files(number):
    if number:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        number = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


def read_exactly(sock, length):
    data = bytearray()
    while len(data) < length:
        chunk = sock.recv(length - len(data))
        if not chunk:
            raise EOFError("the socket closed before the environment came")
        data += chunk
    return bytes(data)


def take_environment(environment):
    os.environ.clear()
    os.environ.update(environment)
    if "TZ" in environment:
        time.tzset()
    matplotlib = sys.modules.get("matplotlib")
    if matplotlib is not None:
        for function in (matplotlib.get_configdir, matplotlib.get_cachedir):
            forget(function)


def forget(function):
    """Make matplotlib's functions that answer once look again: their answer was the zygote's home."""
    try:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__))
        cells["called"].cell_contents = False
    except (AttributeError, KeyError, TypeError):
        pass


# --- serving ----------------------------------------------------------------------------------------------------------


class Zygote:
    def __init__(self, control):
        self.control = control
        self.kernel = None
        self.way = None
        self.delta = None  # a buffer with the filter that each child adds to ours
        self.anchor = -1  # the socket that kernels' anchors keep
        self.wake, self.wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    # Messages.

    def receive(self):
        try:
            data, ancillary, flags, _ = self.control.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS),
                                                             socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None, ()  # whoever gave orders died with our answer unread
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        if not data:
            return None, fds
        try:
            message = json.loads(data)
        except ValueError as e:
            message = {"op": "unreadable", "error": str(e)}
        if not isinstance(message, dict):
            message = {"op": "unreadable", "error": "not an object"}
        return message, fds

    def send(self, message, fds=()):
        payload = json.dumps(message).encode("ascii")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.control.sendmsg([payload], rights)
        except OSError:
            os._exit(0)  # nobody to tell

    # Getting ready.

    def configure(self, message):
        start = time.monotonic()
        tune = {name: bool((message.get("tune") or {}).get(name, True)) for name in TUNE}
        kernel_dir = message["kernel_dir"]
        if message.get("delta"):
            with open(message["delta"], "rb") as f:
                program = f.read()
            self.delta = ctypes.create_string_buffer(program, len(program))
        self.way, why = (Plain(), "") if message.get("plain") else find_way(kernel_dir)
        if (message.get("tune") or {}).get("shim", True) is False:
            self.way, why = Slow(), "not wanted"
        shim = self.way if isinstance(self.way, Shim) else None
        if shim is not None and tune["arena"]:
            shim.lib.cove_arena()
        os.environ.update(IMPORT_ENVIRONMENT)
        copy_fonts(message.get("home"))
        if message.get("user_site"):
            add_user_site(message["user_site"])
        sys.dont_write_bytecode = True
        imports, empty = preload(["ssl"] + list(message.get("preload") or ()))
        self.kernel = load_kernel(kernel_dir)
        self.kernel.prepare()
        if message.get("warmup"):
            imports.update(run_warmup(message["warmup"]))
        packed = 0
        if tune["warmup"]:
            if tune["pack"] and sys.version_info >= (3, 11):
                self.warm(1)
                packed = self.pack(shim, tune)
            self.warm(ROUNDS)
        find_numpy_state()
        report = self.settle(shim, tune)
        report.update(packed=packed, type="ready", python=platform.python_version(), threads=threads(), rss_kb=rss_kb(),
                      seconds=round(time.monotonic() - start, 4), imports=imports, hollow=empty, way=self.way.name,
                      kernel=self.kernel.prepare().shell.name)
        if why:
            report["way_reason"] = why
        if report["threads"] != 1:
            self.send({"type": "failed", "token": "", "error":
                       "the zygote has %d threads after its imports and a fork would lose them" % report["threads"]})
            os._exit(1)
        self.send(report)

    def rehearse_once(self):
        self.kernel.reopen_streams()
        self.kernel.new_environment()
        cells = cells_with(REHEARSAL[:1], REHEARSAL_WITH[:1])
        self.kernel.prepare().rehearse(cells)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(frame(FRAME_CONTROL, {"env": dict(os.environ)}))
            take_environment(read_birth(ours)["env"])

    def warm(self, rounds):
        warm_libraries(rounds)
        self.kernel.prepare().rehearse(cells_with(REHEARSAL, REHEARSAL_WITH) * rounds + REHEARSAL_ONCE)

    def pack(self, shim, tune):
        """Have the code that children run first in one place. It has yet to be specialised there."""
        order = self.watch()
        gc.collect()
        malloc_trim()
        self.fill(shim, tune)  # what is new then lies together
        return pack_code(order)

    def watch(self):
        """The addresses of the code that a kernel runs, in the order in which each ran first; none where that fails.

        Found out in a child's child, which also shows what a fork runs: a profiler leaves traces in the code of whoever had one.
        """
        ours, theirs = socket.socketpair()
        r, w = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                ours.close()
                os.close(r)
                self.be_watched(theirs, w)
            finally:
                os._exit(EXIT_SETUP)
        theirs.close()
        os.close(w)
        frames = [(FRAME_CONTROL, {})]
        frames += [(FRAME_REQUEST, {"code": cell}) for cell in cells_with(REHEARSAL, REHEARSAL_WITH)]
        try:
            for kind, payload in frames:
                ours.sendall(frame(kind, payload))
            ours.shutdown(socket.SHUT_WR)
            while ours.recv(1 << 20):
                pass
        except OSError as e:
            print("zygote: the code that a kernel runs: %s" % e, file=sys.stderr)
        ours.close()
        with open(r, "rb") as answer:
            found = array.array("Q", answer.read())
        os.waitpid(child, 0)
        return found

    def be_watched(self, sock, report):
        """Be a kernel that tells at its end what it ran. Does not return."""
        seen, leave = {}, os._exit
        sys.setprofile(lambda frame, event, _: seen.setdefault(id(frame.f_code)))
        kernel = os.fork()
        if kernel:
            sys.setprofile(None)
            sock.close()
            os.close(report)
            os.waitpid(kernel, 0)
            leave(0)

        def tell(status):
            sys.setprofile(None)
            with open(report, "wb") as out:
                out.write(array.array("Q", seen).tobytes())
            leave(status)

        os._exit = tell
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.dup2(sock.detach(), CHILD_SOCKET, inheritable=False)
        self.be_child({"ahead": True})

    def fill(self, shim, tune):
        """Take what is free among our memory: the bytes of the heap."""
        if not tune["fill"]:
            return 0
        fill_pools()
        if shim is None or not tune["arena"]:
            return 0
        shim.lib.cove_fill.restype = ctypes.c_long
        return shim.lib.cove_fill()

    def settle(self, shim, tune):
        """Arrange memory so that children copy little of it."""
        report = {"immortal": 0, "collapsed": 0, "joined": join_mappings() if tune["join"] else 0}
        os.environ.clear()
        sys.dont_write_bytecode = False
        gc.collect()
        malloc_trim()
        gc.disable()
        report["filled_kb"] = self.fill(shim, tune) >> 10
        if shim is not None and tune["immortal"]:
            report["immortal"] = immortalise(shim)
        if tune["freeze"]:
            gc.freeze()
        if shim is not None and tune["collapse"]:
            report["collapsed"] = shim.lib.cove_collapse()
        if shim is not None and tune["arena"]:
            shim.lib.cove_arena_done()
        # Children are born with this: nothing in a sandbox may look into one that still holds our descriptors.
        ctypes.CDLL(None).prctl(ctypes.c_ulong(4), ctypes.c_ulong(0), *[ctypes.c_ulong(0)] * 3)
        return report

    # Forking.

    def fork(self, message, fds):
        if isinstance(self.way, Shim):
            raise ValueError("this zygote takes orders to fork in a form of their own")
        if threads() != 1:
            raise RuntimeError("the zygote has %d threads and must have one" % threads())
        if isinstance(self.way, Plain):
            fds = list(fds) + [-1]  # there is no process whose namespaces it joins
        request = make_request(message, fds, self.delta)
        pid, pidfds = self.way.fork(request)
        if pid == 0:
            self.be_child(message)
        self.way.know(pid, message.get("token", ""))
        self.born(message, pid, pidfds)

    def be_child(self, message):
        """In the sandbox now, with descriptors 0 to 3 and no others."""
        try:
            self.leave_zygote()
            sock = socket.socket(fileno=CHILD_SOCKET)
            gc.enable()
            if message.get("ahead"):
                self.rehearse_once()  # nobody waits yet: touch the memory that a birth and a first cell will
            reseed()
            self.kernel.reopen_streams()
            sock = self.kernel.attach(sock, self if isinstance(self.way, Shim) else None)
            birth = read_birth(sock)  # a kernel forked ahead waits here
            if birth.get("expected"):
                self.live_in(birth)
                if self.way.born(sock.fileno(), self.kernel.ready_frame()):  # and then here
                    self.kernel.serve(ready=True)
                birth = read_birth(sock)
            self.way.become_visible()
            limit_open_files(birth.get("open_files"))
            if not birth.get("same"):
                self.live_in(birth)
            self.kernel.serve()
        except BaseException as e:
            os.write(2, ("kernel: %s: %s\n" % (type(e).__name__, e)).encode("utf-8", "replace"))
        os._exit(EXIT_SETUP)

    def live_in(self, birth):
        take_environment(birth["env"])
        self.kernel.new_environment()

    # In a kernel, which is our child and has us in its memory.

    def branch(self, talk):
        return self.way.branch(talk)

    def settle_branch(self, sock):
        """In a branch: be one of a kind, and take the environment that was granted."""
        reseed()
        birth = read_birth(sock)
        limit_open_files(birth.get("open_files"))
        take_environment(birth["env"])

    def leave_zygote(self):
        self.control.detach()  # the number is the kernel's socket now
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def floor(self, message, fds):
        """A plain fork without a sandbox, whose end nobody is told: what the machine can do at best."""
        if len(fds) != 1:
            raise ValueError("%d descriptors" % len(fds))
        pid = os.fork()
        if pid == 0:
            try:
                self.leave_zygote()
                os.dup2(fds[0], CHILD_SOCKET, inheritable=False)
                close_from(CHILD_SOCKET + 1)
                gc.enable()
                self.kernel.attach(socket.socket(fileno=CHILD_SOCKET))
                self.kernel.serve()
            finally:
                os._exit(EXIT_SETUP)
        self.born(message, pid, (pidfd_open(pid),))

    def born(self, message, pid, pidfds):
        try:
            self.send({"type": "forked", "token": message.get("token", ""), "pid": pid}, pidfds)
        finally:
            for fd in pidfds:
                os.close(fd)

    def handle(self, message, fds):
        op = message.get("op")
        try:
            if op == "fork":
                self.fork(message, fds)
            elif op == "floor":
                self.floor(message, fds)
            elif op == "stats":
                self.send({"type": "stats", "children": self.way.children(), "threads": threads(),
                           "rss_kb": rss_kb()})
            else:
                raise ValueError("unknown op %r %s" % (op, message.get("error", "")))
        except Exception as e:
            why = "%s: %s" % (type(e).__name__, e)
            self.send({"type": "failed", "token": str(message.get("token", "")), "error": why})
        finally:
            for fd in fds:
                os.close(fd)

    def serve(self):
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_in, warn_on_full_buffer=False)
        message, fds = self.receive()
        if message is None:
            return
        try:
            if message.get("op") != "configure":
                raise ValueError("the first message is not configure")
            if fds:
                self.anchor = fds[0]
            self.configure(message)
        except Exception as e:
            self.send({"type": "failed", "token": "", "error": "%s: %s" % (type(e).__name__, e)})
            os._exit(1)
        while True:
            order = self.way.wait(self)
            if order is not None:
                self.be_child(order)
            message, fds = self.receive()
            if message is None:
                return
            self.handle(message, fds)


def load_kernel(kernel_dir):
    path = os.path.join(kernel_dir, "kernel.py")
    spec = importlib.util.spec_from_file_location("_cove_kernel", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["_cove_kernel"] = module
    spec.loader.exec_module(module)
    return module


def run_warmup(code):
    """The template's own warm-up; like an import, it may fail without ending anything."""
    start = time.monotonic()
    try:
        exec(compile(code, "<warm-up of the template>", "exec"), {"__name__": "warmup"})
        return {"(warmup)": round(time.monotonic() - start, 4)}
    except BaseException as e:
        return {"(warmup)": "%s: %s" % (type(e).__name__, e)}


def how_it_ended(status):
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return {"code": -1, "signal": signal.Signals(number).name if number < 32 else "signal %d" % number}
    return {"code": os.WEXITSTATUS(status)}


def main():
    # Children inherit these, so whatever our parent ignored or blocked ends here. SIGPIPE and SIGXFSZ are Python's own.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) != signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
    os.set_inheritable(CONTROL, False)
    Zygote(socket.socket(fileno=CONTROL)).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
