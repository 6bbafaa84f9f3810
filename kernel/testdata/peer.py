"""The other ends, for tests and measurements: an agent that speaks frames to a kernel, a maker that orders from a zygote,
and sandboxes that are no more than seven namespaces and a PID 1."""

import array
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time

KERNEL_DIR = os.environ.get("COVE_TEST_KERNEL_DIR") or os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ZYGOTE_UID = 90000  # owns the sandboxes' user namespaces and is mapped into none of them
FIRST_ID = 1000000
TIMEOUT = 60

libc = ctypes.CDLL(None, use_errno=True)


def check(step, result):
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, "%s: %s" % (step, os.strerror(number)))
    return result


# --- an agent ---------------------------------------------------------------------------------------------------------


class Died(Exception):
    """The kernel closed its socket."""


class Agent:
    """One kernel's peer: sends cells, collects events and what came out of the pipes."""

    listen_to_pipes = True

    def __init__(self, sock, out, err):
        self.sock, self.buffer = sock, b""
        sock.settimeout(TIMEOUT)
        self.pipes = {out: "out", err: "err"} if out is not None and self.listen_to_pipes else {}
        self.unheard = [fd for fd in (out, err) if fd is not None and not self.pipes]
        self.text = {"out": b"", "err": b""}
        self.lock = threading.Lock()
        self.pumps = [threading.Thread(target=self.pump, args=(fd, name), daemon=True) for fd, name in self.pipes.items()]
        for pump in self.pumps:
            pump.start()

    def pump(self, fd, name):
        while True:
            try:
                chunk = os.read(fd, 65536)
            except OSError:
                return
            if not chunk:
                os.close(fd)
                return
            with self.lock:
                self.text[name] += chunk

    def read(self, n):
        while len(self.buffer) < n:
            try:
                chunk = self.sock.recv(1 << 20)
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise Died()
            self.buffer += chunk
        data, self.buffer = self.buffer[:n], self.buffer[n:]
        return data

    def event(self):
        header = self.read(8)
        kind, zeros, length = struct.unpack(">B3sI", header)
        assert kind == 2 and zeros == b"\0\0\0" and length <= 16 << 20, header
        return json.loads(self.read(length))

    def send(self, request, kind=1):
        payload = request if isinstance(request, bytes) else json.dumps(request).encode()
        self.sock.sendall(struct.pack(">B3sI", kind, b"\0\0\0", len(payload)) + payload)

    def run(self, code, **more):
        """All events of one cell."""
        self.send(dict(id="1", code=code, **more))
        return self.finish()

    def finish(self, answers=True):
        """The events up to the end of the cell. Without answers the kernel is not told that a result was passed on."""
        events = []
        while not events or events[-1]["type"] != "end":
            events.append(self.event())
            if answers and events[-1].get("waits"):
                self.send(b"", kind=8)
        return events

    def value(self, code, **more):
        """The text of the last expression of a cell that went well."""
        events = self.run(code, **more)
        for event in events:
            if event["type"] == "error":
                raise AssertionError("\n".join(event["error"]["traceback"]))
        return next(e["result"]["data"]["text/plain"] for e in events if e["type"] == "result" and e["result"].get("main"))

    def json(self, expression, setup=""):
        """The value of an expression, over JSON."""
        import ast

        return json.loads(ast.literal_eval(self.value("%s\nimport json as _j\n_j.dumps(%s)" % (setup, expression))))

    def output(self, name="out", until=None, timeout=TIMEOUT):
        """What was written so far; waits until it contains a text."""
        deadline = time.monotonic() + timeout
        while True:
            with self.lock:
                text = self.text[name].decode("utf-8", "surrogateescape")
            if until is None or until in text or time.monotonic() > deadline:
                return text
            time.sleep(0.002)

    anchor = None  # the pidfd of the process that shares a forked kernel's memory

    def end_anchor(self):
        """What the maker does when a kernel has ended."""
        if self.anchor is not None:
            signal.pidfd_send_signal(self.anchor, signal.SIGKILL)
            os.close(self.anchor)
            self.anchor = None

    def close(self):
        self.sock.close()
        self.end_anchor()
        for fd in self.unheard:
            os.close(fd)
        self.unheard = []
        for pump in self.pumps:
            pump.join(5)


class Started(Agent):
    """A kernel that was started by exec, as the agent does it."""

    def __init__(self, python, env=None, cwd=None, plain=False, program=None):
        ours, theirs = socket.socketpair()
        out, out_in = os.pipe()
        err, err_in = os.pipe()

        def arrange():
            os.setsid()
            fd = os.dup(theirs.fileno())
            os.dup2(fd, 3)
            os.set_inheritable(3, True)
            os.closerange(4, 4096)

        words = ["-I", "kernel.py", "--fd", "3"] + ["--plain"] * plain if program is None else program
        words = [os.path.join(KERNEL_DIR, w) if w in ("kernel.py", "node.js", "kernel.java") else w for w in words]
        self.process = subprocess.Popen([python] + words, env=env, cwd=cwd,
                                        stdin=subprocess.DEVNULL, stdout=out_in, stderr=err_in, preexec_fn=arrange,
                                        close_fds=False)
        for fd in (out_in, err_in):
            os.close(fd)
        theirs.close()
        super().__init__(ours, out, err)
        self.ready = self.event()

    def interrupt(self):
        """Interrupts as the agent does, which has Python look at its signals a moment later."""
        self.process.send_signal(signal.SIGINT)
        for delay in (0.1, 1, 5):
            nudge = threading.Timer(delay, self.process.send_signal, [signal.SIGURG])
            nudge.daemon = True
            nudge.start()

    def wait(self):
        return self.process.wait(TIMEOUT)

    def close(self):
        super().close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# --- a sandbox --------------------------------------------------------------------------------------------------------

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
ALL_NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18


def mount(source, target, kind=None, flags=0, data=None):
    encoded = [None if v is None else os.fsencode(v) for v in (source, target, kind)]
    check("mount %s" % target, libc.mount(*encoded, ctypes.c_ulong(flags), None if data is None else data.encode()))


def private_mounts(*keep):
    """Give this process a mount namespace of its own in which /tmp is empty and every user can reach the kept paths."""
    check("unshare", libc.unshare(NEWNS))
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    keep = [os.path.realpath(path) for path in keep]
    covered = {"/tmp"} | {closed for closed in map(first_closed, keep) if closed}
    held = [(os.open(path, os.O_PATH), path) for path in keep if any(path.startswith(top + "/") for top in covered)]
    for top in covered:
        mount("tmpfs", top, "tmpfs", 0, "mode=1777" if top == "/tmp" else "mode=755")
    for fd, path in held:
        os.makedirs(path, exist_ok=True)
        mount("/proc/self/fd/%d" % fd, path, None, MS_BIND | MS_REC)
        os.close(fd)
    os.chdir("/")


def first_closed(path):
    """The topmost folder above path that other users cannot pass."""
    at = "/"
    for part in path.strip("/").split("/"):
        at = os.path.join(at, part)
        if os.path.isdir(at) and not os.stat(at).st_mode & 1:
            return at
    return None


class Sandbox:
    """Seven namespaces that the zygote's user owns, and a PID 1 in them."""

    count = 0

    def __init__(self):
        Sandbox.count += 1
        self.base = FIRST_ID + 65536 * Sandbox.count
        ours, theirs = socket.socketpair()
        self.outer = os.fork()
        if self.outer == 0:
            try:
                ours.close()
                be_sandbox(theirs)
            finally:
                os._exit(1)
        theirs.close()
        ours.settimeout(TIMEOUT)
        self.link = ours
        assert ours.recv(1) == b"u", "unshare"
        for name in ("uid_map", "gid_map"):
            with open("/proc/%d/%s" % (self.outer, name), "w") as f:
                f.write("0 %d 65536" % self.base)
        ours.send(b"m")
        answer = ours.recv(64)
        assert answer, "PID 1 did not start"
        self.pid = int(answer)
        self.pidfd = os.pidfd_open(self.pid)

    def kill(self):
        if self.pidfd is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.waitpid(self.outer, 0)
        os.close(self.pidfd)
        self.link.close()
        self.pidfd = None


def be_sandbox(link):
    os.dup2(link.detach(), 3)
    os.closerange(4, 4096)  # whatever else the tests hold open must not live as long as this sandbox
    link = socket.socket(fileno=3)
    libc.prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)  # die with the tests
    os.setresgid(ZYGOTE_UID, ZYGOTE_UID, ZYGOTE_UID)
    os.setresuid(0, ZYGOTE_UID, 0)
    check("unshare", libc.unshare(ALL_NAMESPACES))
    link.send(b"u")
    link.recv(1)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.setgroups([])
    libc.prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)  # a change of user has cleared it
    r, w = os.pipe()
    init = os.fork()
    if init == 0:
        link.close()
        libc.prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        mount("proc", "/proc", "proc")
        mount("tmpfs", "/tmp/home", "tmpfs", 0, "mode=755,uid=1000,gid=1000")
        # Only an exec makes this process's memory belong to its user namespace, without which the zygote may not
        # enter by pidfd.
        os.execve("/bin/sleep", ["init", "infinity"], {})
    os.close(w)
    os.read(r, 1)  # closed by the exec
    link.send(b"%d" % init)
    os.waitpid(init, 0)
    os._exit(0)


# --- a maker ----------------------------------------------------------------------------------------------------------

NUMBERS = {"x86_64": {"setns": 308, "clone3": 435, "ptrace": 101}, "aarch64": {"setns": 268, "clone3": 435, "ptrace": 117}}


def bpf(rules):
    """A seccomp filter that answers the named calls with an errno and allows the rest."""
    numbers = NUMBERS[os.uname().machine]
    out = [struct.pack("HBBI", 0x20, 0, 0, 0)]
    for name, error in rules:
        out.append(struct.pack("HBBI", 0x15, 0, 1, numbers[name]))
        out.append(struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | error))
    return b"".join(out + [struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)])


BASE_FILTER = (("ptrace", 1),)
DELTA_FILTER = (("setns", 1), ("clone3", 38))


def install_filter(program):
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    check("seccomp", libc.prctl(22, ctypes.c_ulong(2), ctypes.create_string_buffer(fprog, len(fprog)), 0, 0))


def short_order(op, token, uid, gid, groups, cwd, nofile, ahead=False):
    """An order to fork as the shim reads it."""
    head = struct.pack("<cBBBIII", b"F", ahead, len(groups), len(token), uid, gid, nofile)
    return head + struct.pack("<%dI" % len(groups), *groups) + token.encode() + os.fsencode(cwd)


class Failed(Exception):
    """The zygote said that it could not."""


class Maker:
    """Starts a zygote the way the privileged parent does and gives it orders."""

    def __init__(self, python, preload=(), isolated=True, kernel_dir=KERNEL_DIR, **configure):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = ours
        ours.settimeout(TIMEOUT * 2)
        self.tokens = 0
        self.anchors = []  # pidfds
        self.inbox = []
        self.log, log_in = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.be_zygote(python, theirs, log_in, isolated, kernel_dir)
            except BaseException as e:
                os.write(2, ("start zygote: %r\n" % e).encode())
            os._exit(1)
        os.close(log_in)
        theirs.close()
        delta = ""
        if isolated:
            delta = "/tmp/delta-%d.bpf" % os.getpid()
            with open(delta, "wb") as f:
                f.write(bpf(DELTA_FILTER))
        self.tell(dict(op="configure", preload=list(preload), kernel_dir=kernel_dir, delta=delta, **configure))
        self.ready, _ = self.hear()

    @staticmethod
    def be_zygote(python, control, log, isolated, kernel_dir):
        os.dup2(os.open("/dev/null", os.O_RDWR), 0)
        fd = os.dup(control.fileno())
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(fd, 3)
        os.closerange(4, 4096)
        if isolated:
            os.setgroups([])
            os.setresgid(ZYGOTE_UID, ZYGOTE_UID, ZYGOTE_UID)
            os.setresuid(ZYGOTE_UID, ZYGOTE_UID, ZYGOTE_UID)
            libc.prctl(38, ctypes.c_ulong(1), 0, 0, 0)
            install_filter(bpf(BASE_FILTER))
        os.chdir("/")
        os.execve(python, [python, "-I", os.path.join(kernel_dir, "zygote.py")], {})

    def adopt(self, pid, token):
        self.tell(struct.pack("<c3xi", b"A", pid) + token.encode())

    def tell(self, message, fds=()):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.control.sendmsg([message if isinstance(message, bytes) else json.dumps(message).encode()], rights)

    def hear(self):
        data, ancillary, _, _ = self.control.recvmsg(65536, socket.CMSG_SPACE(64))
        fds = array.array("i")
        for _, _, payload in ancillary:
            fds.frombytes(payload)
        if not data:
            raise EOFError("the zygote is gone: " + self.log_text())
        return json.loads(data), list(fds)

    def expect(self, kind, token=None):
        """The next message of that kind; what comes in between waits for its turn."""
        while True:
            for i, (message, fds) in enumerate(self.inbox):
                if message["type"] == kind and (token is None or message.get("token") == token):
                    del self.inbox[i]
                    return message, fds
                if message["type"] == "failed" and message.get("token") == (token or ""):
                    del self.inbox[i]
                    raise Failed(message["error"])
            self.inbox.append(self.hear())

    def order(self, sandbox, cgroups=(), **more):
        """Ask for a kernel; its peer, before it is known to be ready."""
        self.tokens += 1
        token = "t%d" % self.tokens
        ours, theirs = socket.socketpair()
        out, out_in = os.pipe()
        err, err_in = os.pipe()
        message = dict(op="fork", token=token, uid=1000, gid=1000, groups=[1000], cwd="/tmp/home", nofile=4096)
        env = more.pop("env", {"HOME": "/tmp/home", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"})
        for birth in more.pop("births", [{"env": env}]):
            first = json.dumps(birth, separators=(",", ":")).encode()
            ours.sendall(bytes([8, 0, 0, 0]) + len(first).to_bytes(4, "big") + first)
        message.update(more)
        if self.ready["way"] == "shim":
            message = short_order(**message)
        self.tell(message, [theirs.fileno(), out_in, err_in, sandbox.pidfd] + list(cgroups))
        theirs.close()
        os.close(out_in)
        os.close(err_in)
        agent = Agent(ours, out, err)
        agent.token = token
        return agent

    def fork(self, sandbox, **more):
        agent = self.order(sandbox, **more)
        message, fds = self.expect("forked", agent.token)
        agent.pid, agent.pidfd = message["pid"], fds[0]
        agent.anchor = fds[1] if len(fds) > 1 else None
        if agent.anchor is not None:
            self.anchors.append(os.dup(agent.anchor))
        agent.ready = agent.event()
        return agent

    def floor(self):
        self.tokens += 1
        ours, theirs = socket.socketpair()
        self.tell({"op": "floor", "token": "t%d" % self.tokens}, [theirs.fileno()])
        theirs.close()
        agent = Agent(ours, None, None)
        agent.token = "t%d" % self.tokens
        return agent

    def see_anchors_end(self):
        """Nobody holds them here: they end with their zygote."""
        for fd in self.anchors:
            if not select.select([fd], [], [], TIMEOUT)[0]:
                raise AssertionError("an anchor outlives its zygote")
            os.close(fd)
        self.anchors = []

    def log_text(self):
        text = b""
        while select.select([self.log], [], [], 0)[0]:
            chunk = os.read(self.log, 65536)
            if not chunk:
                break
            text += chunk
        return text.decode("utf-8", "replace")

    def close(self):
        self.control.close()
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                os.close(self.log)
                self.see_anchors_end()
                return
            time.sleep(0.005)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def prefixes(python):
    """The folders that an interpreter needs."""
    code = "import sys; print(sys.prefix); print(sys.base_prefix)"
    return subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")[:2]
