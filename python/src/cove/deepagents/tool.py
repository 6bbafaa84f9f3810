"""Python as a tool of an agent that keeps its files in its own state: a sandbox per run, made when code first needs it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import contextvars
import hashlib
import secrets
import shlex
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Annotated, Any

from langchain_core.runnables import RunnableConfig
from langchain_core.tools import StructuredTool
from langgraph.prebuilt import InjectedState

from ..client import Cove, Sandbox
from ..errors import CoveError
from .sandbox import DEFAULT_TIMEOUT, CoveSandbox

UPLOAD_DIR = "/app"

EXECUTE_PYTHON_PROMPT = (
    "\n\nYou have a tool `execute_python(code)`, which runs Python 3 in a sandbox of its own. The sandbox starts with the first "
    "call of this turn and ends with the turn. Every call is a new process: variables, imports and open files of one call are "
    "not there in the next, so write what you need later to a file. Before each call your files are copied into the sandbox: "
    "the file `name` is `/app/name` there, which is also where the code starts. Files that the code writes stay in the sandbox "
    "and end with it. Only what is printed comes back, after a line `exit=<code>`: print what you want to see."
)

_DESCRIPTION = """Run Python 3 code in a sandbox.

Your files are in /app before the code starts. Every call is a new process; files that it leaves are there in the next call of
this turn. Answers with exit=<code> and then what was printed, errors included."""

# A run that nobody ended is ended by the server.
_IDLE = 15 * 60
# Threads that have a sandbox without a scope; beyond that the one that was made first ends.
_MAX_THREADS = 256
# The runs whose scopes we are in, by their tools.
_scopes: contextvars.ContextVar[Mapping[int, Run]] = contextvars.ContextVar("cove_execute_python_runs", default={})


class Run:
    """The sandbox of one run of an agent, and what it has of the agent's files."""

    def __init__(self, make: Callable[[], Sandbox], timeout: float, upload_dir: str) -> None:
        self._make, self._timeout, self._dir = make, timeout, upload_dir
        self._mu = threading.Lock()
        self._backend: CoveSandbox | None = None
        self._sent: dict[str, bytes] = {}  # path to digest of what was sent

    @property
    def sandbox_id(self) -> str | None:
        """The id of its sandbox; None before the first call."""
        return self._backend.id if self._backend else None

    def execute(self, code: str, files: Mapping[str, Any]) -> str:
        """Copy what changed of the files, run the code, tell how it went."""
        with self._mu:  # calls at once wait for each other's files, then run side by side
            backend = self._living()
            self._seed(backend, files)
        script = f"/tmp/execute_python_{secrets.token_hex(8)}.py"
        # A file: an argument holds 128 KiB and a traceback shows no lines of it.
        backend.sandbox.write(script, code, mode=0o644)
        done = backend.execute(f"cd {shlex.quote(self._dir)} && python3 {script}; s=$?; rm -f {script}; exit $s")
        return f"exit={done.exit_code}\n{done.output}"

    def terminate(self) -> None:
        """End its sandbox, if it has one. Whatever goes wrong with that is not the caller's to handle: the server ends it later."""
        with self._mu:
            backend, self._backend = self._backend, None
            self._sent.clear()
        if backend is not None:
            with contextlib.suppress(CoveError):
                backend.sandbox.terminate()

    def _living(self) -> CoveSandbox:
        if self._backend is None or not self._backend.sandbox.is_active:
            self._backend = CoveSandbox(self._make(), timeout=self._timeout)
            self._sent.clear()
            _own(self._backend, self._dir)
        return self._backend

    def _seed(self, backend: CoveSandbox, files: Mapping[str, Any]) -> None:
        wanted = {self._path(name): _content(data) for name, data in files.items() if data is not None}
        digests = {path: hashlib.sha256(content).digest() for path, content in wanted.items()}
        changed = [path for path, digest in digests.items() if self._sent.get(path) != digest]
        for path in self._sent.keys() - digests.keys():
            with contextlib.suppress(CoveError):  # the code may have removed it itself
                backend.sandbox.remove(path)
            del self._sent[path]
        for path in changed:
            _place(backend, path, wanted[path])
            self._sent[path] = digests[path]

    def _path(self, name: str) -> str:
        return name if name.startswith("/") else f"{self._dir}/{name}"


def _own(backend: CoveSandbox, directory: str) -> None:
    """Make a directory that the sandbox's user can write to, wherever it is."""
    backend.sandbox.mkdir(directory, user="root")
    backend.sandbox.chmod(directory, 0o777, user="root")


def _place(backend: CoveSandbox, path: str, content: bytes) -> None:
    """Put a file where the agent says it is: by root where the user may not, and then the user's to change."""
    done = backend.upload_files([(path, content)])[0]
    if done.error == "permission_denied":
        backend.sandbox.write(path, content, user="root", mode=0o666)
    elif done.error:
        raise ValueError(f"file {path} cannot be copied into the sandbox: {done.error}")


def _content(data: Any) -> bytes:
    """A file of the agent's state: text, or {content, encoding} with text, lines of it, or base64."""
    if isinstance(data, bytes):
        return data
    content, encoding = (data, "utf-8") if isinstance(data, str) else (data.get("content", ""), data.get("encoding", "utf-8"))
    text = content if isinstance(content, str) else "\n".join(content)
    return base64.b64decode(text) if encoding == "base64" else text.encode()


class ExecutePython(StructuredTool):
    """The tool that `make_execute_python_tool` makes."""

    _new: Callable[[], Run]
    _runs: dict[str, Run]
    _mu: threading.Lock

    @contextlib.contextmanager
    def run_scope(self) -> Iterator[Run]:
        """One run of the agent: its calls share a sandbox, which ends with the block however that ends."""
        run = self._new()
        token = _scopes.set({**_scopes.get(), id(self): run})
        try:
            yield run
        finally:
            _scopes.reset(token)
            run.terminate()

    @contextlib.asynccontextmanager
    async def arun_scope(self) -> AsyncIterator[Run]:
        """The same in an event loop."""
        run = self._new()
        token = _scopes.set({**_scopes.get(), id(self): run})
        try:
            yield run
        finally:
            _scopes.reset(token)
            await asyncio.to_thread(run.terminate)

    def terminate(self, thread_id: str | None = None) -> None:
        """End the sandbox of a thread's run, or of the block that runs here. None there is no error, nor a second time."""
        run = _scopes.get().get(id(self))
        if thread_id is not None:
            with self._mu:
                run = self._runs.pop(str(thread_id), None)
        if run is not None:
            run.terminate()

    def _execute(self, code: str, files: Mapping[str, Any], config: RunnableConfig | None) -> str:
        if (scoped := _scopes.get().get(id(self))) is not None:
            return scoped.execute(code, files)
        thread = (config or {}).get("configurable", {}).get("thread_id")
        if thread is not None:
            return self._of_thread(str(thread)).execute(code, files)
        # Nobody says to which run the call belongs: it gets a sandbox to itself rather than somebody else's.
        run = self._new()
        try:
            return run.execute(code, files)
        finally:
            run.terminate()

    def _of_thread(self, thread: str) -> Run:
        with self._mu:
            run = self._runs.setdefault(thread, self._new())
            old = self._runs.pop(next(iter(self._runs))) if len(self._runs) > _MAX_THREADS else None
        if old is not None:
            old.terminate()
        return run


def make_execute_python_tool(cove: Cove | None = None, *, template: str | None = None, timeout: float = DEFAULT_TIMEOUT,
                             upload_dir: str = UPLOAD_DIR, name: str = "execute_python", description: str = _DESCRIPTION,
                             make: Callable[[], Sandbox] | None = None, **create: Any) -> ExecutePython:
    """A tool that runs Python with the agent's files. The model sees one argument, code.

    Calls inside `with tool.run_scope():` share a sandbox that ends with the block. Outside of one they share the sandbox
    of their thread_id until `tool.terminate(thread_id)`; without either each call has its own. Nothing is made before the
    first call. Further keyword arguments are those of `Cove.create`.
    """
    request = {"idle_timeout": _IDLE, **create}
    server: list[Cove] = [cove] if cove else []

    def new() -> Sandbox:
        if make is not None:
            return make()
        if not server:
            server.append(Cove())
        return server[0].create(template, **request)

    def execute_python(code: str, state: Annotated[Any, InjectedState], config: RunnableConfig) -> str:
        return tool._execute(code, _files_of(state), config)

    async def aexecute_python(code: str, state: Annotated[Any, InjectedState], config: RunnableConfig) -> str:
        return await asyncio.to_thread(tool._execute, code, _files_of(state), config)

    tool: ExecutePython = ExecutePython.from_function(  # type: ignore[assignment]
        execute_python, coroutine=aexecute_python, name=name, description=description,
        metadata={"ls_code_input_language": "python"},
    )
    tool._new, tool._runs, tool._mu = (lambda: Run(new, timeout, upload_dir)), {}, threading.Lock()
    return tool


def _files_of(state: Any) -> Mapping[str, Any]:
    files = state.get("files") if isinstance(state, Mapping) else getattr(state, "files", None)
    return files or {}


__all__ = ["EXECUTE_PYTHON_PROMPT", "UPLOAD_DIR", "ExecutePython", "Run", "make_execute_python_tool"]
