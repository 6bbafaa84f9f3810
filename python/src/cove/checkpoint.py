"""Sandboxes that go back in time with a LangGraph graph.

`CoveCheckpointer(saver)` stands in front of any checkpoint saver. Whenever the graph saves a checkpoint after code has run, the
thread's session is kept too, files and memory of its kernel; when the graph goes on from an older checkpoint, the session
is put back to what it was then.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NotRequired, TypedDict, cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, ChannelVersions, Checkpoint, CheckpointMetadata, CheckpointTuple
from langgraph.config import get_config

from . import _calls as calls, _default, _wire as wire
from ._drive import Work, adrive, drive
from ._threads import session_key
from ._transport import AsyncTransport
from ._turns import Turns
from .aio import AsyncCove, AsyncSandbox
from .client import Cove, Sandbox, Session
from .errors import Gone, NotFound

# In the metadata of each of the graph's checkpoints: the server's checkpoint of the session as it was then; "" is none yet.
STATE = "cove_checkpoint"
# What LangGraph puts into the config of a run, and not into that of somebody who only looks.
_RUNTIME = "__pregel_runtime"
_CHECKPOINTER = "__pregel_checkpointer"
_REMEMBERED = 4096
# How much of a session's log is asked for, until what is looked for is among it.
_LAST_LINES = (200, 2_000, 20_000, None)
_GATES = 63
_PATIENCE = 60.0


@dataclass(frozen=True)
class _Known:
    """A session as it was when it was last kept or put back: as long as its sandbox is not used again, it still is that."""

    state: str
    sandbox: str
    until: datetime | None

    def holds(self, info: wire.SandboxInfo) -> bool:
        return self.sandbox == info.id and None not in (self.until, info.last_used) and info.last_used <= self.until  # type: ignore[operator]


class CoveCheckpointer(BaseCheckpointSaver[Any]):
    """A checkpoint saver that keeps the sandbox of a thread with each checkpoint of its graph.

    The session is that of the thread: the one that `CoveThreadBackend` and the tools of `cove.langgraph_sandbox` use without a
    key of their own, or what `key` makes of a run's config. It needs storage `disk`. Code that uses a session in another
    way calls `before_use` first, or runs its graph with `durability="sync"`: otherwise LangGraph saves a checkpoint while
    the next step runs already, and what is kept may be later than the checkpoint.
    """

    def __init__(self, saver: BaseCheckpointSaver[Any], cove: Cove | None = None, *, prefix: str = "",
                 key: Callable[[RunnableConfig], str] | None = None) -> None:
        super().__init__(serde=saver.serde)
        self._saver = saver
        self._cove = cove or Cove()
        settings = self._cove._t.settings
        self._at = AsyncTransport(settings.url, "", settings.timeout, settings.headers)
        self._key = key or (lambda config: session_key(config["configurable"]["thread_id"], prefix))
        self._mu = threading.Lock()
        self._known: OrderedDict[str, _Known | None] = OrderedDict()  # by session key
        self._settled: OrderedDict[str, str] = OrderedDict()  # the graph's checkpoint to the session's
        self._gates: OrderedDict[str, list[tuple[str, str]]] = OrderedDict()  # by session key: checkpoints whose step used it, and the state
        # Only one is kept at a time: a copy for an older checkpoint must not be made after code of a newer one began.
        self._turns = Turns(_PATIENCE, "in coroutines await abefore_use() instead of before_use()")
        self._begun: OrderedDict[str, object] = OrderedDict()  # by session key: the run that was last seen

    # What LangGraph calls.

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        found = self._saver.get_tuple(config)
        if self._begins(config) and found is not None:
            drive(self._align(self._key(config), found.metadata), self._cove._t.send)
        return found

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        found = await self._saver.aget_tuple(config)
        if self._begins(config) and found is not None:
            await adrive(self._align(self._key(config), found.metadata), self._at.send)
        return found

    def put(self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata, new_versions: ChannelVersions) -> RunnableConfig:
        if not _nested(config):
            parent = self._saver.get_tuple(config) if _by_hand(config, metadata) else None
            state = self._inherited(parent, checkpoint) if parent else self._settled_at(self._key(config), checkpoint["id"])
            metadata = _with(metadata, state)
        return self._saver.put(config, checkpoint, metadata, new_versions)

    async def aput(self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata,
                   new_versions: ChannelVersions) -> RunnableConfig:
        if not _nested(config):
            parent = await self._saver.aget_tuple(config) if _by_hand(config, metadata) else None
            state = self._inherited(parent, checkpoint) if parent else await self._asettled_at(self._key(config), checkpoint["id"])
            metadata = _with(metadata, state)
        return await self._saver.aput(config, checkpoint, metadata, new_versions)

    # What a graph's own code calls.

    def restore(self, config: RunnableConfig) -> None:
        """Put the session back to what it was at a checkpoint, also one whose sandbox was lost since; default is the newest."""
        found = self._saver.get_tuple(config)
        if found is None:
            raise NotFound("the thread has no such checkpoint")
        drive(self._align(self._key(config), found.metadata, always=True), self._cove._t.send)

    async def arestore(self, config: RunnableConfig) -> None:
        found = await self._saver.aget_tuple(config)
        if found is None:
            raise NotFound("the thread has no such checkpoint")
        await adrive(self._align(self._key(config), found.metadata, always=True), self._at.send)

    def session(self, config: RunnableConfig | None = None, **request: Any) -> Session:
        """The session of the thread that runs here, ready to run code."""
        config = config or get_config()
        before_use(config)
        return self._cove.session(self._key(config), **{"storage": "disk", **request})

    async def aclose(self) -> None:
        """Let go of the connections that this event loop made."""
        await self._at.close()

    # What is true.

    def _begins(self, config: RunnableConfig) -> bool:
        """Whether a run of the graph begins with this: it asks more than once, and others only look."""
        run = config["configurable"].get(_RUNTIME)
        if run is None or _nested(config):
            return False
        key = self._key(config)
        with self._mu:
            seen = self._begun.get(key) is run
            _note(self._begun, key, run)
        return not seen

    def _align(self, key: str, metadata: Mapping[str, Any], always: bool = False) -> Work[None]:
        """Make the session what it was at a checkpoint, unless it went on from there."""
        wanted = metadata.get(STATE)
        if wanted is None:
            return  # saved before there was anything to keep it with
        try:
            info: wire.SessionInfo = yield calls.get_session(key)
        except NotFound:
            if wanted:
                raise Gone(f"session {key} was removed, and its checkpoint {wanted} with it") from None
            return
        head = yield from self._head(key)
        if always or head != wanted:
            try:
                # A session that has been stopped begins anew: so it was before its first code ran.
                info = yield calls.restore(key, {"checkpoint": wanted}) if wanted else calls.stop_session(key)
            except NotFound as err:
                raise Gone(f"the sandbox cannot be put back to this checkpoint: {err.message}") from None
            self._learn(key, _Known(wanted, info.sandbox, (yield calls.get(info.sandbox)).last_used))
        elif (known := self._known.get(key)) and known.state != head:
            self._learn(key, None)  # another process went on with it

    def _head(self, key: str) -> Work[str]:
        """The checkpoint that the session was last kept as or put back to."""
        for last in _LAST_LINES:
            lines = yield calls.log(key, None, last, False)
            for line in reversed(lines):
                if line["event"] in ("checkpoint_created", "checkpoint_restored"):
                    return str(line["checkpoint"])
                if line["event"] == "session_started":
                    return ""
            if last is None or len(lines) < last:
                break
        return ""

    def _settled_at(self, key: str, id: str, gate: bool = False) -> str:
        """The state of the session at a checkpoint of the graph, kept now if it was not."""
        if (done := self._settled.get(id)) is not None:
            return done
        with self._turns.of(key):
            return drive(self._settle(key, id, gate), self._cove._t.send)

    async def _asettled_at(self, key: str, id: str, gate: bool = False) -> str:
        if (done := self._settled.get(id)) is not None:
            return done
        async with self._turns.aof(key):
            return await adrive(self._settle(key, id, gate), self._at.send)

    def _settle(self, key: str, id: str, gate: bool) -> Work[str]:
        if (done := self._settled.get(id)) is not None:
            return done
        # Saved late, after code of a later step was let through: what was kept for that is what was true here, for every use
        # since would have been kept for. The graph's ids are in the order of their time.
        if later := [state for base, state in self._gates.get(key, ()) if base > id]:
            return self._settles(id, later[0])
        state = yield from self._keep(key, id)
        if gate:
            with self._mu:
                _note(self._gates, key, [*self._gates.get(key, ())[-_GATES:], (id, state)])
        return self._settles(id, state)

    def _keep(self, key: str, id: str) -> Work[str]:
        """Keep the session, unless it is what was kept last."""
        try:
            info: wire.SessionInfo = yield calls.get_session(key)
        except NotFound:
            return ""
        if info.state == "stopped":
            return ""
        known = self._known.get(key)
        if info.state != "running":
            return known.state if known else (yield from self._head(key))
        if known is not None and known.holds((yield calls.get(info.sandbox))):
            return known.state
        kept: wire.Checkpoint = yield calls.checkpoint(key, {"id": id})
        # The time is the server's, of the copy: a time of its own could be that of a use after it.
        self._learn(key, _Known(id, info.sandbox, kept.created_at))
        return id

    def _inherited(self, parent: CheckpointTuple, checkpoint: Checkpoint) -> str:
        """The state of what somebody made of an older checkpoint by hand: nothing ran for it."""
        return self._settles(checkpoint["id"], str(parent.metadata.get(STATE) or ""))

    def _settles(self, id: str, state: str) -> str:
        with self._mu:
            _note(self._settled, id, state)
        return state

    def _learn(self, key: str, known: _Known | None) -> None:
        with self._mu:
            _note(self._known, key, known)

    # What the saver does alone.

    @property
    def config_specs(self) -> list[Any]:
        return self._saver.config_specs

    def list(self, config: RunnableConfig | None, *, filter: dict[str, Any] | None = None, before: RunnableConfig | None = None,
             limit: int | None = None) -> Iterator[CheckpointTuple]:
        return self._saver.list(config, filter=filter, before=before, limit=limit)

    def alist(self, config: RunnableConfig | None, *, filter: dict[str, Any] | None = None, before: RunnableConfig | None = None,
              limit: int | None = None) -> AsyncIterator[CheckpointTuple]:
        return self._saver.alist(config, filter=filter, before=before, limit=limit)

    def put_writes(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = "") -> None:
        self._saver.put_writes(config, writes, task_id, task_path)

    async def aput_writes(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = "") -> None:
        await self._saver.aput_writes(config, writes, task_id, task_path)

    def get_next_version(self, current: Any, channel: None) -> Any:
        return self._saver.get_next_version(current, channel)

    def with_allowlist(self, *args: Any, **kwargs: Any) -> CoveCheckpointer:
        twin = copy.copy(self)
        twin._saver = self._saver.with_allowlist(*args, **kwargs)
        twin.serde = twin._saver.serde
        return twin


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: CoveCheckpointer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._saver, name)(*args, **kwargs)

    method.__name__ = name
    return method


# Of these each version of LangGraph has its own; none of them runs code.
for _name in ("delete_thread", "delete_for_runs", "copy_thread", "prune", "get_delta_channel_history"):
    for _each in (_name, "a" + _name):
        if hasattr(BaseCheckpointSaver, _each):
            setattr(CoveCheckpointer, _each, _passed_on(_each))


def before_use(config: RunnableConfig | None = None) -> None:
    """Say that the code of a node is about to use the thread's session: what is to be kept of it is kept first.

    Does nothing outside of a graph, or in one without a CoveCheckpointer.
    """
    if (found := _base(config)) is not None:
        found[0]._settled_at(*found[1:], gate=True)


async def abefore_use(config: RunnableConfig | None = None) -> None:
    if (found := _base(config)) is not None:
        await found[0]._asettled_at(*found[1:], gate=True)


def _base(config: RunnableConfig | None) -> tuple[CoveCheckpointer, str, str] | None:
    """Who keeps, the session's key, and the checkpoint that the step which runs here began with."""
    try:
        config = config or get_config()
    except RuntimeError:  # outside of a graph
        return None
    saver = config.get("configurable", {}).get(_CHECKPOINTER)
    base = (config.get("configurable", {}).get("checkpoint_map") or {}).get("")
    return (saver, saver._key(config), base) if isinstance(saver, CoveCheckpointer) and base else None


def _nested(config: RunnableConfig) -> bool:
    """Whether it is the checkpoint of a graph inside of another one's node."""
    return bool(config["configurable"].get("checkpoint_ns"))


def _by_hand(config: RunnableConfig, metadata: CheckpointMetadata) -> bool:
    return metadata.get("source") in ("update", "fork") and bool(config["configurable"].get("checkpoint_id"))


def _with(metadata: CheckpointMetadata, state: str) -> CheckpointMetadata:
    return cast(CheckpointMetadata, {**metadata, STATE: state})


def _note(memory: OrderedDict[str, Any], key: str, value: Any) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > _REMEMBERED:
        memory.popitem(last=False)


class SandboxState(TypedDict):
    """For a graph that keeps its sandbox in its state: only the id, so that any process can go on with it."""

    sandbox_id: NotRequired[str]


def attach(state: Mapping[str, Any], cove: Cove | None = None, *, recreate: bool = False, **request: Any) -> Sandbox:
    """The sandbox that a graph's state names, or a new one; return `remember(sandbox)` from the node.

    One that has ended is told (`cove.Gone`) unless recreate says that what was in it may be given up.
    """
    cove = cove or _default.client()
    if id := state.get("sandbox_id"):
        try:
            found = cove.get(id)
            _living(found.info)
            return found
        except (Gone, NotFound):
            if not recreate:
                raise
    return cove.create(**request)


async def aattach(state: Mapping[str, Any], cove: AsyncCove, *, recreate: bool = False, **request: Any) -> AsyncSandbox:
    if id := state.get("sandbox_id"):
        try:
            found = await cove.get(id)
            _living(found.info)
            return found
        except (Gone, NotFound):
            if not recreate:
                raise
    return await cove.create(**request)


def remember(sandbox: Sandbox | AsyncSandbox) -> dict[str, str]:
    """What a node returns so that the state names its sandbox."""
    return {"sandbox_id": sandbox.id}


def _living(info: wire.SandboxInfo) -> None:
    if info.state in ("ended", "stopping"):
        raise Gone(f"sandbox {info.id} of this graph has ended ({info.cause or info.state}): what was in it is gone; "
                   "start another with recreate=True")


__all__ = ["STATE", "CoveCheckpointer", "SandboxState", "abefore_use", "aattach", "attach", "before_use", "remember"]
