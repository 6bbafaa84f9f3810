"""One backend for all threads of a graph: each call finds the sandbox of the thread that it runs for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from langgraph.config import get_config

from .. import _calls as calls, _wire as wire
from .._drive import Work, adrive, drive
from .._threads import session_key
from ..checkpoint import abefore_use, before_use
from ..client import Cove, Session
from ..errors import Gone, Invalid
from ._files import MAX_DOWNLOAD_BYTES
from .sandbox import DEFAULT_TIMEOUT, Backend

T = TypeVar("T")

_REMEMBERED = 1024


def thread_key(prefix: str = "") -> str:
    """The session key of the LangGraph thread that runs here; ids that a key cannot hold are hashed."""
    try:
        thread = get_config().get("configurable", {}).get("thread_id")
    except RuntimeError:  # called outside of a graph
        thread = None
    if thread is None:
        raise Invalid("no thread: call the graph with {'configurable': {'thread_id': ...}}, or use CoveSandbox for one sandbox")
    return session_key(thread, prefix)


class CoveThreadBackend(Backend):
    """A deepagents backend with one sandbox per LangGraph thread.

    The server keeps which sandbox is whose (a session per thread), so any number of processes agree and none remembers
    anything that it needs. Sandboxes are made when a thread first uses one. One that was lost is told (`cove.Gone`) and
    not replaced: call `recreate` when the work in it is given up.
    """

    def __init__(self, cove: Cove | None = None, *, timeout: float = DEFAULT_TIMEOUT, key: Callable[[], str] | None = None,
                 prefix: str = "", env: Mapping[str, str] | None = None, max_download_bytes: int = MAX_DOWNLOAD_BYTES,
                 **session: Any) -> None:
        super().__init__(cove or Cove(), timeout=timeout, env=env, max_download_bytes=max_download_bytes)
        # Files on disk can be checkpointed, those in memory cannot.
        self._request = wire.body(**{"storage": "disk", **session})
        self._key = key or (lambda: thread_key(prefix))
        self._mu = threading.Lock()
        self._seen: OrderedDict[str, str] = OrderedDict()  # key to sandbox: what was true last, checked by using it

    @property
    def id(self) -> str:
        key = self._key()
        return self._known(key) or self._learn(self._t.send(self._open(key)))

    @property
    def session(self) -> Session:
        """The session of this thread."""
        return Session(self._cove, self._t.send(self._open(self._key())))

    def recreate(self, key: str | None = None) -> wire.SessionInfo:
        """Replace a sandbox that was lost; what was in it is gone."""
        info = self._t.send(self._open(key or self._key(), recreate=True))
        self._learn(info)
        return info

    async def arecreate(self, key: str | None = None) -> wire.SessionInfo:
        info = await self._at.send(self._open(key or self._key(), recreate=True))
        self._learn(info)
        return info

    def _do(self, op: Callable[[str], Work[T]]) -> T:
        before_use()
        key = self._key()
        known = self._known(key)
        if known:
            try:
                return drive(op(known), self._t.send)
            except Gone:
                self._forget(key, known)
        # Another process may have put another sandbox in its place; one that was lost is told here.
        return drive(op(self._learn(self._t.send(self._open(key)))), self._t.send)

    async def _ado(self, op: Callable[[str], Work[T]]) -> T:
        await abefore_use()
        key = self._key()
        known = self._known(key)
        if known:
            try:
                return await adrive(op(known), self._at.send)
            except Gone:
                self._forget(key, known)
        return await adrive(op(self._learn(await self._at.send(self._open(key)))), self._at.send)

    def _open(self, key: str, **more: Any) -> calls.Call[wire.SessionInfo]:
        return calls.open_session(key, {**self._request, **more})

    def _known(self, key: str) -> str | None:
        with self._mu:
            if key in self._seen:
                self._seen.move_to_end(key)
            return self._seen.get(key)

    def _learn(self, info: wire.SessionInfo) -> str:
        with self._mu:
            self._seen[info.key] = info.sandbox
            while len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        return info.sandbox

    def _forget(self, key: str, sandbox: str) -> None:
        with self._mu:
            if self._seen.get(key) == sandbox:
                del self._seen[key]
