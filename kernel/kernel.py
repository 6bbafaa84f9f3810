"""The Python kernel: runs cells and tells what they gave, over frames on one socket.

It knows its socket and its own process and nothing else: no sandbox, no server, no SDK. IPython is used where it can
be imported; without it a small shell of our own gives the same answers for plain code. Output does not travel on the
socket: file descriptors 1 and 2 are pipes that somebody else reads, so C code and subprocesses are heard too.

Started either as `python3 -I kernel.py --fd 3`, or imported by the zygote, which calls prepare() once and then
serve(sock) in each forked child.
"""

import ast
import builtins
import errno
import io
import json
import linecache
import os
import re
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import types

# The kinds of frame a kernel sees; the numbers are those of the Go package agentapi.
FRAME_REQUEST = 1
FRAME_EVENT = 2
FRAME_CONTROL = 8
FRAME_KINDS = 9

MAX_PAYLOAD = 16 << 20  # what one frame may carry
MAX_EVENT = 8 << 20  # what one event may carry; more is replaced by a note
MAX_LOST = 100  # things that a branch tells it has not
HIGH_FD = 900  # the socket moves up here, out of the way of code that counts descriptors
MEMORY_DEVICES = 1  # the major number of /dev/null and its like
RLIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})

HEADER = struct.Struct(">B3sI")
ZEROS = b"\0\0\0"
PASSED = HEADER.pack(FRAME_CONTROL, ZEROS, 0)  # what the agent says of an event that waits
AGENT_MS = 10_000  # how long an agent may take to say it: after that, output may overtake results
DESCRIPTOR_ROOM = socket.CMSG_SPACE(4 * 4)

MODULES = sys.modules  # whatever a cell puts into its place

encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode


class ProtocolError(Exception):
    """The peer does not speak frames."""


class Lost(Exception):
    """The socket is gone: closed by the peer, or by the code that ran here."""


# --- the socket -------------------------------------------------------------------------------------------------------


def move_high(fd):
    """Duplicate fd to a high number, close-on-exec, and close the low one."""
    for floor in (HIGH_FD, 200, 50, 10):
        try:
            high = fcntl_dup(fd, floor)
        except (OSError, ValueError):  # above RLIMIT_NOFILE
            continue
        os.close(fd)
        return high
    os.set_inheritable(fd, False)
    return fd


def fcntl_dup(fd, floor):
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor)


class Channel:
    """Frames on a stream socket. Only the process that opened it may speak on it."""

    def __init__(self, sock, answers=True):
        self.answers = answers  # somebody at the other end says what was passed on
        fd = move_high(sock.detach())
        self.sock = socket.socket(fileno=fd)
        self.sock.setblocking(True)
        self.fd = fd
        self.pid = os.getpid()
        self.identity = identity(fd)
        self.lock = threading.Lock()
        self.buffer = bytearray()
        self.descriptors = []  # that came with frames

    def check(self):
        # Code that ran here may have closed our descriptor and opened a file with the same number: never write
        # events into that file.
        if identity(self.fd) != self.identity:
            raise Lost("the kernel's socket was closed by the code")

    def send(self, kind, payload, wanted=None):
        """Write a frame, unless wanted, which is asked while no other thread writes one, says no."""
        with self.lock:
            if wanted is not None and not wanted():
                return
            self.check()
            try:
                self.sock.sendall(HEADER.pack(kind, ZEROS, len(payload)) + payload)
            except OSError as e:
                raise Lost("socket: %s" % e)

    def receive(self):
        """The next frame, or None when the peer has closed between frames."""
        header = PASSED
        while header == PASSED:  # of a cell that is over
            header = self._read(HEADER.size, True)
        if header is None:
            return None
        kind, zeros, length = HEADER.unpack(header)
        if not 0 < kind <= FRAME_KINDS or zeros != ZEROS:
            raise ProtocolError("bad frame header %r" % header)
        if length > MAX_PAYLOAD:
            raise ProtocolError("frame of %d bytes is over the limit of %d" % (length, MAX_PAYLOAD))
        return kind, self._read(length, False)

    def passed(self):
        """Wait until the peer has passed the last event on; false when it has not in time, or says something else."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        self.check()
        if self.buffer or not poll.poll(AGENT_MS):
            return False
        try:
            word = self.sock.recv(HEADER.size, socket.MSG_DONTWAIT)
        except OSError:
            return False
        if word != PASSED:
            self.buffer += word  # the end of the stream, or what comes after this cell
        return word == PASSED

    def _read(self, n, at_boundary):
        buffer = self.buffer
        while len(buffer) < n:
            self.check()
            try:
                chunk = self._receive(max(65536, min(n - len(buffer), 1 << 20)))
            except ConnectionResetError:
                chunk = b""
            except OSError as e:
                raise Lost("socket: %s" % e)
            if not chunk:
                if at_boundary and not buffer:
                    return None
                raise ProtocolError("the stream ended inside a frame")
            buffer += chunk
        data = bytes(buffer[:n])
        del buffer[:n]
        return data


    def _receive(self, n):
        chunk, ancillary, _, _ = self.sock.recvmsg(n, DESCRIPTOR_ROOM, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.descriptors += struct.unpack("%di" % (len(payload) // 4), payload[: len(payload) // 4 * 4])
        return chunk


# --- values that become JSON ------------------------------------------------------------------------------------------


def jsonable(value, depth=0):
    """A copy of value that JSON can carry: NaN becomes null, strange things become their text."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        try:
            int.__repr__(value)
        except ValueError:  # more digits than Python is willing to print
            return "<int of %d bits>" % int.bit_length(value)
        return int(value)
    if isinstance(value, float):
        return float(value) if value - value == 0 else None
    if depth > 64:
        return safe_text(value)
    if isinstance(value, dict):
        return {k if isinstance(k, str) else safe_text(k): jsonable(v, depth + 1) for k, v in list(value.items())}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(v, depth + 1) for v in list(value)]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64_text(value)
    for name in ("tolist", "item"):  # numpy's arrays and scalars
        method = getattr(type(value), name, None)
        if method is not None:
            try:
                return jsonable(method(value), depth + 1)
            except Exception:
                pass
    return safe_text(value)


def safe_text(value):
    """str(value), whatever value does to prevent it."""
    for convert in (str, repr, object.__repr__):
        try:
            return str.__str__(convert(value))
        except Exception:
            pass
    return "<unprintable>"


def base64_text(data):
    import binascii

    return binascii.b2a_base64(data, newline=False).decode("ascii")


def wire_value(mime, value):
    """One value of a MIME bundle as it travels: text as text, bytes in base64, JSON as itself."""
    if type(value) is str:
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        if mime.startswith("text/") or mime.endswith(("+xml", "/javascript")):
            return bytes(value).decode("utf-8", "replace")
        return base64_text(value)
    if mime == "application/json" or mime.endswith("+json"):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
        return "".join(value)
    return safe_text(value)


def encode_event(event):
    try:
        return encode(event).encode("ascii")
    except (TypeError, ValueError, RecursionError, OverflowError):
        return encode(jsonable(event)).encode("ascii")


# --- standard streams -------------------------------------------------------------------------------------------------


class Pipe(io.FileIO):
    """Output on its way to the agent, which reads each of the two pipes as something comes: so that it sees what was first,
    a pipe is written to when the other is empty. Where nobody reads in time the order is lost, and little time."""

    last = None  # the one that was written to at last
    slow = False
    first = None  # what is to be done before anything is written

    @staticmethod
    def give_way():
        # Cells run in the main thread: the socket is its alone.
        if Pipe.first is not None and threading.current_thread() is threading.main_thread():
            first, Pipe.first = Pipe.first, None
            first()

    def write(self, data):
        self.give_way()
        before, Pipe.last = Pipe.last, self
        if before is not None and before is not self:
            before.settle()
        return super().write(data)

    def settle(self):
        import fcntl

        held = bytearray(4)
        for attempt in range(64):
            try:
                fcntl.ioctl(self.fileno(), 0x541B, held)  # FIONREAD
            except (OSError, ValueError):
                return
            if not any(held):
                self.slow = False
                return
            if self.slow:
                return
            if attempt < 16:
                os.sched_yield()
            else:
                time.sleep(0.0002)
        self.slow = True


def open_stream(fd, errors):
    raw = Pipe(fd, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw, 8192), encoding="utf-8", errors=errors, line_buffering=True)


class Streams:
    """sys.stdin, stdout and stderr over descriptors 0 to 2, put back when a cell has broken them."""

    def __init__(self):
        self.kept, self.identities = [], []
        self.open()

    def open(self):
        if not is_open(0):
            put_null(0, os.O_RDONLY)
        for fd in (1, 2):
            if not is_open(fd):
                put_null(fd, os.O_WRONLY)
        self.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding="utf-8")
        self.stdout = open_stream(1, "backslashreplace")
        self.stderr = open_stream(2, "backslashreplace")
        sys.stdin = sys.__stdin__ = self.stdin
        sys.stdout = sys.__stdout__ = self.stdout
        sys.stderr = sys.__stderr__ = self.stderr

    def keep(self):
        """Remember what descriptors 1 and 2 are, so that a closed one can be put back."""
        for fd in self.kept:
            try:
                os.close(fd)
            except OSError:
                pass
        self.kept = []
        self.identities = [identity(1), identity(2)]
        for fd in (1, 2):
            for floor in (HIGH_FD, 200, 50, 10):
                try:
                    self.kept.append(fcntl_dup(fd, floor))
                    break
                except (OSError, ValueError):
                    continue

    def flush(self):
        Pipe.give_way()  # also for programs that write after us
        for stream in (getattr(sys, "stdout", None), getattr(sys, "stderr", None), self.stdout, self.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        if "ctypes" in sys.modules:  # cheap only when something else has loaded it; C code that prints mostly has
            flush_c()

    def repair(self):
        """After a cell: descriptors 1 and 2 are the pipes again, and dead stream objects are replaced.

        A redirected descriptor would make the kernel mute for good, a replaced sys.stdout is left alone.
        """
        if not is_open(0):
            put_null(0, os.O_RDONLY)
        for i, fd in enumerate((1, 2)):
            if i < len(self.kept) and identity(fd) == self.identities[i]:
                continue
            try:
                os.dup2(self.kept[i], fd)
            except (OSError, IndexError):
                if not is_open(fd):
                    put_null(fd, os.O_WRONLY)
        if self.stdout.closed or self.stdout.buffer is None:
            self.stdout = sys.__stdout__ = open_stream(1, "backslashreplace")
        if self.stderr.closed:
            self.stderr = sys.__stderr__ = open_stream(2, "backslashreplace")
        if unusable(getattr(sys, "stdout", None)):
            sys.stdout = self.stdout
        if unusable(getattr(sys, "stderr", None)):
            sys.stderr = self.stderr


def unusable(stream):
    if stream is None:
        return True
    try:
        return bool(getattr(stream, "closed", False)) or not hasattr(stream, "write")
    except Exception:
        return True


def is_open(fd):
    try:
        os.fstat(fd)
        return True
    except OSError as e:
        return e.errno != errno.EBADF


def identity(fd):
    try:
        st = os.fstat(fd)
        return st.st_dev, st.st_ino
    except OSError:
        return None


def put_null(fd, flags):
    null = os.open(os.devnull, flags)
    if null == fd:
        os.set_inheritable(fd, True)
        return
    os.dup2(null, fd)
    os.close(null)


c_flush = None


def flush_c():
    """Flush C's own stdout, which a pipe makes block-buffered."""
    global c_flush
    if c_flush is None:
        c_flush = find_c_flush()
    c_flush()


def find_c_flush():
    try:
        import ctypes

        libc = ctypes.PyDLL(None)
        stream = ctypes.c_void_p.in_dll(libc, "stdout")
        fflush = libc.fflush
        fflush.argtypes = [ctypes.c_void_p]
        return lambda: fflush(stream)
    except Exception:
        return lambda: None


# --- commands ---------------------------------------------------------------------------------------------------------


def run_command(argv, text=None):
    """Run a command on our own descriptors 1 and 2 and return its status, negative for a signal.

    Not os.system: that is deaf to SIGINT, which is how a cell is interrupted.
    """
    process = subprocess.Popen(argv, stdin=None if text is None else subprocess.PIPE)
    try:
        if text is not None:
            try:
                process.communicate(text.encode("utf-8", "surrogateescape"))
            except BrokenPipeError:
                pass
        return process.wait()
    except BaseException:
        interrupt_tree(process)
        raise


def interrupt_tree(process):
    for number, patience in ((signal.SIGINT, 1.0), (signal.SIGKILL, 5.0)):
        for pid in descendants(process.pid):
            try:
                os.kill(pid, number)
            except OSError:
                pass
        try:
            process.wait(patience)
            return
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue


def descendants(root):
    """root and everything below it, children last."""
    parents = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return [root]
    for name in names:
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as f:
                    fields = f.read().rpartition(b")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(name))
            except (OSError, IndexError, ValueError):
                pass
    found, at = [root], 0
    while at < len(found):
        found.extend(parents.get(found[at], ()))
        at += 1
    return found


def shell_argv(command):
    for path in ("/bin/bash", "/usr/bin/bash"):
        if os.path.exists(path):
            return [path, "-c", command]
    return ["/bin/sh", "-c", command]


def forget_import_caches():
    """New packages may be on disk now: let the next import look again."""
    import importlib

    importlib.invalidate_caches()


FIRST_WORD = re.compile(r"[^\W\d]\w*")
PIP_LINE = re.compile(r"^([ \t]*)(?:pip3?|python3? -m pip)[ \t]+((?:install|uninstall|list|show|freeze|download|check|"
                      r"--version|index|config|cache|wheel|search|inspect)\b.*|--version)$", re.M)


# --- figures ----------------------------------------------------------------------------------------------------------


class Figures:
    """Shows matplotlib's open figures after each cell and closes them, as notebooks do.

    Nothing of matplotlib is imported here: the hook waits until somebody imports pyplot.
    """

    def __init__(self, kernel):
        self.kernel = kernel
        self.pyplot = None
        if "matplotlib.pyplot" in sys.modules:
            self.attach(sys.modules["matplotlib.pyplot"])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name != "matplotlib.pyplot":
            return None
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return None
        import importlib.util

        if not os.environ.get("MPLBACKEND"):
            sys.modules["matplotlib"].use("agg")
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.attach(module)

            spec.loader.exec_module = exec_module
        return spec

    def attach(self, pyplot):
        self.pyplot = pyplot
        plain_show = pyplot.show

        def show(*args, **kwargs):
            """Show the open figures as results of this cell."""
            self.flush()

        show.__wrapped__ = plain_show
        pyplot.show = show
        self.kernel.pyplot_imported()

    def managers(self):
        helpers = sys.modules.get("matplotlib._pylab_helpers")
        return helpers.Gcf.get_all_fig_managers() if helpers is not None else ()

    def flush(self):
        """Show and close every open figure."""
        managers = self.managers()
        if not managers:
            return
        try:
            for manager in managers:
                figure = manager.canvas.figure
                if figure.axes or figure.lines or figure.texts or figure.images or figure.patches:
                    data, metadata = figure_bundle(figure)
                    self.kernel.enrich(figure, data)
                    self.kernel.emit_result(data, metadata)
        finally:
            self.pyplot.close("all")


def figure_formats():
    config = sys.modules.get("matplotlib_inline.config")
    if config is not None and config.InlineBackend.initialized():
        return set(config.InlineBackend.instance().figure_formats), config.InlineBackend.instance().print_figure_kwargs
    return {"png"}, {"bbox_inches": "tight"}


FIGURE_MIMES = {
    "png": "image/png", "retina": "image/png", "png2x": "image/png", "svg": "image/svg+xml", "jpg": "image/jpeg",
    "jpeg": "image/jpeg", "pdf": "application/pdf",
}


def draw(figure, kind="png", options=None):
    """The figure as bytes, cropped to its content like a notebook's."""
    dpi = figure.dpi * 2 if kind in ("retina", "png2x") else figure.dpi
    out = io.BytesIO()
    arguments = {"dpi": dpi, "facecolor": figure.get_facecolor(), "edgecolor": figure.get_edgecolor()}
    arguments.update({"bbox_inches": "tight"} if options is None else options)
    figure.canvas.print_figure(out, format={"retina": "png", "png2x": "png"}.get(kind, kind), **arguments)
    return out.getvalue()


def figure_bundle(figure):
    kinds, options = figure_formats()
    data, metadata = {"text/plain": repr(figure)}, {}
    for kind in sorted(kinds):
        mime = FIGURE_MIMES.get(kind)
        if mime is None:
            continue
        image = draw(figure, kind, options)
        if kind in ("retina", "png2x") and image[:8] == b"\x89PNG\r\n\x1a\n":
            width, height = struct.unpack(">II", image[16:24])
            metadata[mime] = {"width": width // 2, "height": height // 2}
        data[mime] = image.decode("utf-8") if mime == "image/svg+xml" else base64_text(image)
    return data, metadata


# --- results as data --------------------------------------------------------------------------------------------------

MIME_DATA, MIME_CHART = "application/vnd.cove.data+json", "application/vnd.cove.chart+json"
MAX_ROWS = 10000
MAX_DATA = 1 << 20  # bytes of one value as data
MAX_SAVED = 20  # pictures that one cell shows because it saved them
MAX_PIXELS = 8 << 20


def add_bounded(data, mime, value):
    """Add a value that JSON can carry, unless it is too large to be worth it."""
    value = jsonable(value)
    if len(encode(value)) <= MAX_DATA:
        data[mime] = value


def is_json(value):
    """Is a value made of nothing but what JSON has; not-a-number is let through."""
    try:
        json.dumps(value)
        return True
    except (TypeError, ValueError, RecursionError):
        return False


def is_a(value, module, name):
    """isinstance without importing the class."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def table(frame):
    """A DataFrame's columns; dates are ISO texts."""
    if len(frame) > MAX_ROWS:
        frame = frame.head(MAX_ROWS)
    return {safe_text(name): [plain_value(v) for v in column.tolist()] for name, column in frame.items()}


def plain_value(value):
    if is_a(value, "pandas._libs.tslibs.nattype", "NaTType") or is_a(value, "pandas._libs.missing", "NAType"):
        return None
    iso = getattr(value, "isoformat", None)
    return iso() if callable(iso) else value


def load_charts():
    return load_beside("charts")


def load_beside(name):
    """charts.py and state.py lie beside this file and are loaded when they are first needed."""
    module = sys.modules.get("_cove_" + name)
    if module is None:
        import importlib.util

        spec = importlib.util.spec_from_file_location("_cove_" + name, os.path.join(os.path.dirname(HERE), name + ".py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["_cove_" + name] = module
    return module


class Pictures:
    """Lets PIL's Image.show() and Image.save(path) show the picture as a result. Waits until somebody imports PIL."""

    def __init__(self, kernel):
        self.kernel = kernel
        if "PIL.Image" in sys.modules:
            self.attach(sys.modules["PIL.Image"])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name != "PIL.Image":
            return None
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return None
        import importlib.util

        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.attach(module)

            spec.loader.exec_module = exec_module
        return spec

    def attach(self, module):
        kernel, kind = self.kernel, module.Image
        plain_show, plain_save = kind.show, kind.save

        def display(image):
            out = io.BytesIO()
            try:
                plain_save(image, out, "PNG")
            except (OSError, ValueError):  # a mode that PNG has not
                plain_save(image.convert("RGBA"), out, "PNG")
            kernel.emit_result({"text/plain": repr(image), "image/png": base64_text(out.getvalue())})

        def show(self, *args, **options):
            """Show the picture as a result of this cell."""
            if not kernel.rich:
                return plain_show(self, *args, **options)
            display(self)

        def save(self, fp, *args, **options):
            plain_save(self, fp, *args, **options)
            if kernel.shows_saved(self, fp, sys._getframe(1)):
                display(self)

        show.__wrapped__, save.__wrapped__ = plain_show, plain_save
        save.__doc__ = plain_save.__doc__
        kind.show, kind.save = show, save


# --- tracebacks -------------------------------------------------------------------------------------------------------

HERE = __file__


def own_frame(frame):
    name = frame.f_code.co_filename
    return name == HERE or "/asyncio/" in name and "site-packages" not in name


def user_traceback(tb):
    """The traceback without our own frames: those above the cell, and the signal handler or input() below it."""
    while tb is not None and own_frame(tb.tb_frame):
        tb = tb.tb_next
    at = last = tb
    while at is not None:
        if at.tb_frame.f_code.co_filename != HERE:
            last = at
        at = at.tb_next
    if last is not None:
        last.tb_next = None
    return tb


def plain_traceback(kind, value, tb):
    import traceback

    try:
        text = "".join(traceback.format_exception(kind, value, tb))
    except Exception:
        text = "%s: %s" % (kind.__name__, safe_text(value))
    return text.rstrip("\n").split("\n")


def error_text(value):
    return safe_text(value) if not isinstance(value, KeyError) or len(value.args) != 1 else safe_repr(value.args[0])


def safe_repr(value):
    try:
        return str.__str__(repr(value))
    except Exception:
        return safe_text(value)


# --- running code -----------------------------------------------------------------------------------------------------

SIMPLE = (int, bool, str, bytes)
# Those that may be printed by repr when they are short, and what may be in them.
PLAIN = (dict, list, tuple, float)
SHORT = {int, bool, str, bytes, float, type(None)}
AWAITABLE = getattr(ast, "PyCF_ALLOW_TOP_LEVEL_AWAIT", 0)
CO_COROUTINE = 0x80
HALF_TYPED = 0x4000 | 0x200  # compiler flags that codeop sets for code which is still being typed


class Loop:
    """The event loop of cells that await at top level; made when the first one does."""

    def __init__(self):
        self.loop = None

    def run(self, coroutine):
        import asyncio

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(coroutine)
        try:
            return self.loop.run_until_complete(task)
        except KeyboardInterrupt:
            if not task.done():
                task.cancel()
                try:
                    self.loop.run_until_complete(task)
                except (asyncio.CancelledError, KeyboardInterrupt, Exception):
                    pass
            raise


def run_nodes(tree, name, flags, namespace, loop, interactive):
    """Run a module's statements; the value of a last expression, wrapped in a tuple, or None.

    Compiled as one unit, so that a syntax error anywhere means that nothing ran.
    """
    body = tree.body
    last = None
    if interactive and body and isinstance(body[-1], ast.Expr):
        last = ast.Expression(body.pop().value)
    head_code = compile(tree, name, "exec", flags) if body else None
    last_code = compile(last, name, "eval", flags) if last is not None else None
    return run_programs(head_code, last_code, namespace, loop)


NOT_PYTHON = re.compile(r"^\s*[!%?]|\?\s*$", re.MULTILINE)


def compile_apart(source, name, flags):
    """The statements of a cell that ends in an expression on a line of its own, and that expression, both compiled; None for
    others, and wherever that is not certain. Without a tree of Python objects in between, which costs as much as the rest."""
    head, newline, last = source.rstrip(" \t\f\n").rpartition("\n")
    # What a cell imports from the future holds for all of it. Of what only IPython understands the parts would be compiled twice,
    # with their warnings.
    if not last or last[0].isspace() or "\r" in source or "__future__" in source or NOT_PYTHON.search(head):
        return None
    try:
        # An expression that is whole does not begin inside of something. What comes before it must be whole as well.
        last_code = compile("\n" * source.count("\n", 0, len(head) + 1) + last, name, "eval", flags, True)
        return compile(head + newline, name, "exec", flags, True) if head else None, last_code
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def run_programs(head_code, last_code, namespace, loop):
    if head_code is not None:
        if head_code.co_flags & CO_COROUTINE:
            loop.run(eval(head_code, namespace))
        else:
            exec(head_code, namespace)
    if last_code is None:
        return None
    value = eval(last_code, namespace)
    if last_code.co_flags & CO_COROUTINE:
        value = loop.run(value)
    return (value,)


def ends_quietly(code):
    """Does the cell end in a semicolon, which means: do not show the value."""
    if ";" not in code:
        return False
    if code.rstrip()[-1:] != ";" and "#" not in code.rstrip().rsplit("\n", 1)[-1]:
        return False
    import tokenize

    skip = (tokenize.ENDMARKER, tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT)
    try:
        tokens = [t for t in tokenize.generate_tokens(io.StringIO(code).readline) if t[0] not in skip]
    except (tokenize.TokenError, SyntaxError):
        return False
    return bool(tokens) and tokens[-1][1] == ";"


class Leave(SystemExit):
    """The user's wish to end the kernel, and not a program's to end itself."""


class Exit:
    """exit and quit: end the kernel's process."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return "%s() ends the kernel" % self.name

    def __call__(self, code=None):
        raise Leave(code)


class PlainShell:
    """What runs cells where there is no IPython."""

    name = "plain"

    def __init__(self, kernel):
        self.kernel = kernel
        self.loop = Loop()
        self.count = 1
        self.flags = AWAITABLE
        self.module = types.ModuleType("__main__")
        self.namespace = self.module.__dict__
        self.namespace["__builtins__"] = builtins
        sys.modules["__main__"] = self.module
        self.namespace.update(In=[""], Out={}, display=self.display, update_display=self.update_display,
                              clear_output=lambda wait=False: None, exit=Exit("exit"), quit=Exit("quit"))
        self.hidden = dict(self.namespace)
        self.values = [None, None, None]
        self.displays = 0
        sys.displayhook = self.displayhook

    def names(self):
        """The user's namespace, and what is in it without their doing."""
        return self.namespace, self.hidden

    def execute(self, code, silent):
        name = "<cell %d>" % self.count if not silent else "<silent cell>"
        source, tree = self.parse(code, name)
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        if not silent:
            self.namespace["In"].append(code)
        self.remember_futures(tree)
        value = run_nodes(tree, name, self.flags, self.namespace, self.loop, not silent)
        if value is not None and isinstance(value[0], Exit):
            value[0]()
        if value is not None and value[0] is not None and not ends_quietly(code):
            sys.displayhook(value[0])

    def parse(self, code, name):
        if code.startswith("%%"):
            source = self.cell_magic(code)
            return source, self.ast(source, name)
        if PIP_LINE.match(code) and "\n" not in code.strip():  # `pip --version` is an expression, too
            code = self.line_magics(code)
        try:
            return code, self.ast(code, name)
        except SyntaxError as e:
            source = self.line_magics(code)
            if source == code:
                raise
            try:
                return source, self.ast(source, name)
            except SyntaxError:
                raise e

    def ast(self, source, name):
        return compile(source, name, "exec", self.flags | ast.PyCF_ONLY_AST, True)

    def remember_futures(self, tree):
        import __future__

        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                for alias in node.names:
                    self.flags |= getattr(getattr(__future__, alias.name, None), "compiler_flag", 0)

    def cell_magic(self, code):
        first, _, rest = code.partition("\n")
        if first.split()[0] in ("%%bash", "%%sh", "%%script"):
            self.namespace["__cove_script__"] = self.script
            return "__cove_script__(%r)\n" % rest
        raise SyntaxError("%s needs IPython, which this Python does not have" % first.split()[0])

    def line_magics(self, code):
        lines = []
        for line in code.split("\n"):
            text = line.lstrip()
            indent = line[: len(line) - len(text)]
            pip = PIP_LINE.match(line)
            if text.startswith("!"):
                line = "%s__cove_system__(%r)" % (indent, text[1:].lstrip("!"))
            elif text.startswith("%pip ") or pip:
                arguments = pip.group(2) if pip else text[5:]
                line = "%s__cove_pip__(%r)" % (indent, arguments)
            elif text.startswith("%cd "):
                line = "%s__import__('os').chdir(__import__('os').path.expanduser(%r))" % (indent, text[4:].strip())
            elif text.startswith("%matplotlib"):
                line = indent + "pass"
            lines.append(line)
        self.namespace.update(__cove_system__=self.system, __cove_pip__=self.pip)
        return "\n".join(lines)

    def system(self, command):
        self.kernel.streams.flush()
        self.namespace["_exit_code"] = run_command(shell_argv(command))

    def pip(self, arguments):
        import shlex

        self.system(" ".join([shlex.quote(sys.executable), "-m pip", arguments]))
        self.kernel.look_for_user_site()
        forget_import_caches()

    def script(self, text):
        self.kernel.streams.flush()
        status = run_command(shell_argv("")[:1], text)
        if status:
            raise subprocess.CalledProcessError(status, shell_argv("")[0])

    def displayhook(self, value):
        if value is None:
            return
        names = self.namespace
        # A "_" that the user has taken for something of their own stays theirs.
        if names.get("_", self.values[0]) is self.values[0]:
            self.values = [value] + self.values[:2]
            names.update(_=self.values[0], __=self.values[1], ___=self.values[2])
        if value is not names.get("Out"):
            names["Out"][self.count] = value
        self.kernel.emit_result(*self.bundle(value), main=True)

    def display(self, *values, **options):
        """Show values as results of this cell."""
        name = options.get("display_id")
        if name is True:
            self.displays += 1
            name = "display-%d" % self.displays
        for value in values:
            data, metadata = (value, {}) if options.get("raw") else self.bundle(value)
            self.kernel.emit_result(data, metadata, id=name, update=bool(options.get("update")))
        return name

    def update_display(self, value, display_id, **options):
        """Replace what an earlier display() with this id has shown."""
        self.display(value, display_id=display_id, update=True, **options)

    def bundle(self, value):
        data, metadata = self.reprs(value)
        self.kernel.enrich(value, data)
        return data, metadata

    def reprs(self, value):
        figure = sys.modules.get("matplotlib.figure")
        if figure is not None and isinstance(value, figure.Figure):
            return figure_bundle(value)
        data, metadata = {}, {}
        for method, mime in REPRS:
            call = getattr(value, method, None) if not isinstance(value, type) else None
            if call is None or not callable(call):
                continue
            try:
                found = call()
            except Exception:
                continue
            if found is None:
                continue
            if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict):
                found, more = found
                if mime is None:
                    metadata.update(more)
                else:
                    metadata[mime] = more
            if mime is None:
                data.update(found)
            else:
                data.setdefault(mime, found)
        if "text/plain" not in data:
            data["text/plain"] = pretty(value)
        return data, metadata

    def show_error(self, kind, value, tb):
        self.kernel.emit_error(kind.__name__, error_text(value), plain_traceback(kind, value, tb))

    def forked(self):
        pass

    def reset(self):
        """Forget every cell."""
        names = ("display", "update_display", "clear_output", "exit", "quit", "__builtins__", "__name__", "__doc__",
                 "__package__", "__loader__", "__spec__")
        for name in [n for n in self.namespace if n not in names]:
            del self.namespace[name]
        self.namespace.update(In=[""], Out={})
        self.values = [None, None, None]
        self.count = 1


REPRS = [
    ("_repr_mimebundle_", None), ("_repr_html_", "text/html"), ("_repr_markdown_", "text/markdown"),
    ("_repr_svg_", "image/svg+xml"), ("_repr_png_", "image/png"), ("_repr_jpeg_", "image/jpeg"),
    ("_repr_pdf_", "application/pdf"), ("_repr_latex_", "text/latex"), ("_repr_json_", "application/json"),
    ("_repr_javascript_", "application/javascript"),
]


def pretty(value):
    if type(value) in (list, dict, set, tuple, frozenset):
        import pprint

        try:
            return pprint.pformat(value, width=79, compact=True, sort_dicts=False)
        except Exception:
            pass
    return repr(value)


def make_ipython(kernel):
    """The shell over IPython; raises ImportError where there is none."""
    from IPython.core import release
    from IPython.core.autocall import IPyAutocall
    from IPython.core.macro import Macro
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.error import InputRejected, UsageError
    from IPython.core.formatters import DisplayFormatter
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell
    from IPython.core.profiledir import ProfileDir
    from traitlets import Type, observe
    from traitlets.config import Config

    class Publisher(DisplayPublisher):
        def publish(self, data, metadata=None, source=None, *, transient=None, update=False, **kwargs):
            name = (transient or {}).get("display_id")
            kernel.emit_result(data, metadata or {}, id=name, update=update)

        def clear_output(self, wait=False):
            pass  # what was sent was sent

    class Hook(DisplayHook):
        def quiet(self):
            return False  # decided before the hook is called, without tokenizing every cell

        def compute_format_data(self, result):
            # Nobody has anything but text/plain for these unless a formatter was registered for them by hand.
            kind = type(result)
            if kind in SIMPLE and not self.changed(kind):
                return {"text/plain": repr(result)}, {}
            text = self.short(result) if kind in PLAIN and not kernel.rich and not self.changed(kind) else None
            if text is not None:
                return {"text/plain": text}, {}
            return self.shell.display_formatter.format(result)

        def changed(self, kind):
            """Whether somebody has registered another formatter for a type than it had."""
            if any(kind in printers or object in printers for printers in self.rich):
                return True
            return self.plain.get(kind) is not self.plain_at_start.get(kind)

        def short(self, value):
            """What IPython prints for a container that fits into a line and has nothing but simple values, or a number; None for others."""
            inside = (value,)
            if type(value) is not float:
                if len(value) > 40:
                    return None
                if type(value) is dict:
                    if release.version_info[0] < 8:  # some of them sort the keys
                        return None
                    inside = (*value, *value.values())
                else:
                    inside = value
            kinds, formatter = set(map(type, inside)), self.formatter
            if not kinds <= SHORT or any(map(self.changed, kinds)):
                return None
            if not formatter.pprint or formatter.float_format != "%r" or 0 < formatter.max_seq_length < len(inside):
                return None
            width = formatter.max_width
            if any(len(item) > width for item in inside if type(item) in (str, bytes)):
                return None
            try:
                text = repr(value)
            except ValueError:  # an integer that Python does not write out
                return None
            return text if len(text) <= width else None

        def remember_formatters(self):
            formatters = self.shell.display_formatter.formatters
            others = self.shell.display_formatter.mimebundle_formatter, self.shell.display_formatter.ipython_display_formatter
            self.rich = [f.type_printers for mime, f in formatters.items() if mime != "text/plain"] + [f.type_printers for f in others]
            self.formatter = formatters["text/plain"]
            self.plain = self.formatter.type_printers
            self.plain_at_start = dict(self.plain)

        def write_output_prompt(self):
            pass

        def write_format_data(self, format_dict, md_dict=None):
            kernel.emit_result(format_dict, md_dict or {}, main=True)

        def log_output(self, format_dict):
            pass  # would keep every image that was ever shown

        def finish_displayhook(self):
            self._is_active = False

    class Formatter(DisplayFormatter):
        def format(self, obj, include=None, exclude=None):
            data, metadata = super().format(obj, include=include, exclude=exclude)
            if data and not include and not exclude:
                kernel.enrich(obj, data)
            return data, metadata

    class Profile(ProfileDir):
        @observe("location")
        def _location_changed(self, change):
            pass  # no folders in anybody's home until something needs them

    class AutoExit(IPyAutocall):
        rewrite = False

        def __init__(self, name):
            super().__init__()
            self.name = name

        def __call__(self, code=None):
            raise Leave(code)

        def __repr__(self):
            return "%s() ends the kernel" % self.name

    class Shell(InteractiveShell):
        display_pub_class = Type(Publisher)
        displayhook_class = Type(Hook)

        @observe("ipython_dir")
        def _ipython_dir_changed(self, change):
            pass

        def init_ipython_dir(self, ipython_dir):
            self.ipython_dir = os.environ.get("IPYTHONDIR") or os.path.join(os.path.expanduser("~"), ".ipython")

        def init_profile_dir(self, profile_dir):
            self.profile_dir = Profile(location=os.path.join(self.ipython_dir, "profile_default"))

        def init_display_formatter(self):
            self.display_formatter = Formatter(parent=self)
            self.configurables.append(self.display_formatter)

        def init_virtualenv(self):
            pass

        def init_io(self):
            pass

        def init_readline(self):
            pass

        def ask_exit(self):
            raise Leave(0)

        def system(self, command):
            command = self.var_expand(command, depth=1)
            kernel.streams.flush()
            self.user_ns["_exit_code"] = run_command(shell_argv(command))
            if "pip" in command or "conda" in command or " uv" in command:
                kernel.look_for_user_site()
                forget_import_caches()

        system_raw = system_piped = system

        def enable_gui(self, gui=None):
            pass

        def enable_matplotlib(self, gui=None):
            import matplotlib.pyplot  # noqa: F401, the hook takes it from here

            kernel.figures.pyplot.switch_backend("agg")
            kernel.pyplot_imported()
            return "inline", "agg"

        def _showtraceback(self, kind, value, lines):
            kernel.emit_error(kind.__name__, error_text(value), lines)

        def show_usage_error(self, value):
            kernel.emit_error("UsageError", safe_text(value), ["UsageError: %s" % safe_text(value)])

    class IPythonShell:
        name = "ipython " + release.version

        def __init__(self):
            config = Config()
            config.HistoryManager.enabled = False
            config.InteractiveShell.colors = "NoColor"
            config.InteractiveShell.xmode = "Context"
            config.InteractiveShell.banner1 = ""
            config.InteractiveShell.autoindent = False
            config.InteractiveShell.cache_size = 1000
            self.shell = shell = Shell.instance(config=config)
            nocolor(shell)
            self.loop = Loop()
            # Entered for good: there is no other owner of these hooks in this process.
            shell.builtin_trap.__enter__()
            shell.display_trap.__enter__()
            self.exits = {}
            for name in ("exit", "quit"):
                leave = self.exits[name] = AutoExit(name)
                leave.set_ip(shell)
                shell.user_ns[name] = shell.user_ns_hidden[name] = leave
                setattr(builtins, name, leave)
            for kind, mime in (("png", "image/png"),):
                shell.display_formatter.formatters[mime].for_type_by_name(
                    "matplotlib.figure", "Figure", lambda figure, kind=kind: draw(figure, kind))
            shell.displayhook.remember_formatters()
            register_scripts(shell)
            self.known_transformations = self.transformations()

        @property
        def count(self):
            return self.shell.execution_count

        @count.setter
        def count(self, value):
            self.shell.execution_count = value

        def names(self):
            return self.shell.user_ns, {**self.shell.user_ns_hidden, **self.exits}

        def execute(self, code, silent):
            shell = self.shell
            events = shell.events
            callbacks = events.callbacks
            result = None
            if callbacks["pre_run_cell"] or callbacks["post_run_cell"]:
                try:
                    info = ExecutionInfo(code, not silent, silent, True, None)
                except TypeError:  # before IPython 8
                    info = ExecutionInfo(code, not silent, silent, True)
                result = ExecutionResult(info)
                result.execution_count = shell.execution_count
            events.trigger("pre_execute")
            if not silent and result is not None:
                events.trigger("pre_run_cell", result.info)
            try:
                value = self.run(code, silent)
                if value is not None and value[0] is not None and not ends_quietly(code):
                    if result is not None:
                        result.result = value[0]
                    sys.displayhook(value[0])
            except Exception as e:
                if result is not None:
                    result.error_in_exec = e
                raise
            finally:
                events.trigger("post_execute")
                if not silent and result is not None:
                    events.trigger("post_run_cell", result)

        def run(self, code, silent):
            shell = self.shell
            number = shell.execution_count
            flags = shell.compile.flags & ~HALF_TYPED | AWAITABLE
            show = not silent and shell.ast_node_interactivity != "none"
            usual = show and shell.ast_node_interactivity in ("last_expr", "last")
            python = self.is_python(code)
            if python and usual and not shell.ast_transformers:
                cell = code if code.endswith("\n") else code + "\n"
                programs = compile_apart(cell, shell.compile.cache(cell, number, raw_code=code), flags)
                if programs is not None:
                    self.count_up(number, cell, code)
                    return run_programs(*programs, shell.user_ns, self.loop)
            cell, name, tree = self.parse(code, number, python)
            if not silent:
                self.count_up(number, cell, code)
            if shell.ast_transformers:
                tree = shell.transform_ast(tree)
            if show and not usual:
                return self.run_all(tree, name)
            return run_nodes(tree, name, flags, shell.user_ns, self.loop, show)

        def count_up(self, number, cell, code):
            self.shell.execution_count = number + 1  # displayhook numbers its variables by this minus one
            self.shell.history_manager.store_inputs(number, cell, code)

        def parse(self, code, number, python):
            shell = self.shell
            if python:
                try:
                    return self.parse_cell(code if code.endswith("\n") else code + "\n", code, number)
                except SyntaxError:
                    pass  # IPython may know better what it is
            try:
                return self.parse_cell(shell.transform_cell(code), code, number)
            except SyntaxError:
                fixed = PIP_LINE.sub(r"\1%pip \2", code)
                if fixed == code or code.lstrip().startswith("%%"):
                    raise
            return self.parse_cell(shell.transform_cell(fixed), code, number)

        def is_python(self, code):
            """Whether IPython's transformations would leave a cell that is right Python as it is: they cost as much as the rest."""
            shell = self.shell
            first = code[:1]
            if first in "%!?" or first.isspace() or self.transformations() != self.known_transformations:
                return False
            word = FIRST_WORD.match(code)
            if word is None or "\n" in code.rstrip():
                return True
            # A line of its own may be a magic without its sign, or a thing that is called without parentheses.
            word = word[0]
            return (word not in shell.magics_manager.magics["line"] and shell.autocall == 0
                    and not isinstance(shell.user_ns.get(word), (IPyAutocall, Macro)))

        def transformations(self):
            manager = self.shell.input_transformer_manager
            return [manager.cleanup_transforms[:], manager.line_transforms[:], manager.token_transformers[:],
                    self.shell.input_transformers_post[:]]

        def parse_cell(self, cell, code, number):
            compiler = self.shell.compile
            name = compiler.cache(cell, number, raw_code=code)
            tree = compile(cell, name, "exec", compiler.flags & ~HALF_TYPED | ast.PyCF_ONLY_AST, True)
            for node in tree.body:
                if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                    import __future__

                    for alias in node.names:
                        compiler.flags |= getattr(getattr(__future__, alias.name, None), "compiler_flag", 0)
            return cell, name, tree

        def run_all(self, tree, name):
            """ast_node_interactivity "all" and "last_expr_or_assign": IPython's own, slower way."""
            shell = self.shell
            self.loop.run(shell.run_ast_nodes(tree.body, name, shell.ast_node_interactivity, shell.compile))

        def show_error(self, kind, value, tb):
            shell = self.shell
            sys.last_type, sys.last_value, sys.last_traceback = kind, value, tb
            sys.last_exc = value
            if issubclass(kind, UsageError):
                return shell.show_usage_error(value)
            if shell.custom_exceptions and issubclass(kind, shell.custom_exceptions):
                return shell.CustomTB(kind, value, tb)
            kernel.emit_error(kind.__name__, error_text(value), self.traceback(kind, value, tb))

        def traceback(self, kind, value, tb):
            try:
                if hasattr(value, "_render_traceback_"):
                    return list(value._render_traceback_())
                if has_group(value) or kind is InputRejected:
                    return plain_traceback(kind, value, tb)
                if issubclass(kind, SyntaxError) and tb is None:
                    return self.shell.SyntaxTB.structured_traceback(kind, value, [])
                return self.shell.InteractiveTB.structured_traceback(kind, value, tb, tb_offset=0)
            except Exception:
                return plain_traceback(kind, value, tb)

        def reset(self):
            """Forget every cell."""
            shell = self.shell
            for name in list(shell.compile._filename_map):
                linecache.cache.pop(name, None)
            shell.compile._filename_map.clear()
            shell.reset(new_session=True)
            for name in ("last_type", "last_value", "last_traceback", "last_exc"):
                if hasattr(sys, name):
                    delattr(sys, name)
            shell.user_ns.update(exit=self.exits["exit"], quit=self.exits["quit"])

        def forked(self):
            shell = self.shell
            home = os.environ.get("IPYTHONDIR") or os.path.join(os.environ.get("HOME") or "/", ".ipython")
            # Past the traits' own machinery: nobody watches these, and it would cost more than the rest of the fork.
            shell._trait_values["ipython_dir"] = home
            shell.profile_dir._trait_values["location"] = os.path.join(home, "profile_default")

    def register_scripts(shell):
        """%%bash and its like write straight to our descriptors, unless asked to capture."""
        known = shell.magics_manager.magics["cell"]
        for name in ("bash", "sh"):
            captured = known.get(name)
            if captured is None:
                continue

            def script(line, cell, name=name, captured=captured):
                words = line.split()
                if any(word.startswith("-") and word != "--no-raise-error" for word in words):
                    return captured(line, cell)
                kernel.streams.flush()
                status = run_command([name] + [w for w in words if w != "--no-raise-error"], cell)
                shell.user_ns["_exit_code"] = status
                if "pip" in cell:
                    kernel.look_for_user_site()
                    forget_import_caches()
                if status and "--no-raise-error" not in words:
                    raise subprocess.CalledProcessError(status, cell.encode("utf-8", "replace"))

            shell.register_magic_function(script, "cell", name)

    return IPythonShell()


def nocolor(shell):
    """Tracebacks and reprs are text, never terminal colours; the name of the setting changed with IPython 9."""
    for value in ("nocolor", "NoColor"):
        try:
            shell.colors = value
            shell.InteractiveTB.set_theme_name(value) if hasattr(shell.InteractiveTB, "set_theme_name") else \
                shell.InteractiveTB.set_colors(value)
            return
        except Exception:
            continue


def has_group(value):
    group = getattr(builtins, "BaseExceptionGroup", None)
    seen = set()
    while group is not None and value is not None and id(value) not in seen:
        if isinstance(value, group):
            return True
        seen.add(id(value))
        value = value.__cause__ or value.__context__
    return False


# --- the kernel -------------------------------------------------------------------------------------------------------


class Kernel:
    """One interpreter and, once it serves, one socket."""

    def __init__(self, plain=False):
        self.channel = None
        self.running = False  # a cell is between its started and its end
        self.open_to_interrupt = False  # SIGINT may raise here
        self.open_to_events = False  # the started of a cell is written and its end is not: threads may show something
        self.held = 0  # a frame is being written: an interrupt has to wait
        self.interrupted = False
        self.failed = False
        self.rich = False  # this cell's results are wanted as data, too
        self.saved = 0  # pictures that this cell has shown by saving them
        self.hasty = False  # the agent did not answer in time: this cell waits for it no more
        self.pictures = None
        self.streams = Streams()
        self.user_site_seen = False
        self.known = {}  # what state() keeps
        # Our own module must outlive its place as __main__, which becomes the user's.
        sys.modules.setdefault("_cove_kernel", sys.modules[__name__])
        sys.argv = [""]
        sys.path[:] = [""] + [p for p in sys.path if p not in ("", os.path.dirname(HERE))]
        builtins.input = no_input
        try:
            self.shell = PlainShell(self) if plain else make_ipython(self)
        except ImportError:
            self.shell = PlainShell(self)
        self.figures = Figures(self)

    # What the shell tells.

    def emit(self, event):
        channel = self.channel
        if channel is None or not self.running or os.getpid() != channel.pid:
            return
        if event["type"] != "started":  # nothing has run since the end of the cell before
            self.streams.flush()
        # What is printed next goes another way and must not overtake what is shown now. The value of a cell is the last.
        waits = event["type"] == "result" and not event["result"].get("main") and channel.answers and not self.hasty
        waits = waits and threading.current_thread() is threading.main_thread()
        if waits:
            event["waits"] = True
        payload = encode_event(event)
        if len(payload) > MAX_EVENT:
            payload = encode_event(shortened(event, len(payload)))
        self.send(payload, {"started": self.begin_events, "end": self.end_events}.get(event["type"], self.takes_events))
        if waits:
            Pipe.first = self.let_pass

    def let_pass(self):
        channel = self.channel
        if channel is not None and self.running and os.getpid() == channel.pid and not self.hasty:
            self.hasty = not channel.passed()

    def begin_events(self):
        self.open_to_events = True
        return True

    def takes_events(self):
        return self.open_to_events

    def end_events(self):
        self.open_to_events = False
        return True

    def send(self, payload, wanted):
        # An interrupt that raised in the middle of a frame would leave half of it on the wire.
        if threading.current_thread() is not threading.main_thread():
            self.channel.send(FRAME_EVENT, payload, wanted)
            return
        self.held += 1
        try:
            self.channel.send(FRAME_EVENT, payload, wanted)
        finally:
            self.held -= 1
        if self.interrupted and self.open_to_interrupt and not self.held:
            self.interrupted = False
            raise KeyboardInterrupt

    def emit_result(self, data, metadata=None, main=False, id=None, update=False):
        result = {"data": {str(m): wire_value(str(m), v) for m, v in data.items()}}
        if metadata:
            result["metadata"] = metadata
        if main:
            result["main"] = True
        if id:
            result["id"] = str(id)
        if update:
            result["update"] = True
        self.emit({"type": "result", "result": result})

    def enrich(self, value, data):
        """Add what a value is as data, where somebody wants that and the value has it; a value that resists has none."""
        if not self.rich:
            return
        try:
            if type(value) in (list, dict) and "application/json" not in data and is_json(value):
                add_bounded(data, "application/json", value)
            elif is_a(value, "pandas.core.frame", "DataFrame"):
                add_bounded(data, MIME_DATA, table(value))
            elif is_a(value, "matplotlib.figure", "Figure"):
                chart = load_charts().chart(value)
                if chart is not None:
                    add_bounded(data, MIME_CHART, chart)
        except Exception:
            pass

    def shows_saved(self, image, fp, caller):
        """Is a picture that was saved to be shown: by the cell's own doing, and not the hundredth one."""
        if not self.rich or not isinstance(fp, (str, os.PathLike)) or image.size[0] * image.size[1] > MAX_PIXELS:
            return False
        if str(caller.f_globals.get("__name__", "")).partition(".")[0] == "matplotlib":
            return False  # a figure is shown by itself
        self.saved += 1
        return self.saved <= MAX_SAVED

    def emit_error(self, name, value, lines):
        self.failed = True
        lines = "\n".join(safe_text(line) for line in lines).rstrip("\n").split("\n")
        self.emit({"type": "error", "error": {"name": name, "value": value, "traceback": lines}})

    def pyplot_imported(self):
        """Give `%config InlineBackend.…` something to configure, where IPython's inline package is there."""
        shell = getattr(self.shell, "shell", None)
        if shell is None:
            return
        try:
            from matplotlib_inline.config import InlineBackend

            backend = InlineBackend.instance(parent=shell)
            backend.shell = shell
            if backend not in shell.configurables:
                shell.configurables.append(backend)
        except Exception:
            pass

    # Cells.

    def run(self, request):
        code, silent = request.get("code", ""), bool(request.get("silent"))
        before = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        count = self.shell.count
        self.running, self.failed, self.interrupted = True, False, False
        self.rich, self.saved = bool(request.get("rich")), 0
        self.hasty, Pipe.first = False, None
        if self.rich and self.pictures is None:
            self.pictures = Pictures(self)
        self.listen()
        self.emit({"type": "started", "count": count})
        outcome = "ok"
        pid = os.getpid()
        leave = None
        try:
            self.open_to_interrupt = True
            try:
                if self.interrupted:
                    self.interrupted = False
                    raise KeyboardInterrupt
                self.run_in(request, code, silent)
            finally:
                self.open_to_interrupt = False
        except SystemExit as e:
            if not (self.rich or request.get("notebook")) or isinstance(e, Leave) or os.getpid() != pid:
                leave = e
            else:  # as in a notebook, where a program's sys.exit is an error and its variables are looked at next
                outcome = "error"
                self.show_error(e)
        except Lost:
            raise
        except BaseException as e:
            self.open_to_interrupt = False
            outcome = "interrupted" if isinstance(e, KeyboardInterrupt) else "error"
            if os.getpid() == pid:
                self.show_error(e)
            else:
                sys.excepthook(type(e), e, user_traceback(e.__traceback__))
        if os.getpid() != pid:
            self.exit_fork(leave, outcome)
        if leave is not None:
            self.exit(leave)
        if outcome == "ok" and self.failed:
            outcome = "error"
        if not silent:
            self.shell.count = count + 1
        self.streams.repair()
        self.listen()
        end = {"outcome": outcome, "usage": usage_since(before)}
        if request.get("state"):
            end["value"] = self.state()
        self.emit({"type": "end", "end": end})
        self.running = False

    def state(self):
        """What the cell left, for whoever asked with it; None where that cannot be told."""
        try:
            namespace, hidden = self.shell.names()
            return load_beside("state").snapshot(namespace, hidden, MODULES, self.known)
        except Exception:
            return None

    def run_in(self, request, code, silent):
        """Run one cell in its own environment and working directory, and put both back."""
        env, cwd = request.get("env") or None, request.get("cwd") or None
        if env is None and cwd is None:
            return self.run_code(code, silent)
        old_env = {k: os.environ.get(k) for k in env or ()}
        old_cwd = current_directory() if cwd else None
        try:
            if env:
                os.environ.update(env)
            if cwd:
                os.chdir(cwd)
            self.run_code(code, silent)
        finally:
            self.open_to_interrupt = False
            for k, v in old_env.items():
                if v is None:
                    os.environ.pop(k, None)
                else:
                    os.environ[k] = v
            if old_cwd:
                try:
                    os.chdir(old_cwd)
                except OSError:
                    pass

    def run_code(self, code, silent):
        if not isinstance(code, str):
            raise TypeError("code is %s, not text" % type(code).__name__)
        if not code or code.isspace():
            return
        if not self.user_site_seen:
            self.look_for_user_site()
        try:
            self.shell.execute(code, silent)
        finally:
            if self.figures.pyplot is not None:
                self.figures.flush()

    def show_error(self, error):
        tb = user_traceback(error.__traceback__)
        if isinstance(error, SyntaxError) and (tb is None or only_compiler(tb)):
            tb = None
        strip_chain(error)
        try:
            self.shell.show_error(type(error), error.with_traceback(tb), tb)
        except Lost:
            raise
        except Exception:
            self.emit_error(type(error).__name__, error_text(error), plain_traceback(type(error), error, tb))

    # The process.

    def listen(self):
        """SIGINT is ours, whatever a cell has made of it."""
        if signal.getsignal(signal.SIGINT) is not self.on_interrupt:
            self.on_interrupt = self.on_interrupt  # one bound method, so that the comparison above can be by identity
            signal.signal(signal.SIGINT, self.on_interrupt)
            # Python does not notice a SIGINT that comes just before a system call that waits, or in
            # another thread. The agent sends SIGURG after it: that ends the call, Python looks at its
            # signals, and a cell hears of one interrupt only.
            if signal.getsignal(signal.SIGURG) is signal.SIG_DFL:
                signal.signal(signal.SIGURG, lambda *_: None)

    def on_interrupt(self, number, frame):
        if self.held or not self.open_to_interrupt:
            # Between a cell's start and its code, or in the middle of a frame: it is raised as soon as it can be.
            self.interrupted = self.running
            return
        raise KeyboardInterrupt

    def exit_fork(self, leave, outcome):
        """A child that user code forked has come back from its cell: it is not a kernel and must not go on."""
        self.streams.flush()
        os._exit(exit_status(leave) if leave is not None else int(outcome != "ok"))

    def exit(self, leave):
        status = exit_status(leave)
        self.streams.flush()
        self.finish(status)

    def finish(self, status):
        import atexit

        try:
            atexit._run_exitfuncs()
        except BaseException:
            pass
        self.streams.flush()
        os._exit(status)

    def look_for_user_site(self):
        """Packages that pip put below the home directory, which -I hides; the folder may appear at any time."""
        home = os.environ.get("HOME")
        if not home:
            return
        base = os.environ.get("PYTHONUSERBASE") or os.path.join(home, ".local")
        path = os.path.join(base, "lib", "python%d.%d" % sys.version_info[:2], "site-packages")
        if path in sys.path:
            self.user_site_seen = True
        elif os.path.isdir(path):
            import site

            self.user_site_seen = True
            before = list(sys.path)
            site.addsitedir(path)
            added = [p for p in sys.path if p not in before]
            at = next((i for i, p in enumerate(before) if p.endswith(("site-packages", "dist-packages"))), len(before))
            sys.path[:] = before[:at] + added + before[at:]
            forget_import_caches()

    def after_fork_in_child(self):
        """In a child of user code: the socket is the parent's, and so is the duty to answer."""
        channel = self.channel
        if channel is not None and os.getpid() != channel.pid:
            self.running = False
            try:
                channel.check()
                channel.sock.close()
            except (Lost, OSError):
                pass

    def rehearse(self, cells):
        """Run cells as if somebody had asked, and forget them: what Python and its libraries do only once is done."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        null, kept = os.open(os.devnull, os.O_WRONLY), [os.dup(1), os.dup(2)]
        os.dup2(null, 1)
        os.dup2(null, 2)
        self.channel = Channel(ours, answers=False)
        self.on_interrupt = self.on_interrupt
        try:
            for cell in cells:
                self.run(parse_request(encode({"id": "", "code": cell}).encode("ascii")))
                try:
                    while theirs.recv(1 << 20):
                        pass
                except BlockingIOError:
                    pass
        finally:
            self.streams.flush()
            for fd, old in ((1, kept[0]), (2, kept[1])):
                os.dup2(old, fd)
                os.close(old)
            os.close(null)
            theirs.close()
            self.channel.sock.close()
            self.channel = None
            self.shell.reset()

    def attach(self, sock, brancher=None):
        """Do what depends on descriptors alone; the socket is ours now, and in another place.

        In a zygote's child nobody may hold its anchor yet: nothing here imports a module or opens a path of the sandbox's.
        """
        self.channel = Channel(sock)
        self.brancher = brancher
        self.streams.keep()
        self.on_interrupt = self.on_interrupt
        self.listen()
        os.register_at_fork(after_in_child=self.after_fork_in_child)
        return self.channel.sock

    def serve(self, ready=False):
        """Answer requests until the socket closes. Does not return. Somebody may have said already that it is ready."""
        for path in reversed((os.environ.get("PYTHONPATH") or "").split(os.pathsep)):
            if path and path not in sys.path:
                sys.path.insert(1, path)
        status = 0
        try:
            if not ready:
                self.say_ready()
            while True:
                frame = self.channel.receive()
                if frame is None:
                    break
                if frame[0] == FRAME_REQUEST:
                    self.run(parse_request(frame[1]))
                elif frame[0] == FRAME_CONTROL:
                    self.branch(self.channel.descriptors)
        except Lost as e:
            status = self.give_up(e, 74)
        except ProtocolError as e:
            status = self.give_up(e, 76)
        self.finish(status)

    def say_ready(self, **more):
        self.channel.send(FRAME_EVENT, self.ready(**more))

    def ready(self, **more):
        return encode_event(dict(type="ready", pid=os.getpid(), message=self.shell.name, **more))

    # Branching.

    def branch(self, descriptors):
        """Let a copy of this process be taken; in the copy, begin a life in another sandbox."""
        talk, descriptors[:] = list(descriptors), []
        try:
            why = self.why_not_branched(talk)
            if why is not None:  # before the other end hears that there is no copy, which says less
                self.channel.send(FRAME_EVENT, encode_event({"type": "branched", "message": why}))
        finally:
            for fd in talk:
                try:
                    os.close(fd)
                except OSError:
                    pass

    def why_not_branched(self, talk):
        """An empty text in the kernel that went on, None in a branch, else why there is none."""
        try:
            why = "no socket came with the order" if len(talk) != 1 else self.unbranchable()
            return why or self.branch_over(talk[0])
        except Exception as e:
            if self.channel is None:
                raise  # in a branch that cannot speak yet: it ends, and says why on its standard error
            return "%s: %s" % (type(e).__name__, error_text(e))

    def unbranchable(self):
        if self.brancher is None:
            return "this kernel was not forked from a zygote"
        alive = len(os.listdir("/proc/self/task"))
        if alive > 1:
            return ("the kernel has threads beside the one that runs cells (%d), and a copy would lose them; let them end first "
                    "(pools of threads, such as a ThreadPoolExecutor, have to be shut down)" % (alive - 1))
        return ""

    def branch_over(self, talk):
        """An empty text in the kernel that went on, None in a branch."""
        self.streams.flush()
        # Our own descriptors are made anew; what a cell has open is opened again where that can be done.
        own = {0, 1, 2, self.channel.fd, talk, *self.streams.kept}
        files = [f for f in open_files() if f["fd"] not in own]
        cwd, umask = current_directory(), os.umask(0o022)
        os.umask(umask)
        limits = {i: resource.getrlimit(i) for i in RLIMITS}
        channel, self.channel = self.channel, None  # whatever runs at a fork sees a kernel without one
        try:
            sock = self.brancher.branch(talk)
        except BaseException:  # a signal's handler may raise anything
            self.channel = channel
            raise
        if sock is None:
            self.channel = channel
            return ""
        channel.sock.detach()
        self.streams.kept = []
        sock = clear_of(sock, [f["fd"] for f in files])
        os.umask(umask)
        go_back(cwd)
        lost = reopen(files)
        self.shell.loop.loop = None  # its descriptors were the parent's
        connection = socket.socket(fileno=sock)
        self.brancher.settle_branch(connection)
        keep_limits(limits)
        self.shell.forked()
        self.channel = Channel(connection)
        self.streams.keep()
        self.say_ready(lost=lost[:MAX_LOST])
        return None

    def give_up(self, error, status):
        self.running = False
        try:
            os.write(2, ("kernel: %s\n" % error).encode("utf-8", "replace"))
        except OSError:
            pass
        return status


def open_files():
    """What this process has open: number, kind, and where a file is and how far it was read."""
    files = []
    ours = "/proc/%d/" % os.getpid()
    for text in os.listdir("/proc/self/fd"):
        try:
            fd = int(text)
            st = os.fstat(fd)
            kind = stat.S_IFMT(st.st_mode)
            path = os.readlink("/proc/self/fd/" + text)
            with open("/proc/self/fdinfo/" + text) as f:
                info = dict(line.split(":", 1) for line in f if ":" in line)
        except (OSError, ValueError):
            continue  # the directory that was being listed
        if path.startswith(ours):
            path = "/proc/self/" + path[len(ours):]
        # The simple devices (null, zero, random …) are the same everywhere; a terminal opened again would be another.
        stays = kind not in (stat.S_IFCHR, stat.S_IFBLK) or os.major(st.st_rdev) == MEMORY_DEVICES
        kind = {stat.S_IFSOCK: "socket", stat.S_IFIFO: "pipe"}.get(kind, "file")
        files.append({"fd": fd, "kind": kind, "path": path, "flags": int(info.get("flags", "0"), 8),
                      "position": int(info.get("pos", "0")), "stays": stays and kind == "file"})
    return files


def clear_of(fd, taken):
    """The same descriptor under a number that nobody needs."""
    if fd > 2 and fd not in taken:
        return fd
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = 1 << 16 if limit == resource.RLIM_INFINITY else limit
    for numbers in range(HIGH_FD, limit), range(min(HIGH_FD, limit) - 1, 2, -1):
        for number in numbers:
            if number not in taken and not is_open(number):
                os.dup2(fd, number, inheritable=False)
                os.close(fd)
                return number
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def keep_limits(limits):
    """Take over the limits that a cell has set. How many files may be open was given to each sandbox: of that, only what a
    cell has lowered."""
    for i, wanted in limits.items():
        own = resource.getrlimit(i)
        if i == resource.RLIMIT_NOFILE and wanted[0] == wanted[1]:
            continue
        soft, hard = (min(w, own[1], key=lambda n: float("inf") if n == resource.RLIM_INFINITY else n) for w in wanted)
        if i == resource.RLIMIT_NOFILE:
            hard = own[1]
        if (soft, hard) != own:
            try:
                resource.setrlimit(i, (soft, hard))
            except (OSError, ValueError):
                pass  # a comfort


def go_back(directory):
    for place in (directory, os.environ.get("HOME"), "/"):
        try:
            if place:
                os.chdir(place)
                return
        except OSError:
            pass


def reopen(files):
    """Give every number its file again. What is no file, or is there no more, becomes an end that nobody holds the other
    of: reading finds the end, writing fails. What was lost."""
    lost = []
    once = os.O_CREAT | os.O_EXCL | os.O_TRUNC
    for f in files:
        try:
            if not f["stays"] or not f["path"].startswith("/") or f["path"].endswith(" (deleted)"):
                raise OSError(errno.ENXIO, "not a file")
            fd = os.open(f["path"], f["flags"] & ~once | os.O_NOCTTY | os.O_NONBLOCK)
            if not f["flags"] & os.O_NONBLOCK:
                os.set_blocking(fd, True)
            try:
                os.lseek(fd, f["position"], os.SEEK_SET)
            except OSError:
                pass  # a device
        except OSError:
            ours, theirs = socket.socketpair()
            theirs.close()
            fd = ours.detach()
            lost.append({"kind": f["kind"], "what": safe_text("%s (descriptor %d)" % (f["path"], f["fd"]))[:200]})
        inheritable = not f["flags"] & os.O_CLOEXEC
        if fd != f["fd"]:
            os.dup2(fd, f["fd"], inheritable=inheritable)
            os.close(fd)
        elif inheritable:
            os.set_inheritable(fd, True)
    return lost


def parse_request(payload):
    """A KernelRequest; what cannot be read becomes a cell that says so."""
    try:
        request = json.loads(payload.decode("utf-8", "replace"))
        if not isinstance(request, dict):
            raise ValueError("not an object")
        env = request.get("env") or {}
        if not isinstance(env, dict) or not all(isinstance(v, str) for v in env.values()):
            raise ValueError("env is not a map of strings")
        if not isinstance(request.get("cwd") or "", str):
            raise ValueError("cwd is not text")
        return request
    except (ValueError, RecursionError) as e:
        return {"code": "raise ValueError(%r)" % ("the request cannot be read: %s" % e), "silent": True}


def no_input(prompt="", /):
    """There is nobody to ask."""
    raise RuntimeError("input() is not available: this kernel has no standard input; put the value in the code")


def current_directory():
    try:
        return os.getcwd()
    except OSError:
        return None


def exit_status(leave):
    code = leave.code
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code) & 0xFF
    try:
        print(safe_text(code), file=sys.stderr, flush=True)
    except Exception:
        pass
    return 1


def usage_since(before):
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = (own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
             - before[0].ru_utime - before[0].ru_stime - before[1].ru_utime - before[1].ru_stime)
    return {"cpu_ms": round(max(spent, 0) * 1000, 3), "peak_bytes": own.ru_maxrss << 10}


def only_compiler(tb):
    """A syntax error of the cell itself comes out of compile(), below frames that are not the user's."""
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        if name != HERE and "IPython" not in name and not name.endswith(("codeop.py", "ast.py")):
            return False
        tb = tb.tb_next
    return True


def strip_chain(error):
    """Take our own frames out of the exceptions that led to this one."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for linked in (error.__cause__, error.__context__):
            if linked is not None and linked.__traceback__ is not None:
                stripped = user_traceback(linked.__traceback__)
                if stripped is not None:
                    linked.__traceback__ = stripped
        error = error.__cause__ or error.__context__


def shortened(event, size):
    """What to say in place of an event that is too large to send."""
    note = "%d bytes, over the limit of %d for one event" % (size, MAX_EVENT)
    if event["type"] == "error":
        error = event["error"]
        value = error["value"]
        error["value"] = value[:10000] + " … " if len(value) > 10000 else value
        kept = [line if len(line) <= 2000 else line[:2000] + " …" for line in error["traceback"]]
        error["traceback"] = kept if len(kept) <= 400 else kept[:200] + ["…"] + kept[-200:]
        return event
    result = event["result"]
    kinds = ", ".join(sorted(result["data"]))
    if len(kinds) > 1000:
        kinds = kinds[:1000] + " …"
    result["data"] = {"text/plain": "<result left out: %s; it had %s>" % (note, kinds)}
    result.pop("metadata", None)
    return event


the_kernel = None


def prepare(plain=False):
    """Build the interpreter without serving yet; in a zygote this happens once, before the forks."""
    global the_kernel
    if the_kernel is None:
        the_kernel = Kernel(plain)
    return the_kernel


def reopen_streams():
    """In a zygote's child: descriptors 0 to 2 are others."""
    prepare().streams.open()


def new_environment():
    """In a zygote's child: the environment is another."""
    prepare().shell.forked()


def attach(sock, brancher=None):
    """Have a prepared kernel speak on this socket; the socket that it speaks on."""
    return prepare().attach(sock, brancher)


def serve(ready=False):
    """Be the kernel behind the socket, in the environment that there is. Does not return."""
    prepare().serve(ready)


def ready_frame():
    """What serve says first, for whoever says it in its place."""
    payload = prepare().ready()
    return HEADER.pack(FRAME_EVENT, ZEROS, len(payload)) + payload


def main(argv):
    fd = int(argv[argv.index("--fd") + 1]) if "--fd" in argv else 3
    signal.signal(signal.SIGINT, lambda *_: None)
    os.set_inheritable(fd, False)
    prepare(plain="--plain" in argv)
    attach(socket.socket(fileno=fd))
    serve()


if __name__ == "__main__":
    main(sys.argv[1:])
