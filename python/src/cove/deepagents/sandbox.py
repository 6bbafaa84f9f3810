"""A sandbox of Cove as the file system and shell of a deep agent."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from deepagents.backends.protocol import (
    EditResult, ExecuteResponse, FileDownloadResponse, FileUploadResponse, GlobResult, LsResult, ReadResult, WriteResult,
)
from deepagents.backends.sandbox import BaseSandbox

from .. import _calls as calls
from .._drive import Work, adrive, drive
from .._transport import AsyncTransport, Transport
from ..client import Cove, Sandbox
from ..errors import NotFound
from . import _files as ops

T = TypeVar("T")

DEFAULT_TIMEOUT = 300
# Files of one batch that are on their way at the same time.
_AT_ONCE = 8
_LIVING = ("starting", "running", "paused")


class Handle(Sandbox):
    """A sandbox with the two words that deepagents' users know."""

    def terminate(self) -> None:
        """End the sandbox. One that has ended already is no error."""
        try:
            self.kill()
        except NotFound:
            pass

    @property
    def is_active(self) -> bool:
        """Whether the sandbox lives; the server is asked."""
        try:
            return self.refresh().state in _LIVING
        except NotFound:
            return False


class Backend(BaseSandbox):
    """What every backend here does, in the sandbox that its subclass finds for a call."""

    # The wrapper that deepagents puts around commands needs a POSIX shell and coreutils; every sandbox has them.
    enable_capture_offload = True

    def __init__(self, cove: Cove, *, timeout: float, env: Mapping[str, str] | None = None,
                 max_download_bytes: int = ops.MAX_DOWNLOAD_BYTES) -> None:
        if timeout < 0:
            raise ValueError(f"timeout must not be negative, got {timeout}: 0 is no limit")
        if max_download_bytes < 0:
            raise ValueError(f"max_download_bytes must not be negative, got {max_download_bytes}")
        self._cove = cove
        self._timeout = timeout
        self._env = dict(env) if env else None
        self._largest = max_download_bytes
        self._t: Transport = cove._t
        settings = self._t.settings
        self._at = AsyncTransport(settings.url, "", settings.timeout, settings.headers)

    # Subclasses say in which sandbox an operation happens.

    def _do(self, op: Callable[[str], Work[T]]) -> T:
        return drive(op(self.id), self._t.send)

    async def _ado(self, op: Callable[[str], Work[T]]) -> T:
        return await adrive(op(self.id), self._at.send)

    async def aclose(self) -> None:
        """Let go of the connections that this event loop made."""
        await self._at.close()

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a shell command. Each has a shell of its own: files stay, the working directory and variables do not.

        A command that takes longer than timeout seconds (default: the backend's; 0: no limit) is ended with all that it
        started, and answers 124 with what it had written.
        """
        limit = self._limit(timeout)
        return self._do(lambda id: ops.execute(id, command, limit, self._env))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        limit = self._limit(timeout)
        return await self._ado(lambda id: ops.execute(id, command, limit, self._env))

    def execute_with_offload(self, command: str, capture_path: str, **more: Any) -> Any:
        """Run a command and leave what is too large of its output in the sandbox; where is deepagents' choice."""
        self._do(lambda id: ops.offer(id, posixpath.dirname(capture_path)))
        return super().execute_with_offload(command, capture_path, **more)

    async def aexecute_with_offload(self, command: str, capture_path: str, **more: Any) -> Any:
        await self._ado(lambda id: ops.offer(id, posixpath.dirname(capture_path)))
        return await super().aexecute_with_offload(command, capture_path, **more)

    def _limit(self, timeout: float | None) -> float:
        limit = self._timeout if timeout is None else timeout
        if limit < 0:
            raise ValueError(f"timeout must not be negative, got {limit}: 0 is no limit")
        return limit

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [self._do(lambda id, p=p, c=c: ops.upload(id, p, c)) for p, c in files]  # type: ignore[misc]

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return await self._all([lambda id, p=p, c=c: ops.upload(id, p, c) for p, c in files])  # type: ignore[misc]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Files as they are; one that is larger than the backend's max_download_bytes is an error in its answer."""
        return [self._do(lambda id, p=p: ops.download(id, p, self._largest)) for p in paths]  # type: ignore[misc]

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return await self._all([lambda id, p=p: ops.download(id, p, self._largest) for p in paths])  # type: ignore[misc]

    async def _all(self, wanted: list[Callable[[str], Work[T]]]) -> list[T]:
        """Some at once, answers in the order of wanted."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(op: Callable[[str], Work[T]]) -> T:
            async with gate:
                return await self._ado(op)

        return list(await asyncio.gather(*map(one, wanted)))

    def ls(self, path: str) -> LsResult:
        return self._do(lambda id: ops.ls(id, path))

    async def als(self, path: str) -> LsResult:
        return await self._ado(lambda id: ops.ls(id, path))

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        return self._do(lambda id: ops.read(id, file_path, offset, limit))

    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        return await self._ado(lambda id: ops.read(id, file_path, offset, limit))

    def write(self, file_path: str, content: str) -> WriteResult:
        return self._do(lambda id: ops.write(id, file_path, content))

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        return await self._ado(lambda id: ops.write(id, file_path, content))

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        if not old_string:
            return super().edit(file_path, old_string, new_string, replace_all)
        done = self._do(lambda id: ops.edit(id, file_path, old_string, new_string, replace_all))
        return done or super().edit(file_path, old_string, new_string, replace_all)

    async def aedit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        if not old_string:
            return await super().aedit(file_path, old_string, new_string, replace_all)
        done = await self._ado(lambda id: ops.edit(id, file_path, old_string, new_string, replace_all))
        return done or await super().aedit(file_path, old_string, new_string, replace_all)

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        done = self._do(lambda id: ops.glob(id, pattern, path))
        return done or super().glob(pattern, path)

    async def aglob(self, pattern: str, path: str | None = None) -> GlobResult:
        done = await self._ado(lambda id: ops.glob(id, pattern, path))
        return done or await super().aglob(pattern, path)

    # What a class has is what the agent is told it can do, and deepagents 0.6 knows no delete.
    if ops.PAGES:
        def delete(self, file_path: str) -> Any:
            return self._do(lambda id: ops.delete(id, file_path))

        async def adelete(self, file_path: str) -> Any:
            return await self._ado(lambda id: ops.delete(id, file_path))


class CoveSandbox(Backend):
    """One sandbox as a deepagents backend: `create_deep_agent(model, backend=CoveSandbox.create())`.

    Its life is the caller's: `backend.sandbox.terminate()` ends it, and what is asked of it afterwards raises `cove.Gone`.
    """

    def __init__(self, sandbox: Sandbox, *, timeout: float = DEFAULT_TIMEOUT, env: Mapping[str, str] | None = None,
                 max_download_bytes: int = ops.MAX_DOWNLOAD_BYTES) -> None:
        super().__init__(sandbox._cove, timeout=timeout, env=env, max_download_bytes=max_download_bytes)
        self._sandbox = sandbox if isinstance(sandbox, Handle) else Handle(sandbox._cove, sandbox.info)

    @classmethod
    def create(cls, template: str | None = None, *, cove: Cove | None = None, command_timeout: float = DEFAULT_TIMEOUT,
               **request: Any) -> CoveSandbox:
        """A new sandbox; keyword arguments are those of `Cove.create`."""
        return cls((cove or Cove()).create(template, **request), timeout=command_timeout)

    @classmethod
    async def acreate(cls, template: str | None = None, *, cove: Cove | None = None, command_timeout: float = DEFAULT_TIMEOUT,
                      **request: Any) -> CoveSandbox:
        return await asyncio.to_thread(cls.create, template, cove=cove, command_timeout=command_timeout, **request)

    @classmethod
    def from_id(cls, id: str, *, cove: Cove | None = None, timeout: float = DEFAULT_TIMEOUT) -> CoveSandbox:
        """A sandbox that is there; one that is not raises `cove.NotFound`, one that has ended `cove.Gone`."""
        cove = cove or Cove()
        found = Handle(cove, cove._t.send(calls.get(id)))
        ops.living(found.info)
        return cls(found, timeout=timeout)

    @property
    def id(self) -> str:
        return self._sandbox.id

    @property
    def sandbox(self) -> Handle:
        """The sandbox itself, with `terminate()` and `is_active`."""
        return self._sandbox

    def __enter__(self) -> CoveSandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sandbox.terminate()
