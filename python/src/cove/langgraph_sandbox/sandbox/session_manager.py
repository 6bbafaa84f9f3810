"""SessionManager starts, uses and stops the sandboxes of conversations; the server keeps them, so any process can go on with one."""

from __future__ import annotations

import logging
import os
import posixpath
import re
import sqlite3
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ... import _calls as calls
from ... import _wire as wire
from ..._threads import check_key, session_key
from ...aio import AsyncCove
from ...client import Cove, Landing, Sandbox
from ...errors import Conflict, CoveError, Exhausted, Gone, Invalid, NotFound
from .._steps import Ask, Do, Run, Save, Send, Work, adrive, drive
from ..artifacts.store import ArtifactStore, descriptor
from ..config import DEFAULT_IMAGE, LOCAL_DIR, SESSION_DIR, STAGED_DIR, Config, DatasetAccess, SessionStorage, parse_access, parse_storage
from ..datasets import cache
from . import mirror

T = TypeVar("T")
log = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 45 * 60
DEFAULT_TIMEOUT_S = 30

EXPORTS = Path("exports") / "modified_datasets"


def key_for_thread(thread_id: object) -> str:
    """The session key of a thread: its id, or a digest of an id that cannot be a key."""
    return session_key(thread_id)


class NotStarted(RuntimeError):
    """There is no session of that key, or it was stopped."""


class SessionManager:
    """The sandboxes of conversations on a Cove server: start, exec, stop, and the same with an a in front, awaited.

    The server knows the sessions, not this object: a new process goes on with a living one. Safe for concurrent use.
    """

    def __init__(self, image: str = DEFAULT_IMAGE, session_storage: SessionStorage | str = SessionStorage.TMPFS,
                 dataset_access: DatasetAccess | str = DatasetAccess.API, datasets_path: str | os.PathLike[str] | None = None,
                 session_root: str | os.PathLike[str] = "./sessions", tmpfs_size: int | str = 1024, *,
                 idle_timeout_s: float = IDLE_TIMEOUT_S, max_export_bytes: int = 1 << 30, limits: Mapping[str, Any] | None = None, network: Mapping[str, Any] | None = None,
                 env: Mapping[str, str] | None = None, metadata: Mapping[str, str] | None = None, cache_filename: str = "cache_datasets.json",
                 blobstore_dir: str | os.PathLike[str] | None = None, artifacts_db: str | os.PathLike[str] | None = None,
                 url: str | None = None, api_key: str | None = None) -> None:
        self.image = image
        self.session_storage, self.dataset_access = parse_storage(session_storage), parse_access(dataset_access)
        self.datasets_path = Path(datasets_path).resolve() if datasets_path else None
        if self.dataset_access is DatasetAccess.LOCAL_RO and self.datasets_path is None:
            raise ValueError("LOCAL_RO needs datasets_path: the directory with the datasets (DATASETS_HOST_RO), on the server's host")
        self.session_root = Path(session_root).resolve()
        self.size_bytes = parse_size(tmpfs_size)
        self.cache_filename, self.max_export_bytes = cache_filename, max_export_bytes
        self.store = ArtifactStore.of(blobstore_dir, artifacts_db)
        self.cove, self.async_cove = Cove(url, api_key), AsyncCove(url, api_key)
        self.session_key_fn: Callable[..., Any] | None = None
        self._request = wire.body(
            storage=self.session_storage.value.lower(), size_bytes=self.size_bytes, idle_timeout_seconds=idle_timeout_s or -1, limits=limits,
            network=network, env=env, metadata=metadata,
            datasets=wire.body(access=self.dataset_access.value.lower(), path=str(self.datasets_path) if self._local else None))
        self._lock = threading.Lock()
        self._started: set[str] = set()
        self._told: set[str] = set()  # keys whose loss somebody has been told

    @classmethod
    def from_config(cls, config: Config, **more: Any) -> SessionManager:
        """A manager by a Config, which also keeps a copy of each artifact in its blobstore_dir and artifacts_db."""
        settings: dict[str, Any] = {
            "image": config.sandbox_image, "session_storage": config.session_storage, "dataset_access": config.dataset_access,
            "datasets_path": config.datasets_host_ro, "session_root": config.sessions_root, "tmpfs_size": config.tmpfs_size_mb,
            "cache_filename": config.cache_filename, "blobstore_dir": config.blobstore_dir, "artifacts_db": config.artifacts_db,
            "url": config.cove_url or None, "api_key": config.cove_api_key or None}
        return cls(**settings | more)

    # --- what users call

    def start(self, key: str | None = None) -> str:
        """Start the session of a key, or go on with it. A sandbox that was lost is replaced, and the log says so."""
        return drive(self.cove, self.starting(key))

    async def astart(self, key: str | None = None) -> str:
        return await adrive(self.async_cove, self.starting(key))

    def exec(self, key: str, code: str, timeout: float | None = DEFAULT_TIMEOUT_S, **more: Any) -> dict[str, Any]:
        """Run code in a started session: ok, stdout, stderr, error (the traceback), result, artifacts and session_dir."""
        return drive(self.cove, self.executing(key, code, timeout, **more))

    async def aexec(self, key: str, code: str, timeout: float | None = DEFAULT_TIMEOUT_S, **more: Any) -> dict[str, Any]:
        return await adrive(self.async_cove, self.executing(key, code, timeout, **more))

    def stop(self, key: str) -> None:
        """End the session's sandbox. One that is stopped or unknown is no error."""
        drive(self.cove, self.stopping(key))

    async def astop(self, key: str) -> None:
        await adrive(self.async_cove, self.stopping(key))

    def container_for(self, key: str) -> Sandbox:
        """The session's sandbox."""
        info = drive(self.cove, self._known(key))
        return Sandbox(self.cove, wire.SandboxInfo(id=info.sandbox))

    def get_session_dir(self, key: str) -> Path:
        """Where the session's log, metadata and state are on this host; only with BIND storage."""
        if self.session_storage is not SessionStorage.BIND:
            raise RuntimeError("TMPFS sessions have no directory on the host: use SESSION_STORAGE=BIND, or `cove session export`")
        return self.session_root / check_key(key)

    def export_file(self, key: str, container_path: str) -> dict[str, Any]:
        """Copy a file below /session or /data to exports/modified_datasets and keep it as an artifact."""
        return drive(self.cove, self.exporting(key, container_path))

    async def aexport_file(self, key: str, container_path: str) -> dict[str, Any]:
        return await adrive(self.async_cove, self.exporting(key, container_path))

    def list_datasets(self, key: str) -> list[dict[str, Any]]:
        """The files of the directory where this mode has its datasets."""
        return drive(self.cove, self.listing(key))

    def cleanup_all_containers(self) -> None:
        """Stop every session that this manager started; those of other processes go on."""
        for key in sorted(self._started):
            self.stop(key)

    def close(self) -> None:
        """Let go of the connections; sessions go on."""
        self.cove.close()

    async def aclose(self) -> None:
        """Let go of the connections, those of this event loop included."""
        await self.async_cove.close()
        self.close()

    # --- the work itself: generators, which drive and adrive do

    def starting(self, key: str | None) -> Work[str]:
        key = check_key(f"anon-{uuid.uuid4().hex[:8]}" if key is None else key)
        request = yield from self._opening()
        try:
            info = yield calls.open_session(key, request)
        except Gone as err:
            log.warning("session %s: %s. A new sandbox is started.", key, err)
            info = yield calls.open_session(key, request | {"recreate": True})
        with self._lock:
            self._started.add(key)
            self._told.discard(key)
        yield from self._mirroring(key, info)
        return key

    def _opening(self) -> Work[dict[str, Any]]:
        """What a session is made with. The image that nobody has built is the server's own default."""
        if self.image != DEFAULT_IMAGE:
            return self._request | {"image": self.image}
        try:
            images = yield calls.images()
        except CoveError:
            images = []
        there = any(str(i.get("reference", "")).removeprefix("docker.io/library/") == self.image for i in images)
        return self._request | ({"image": self.image} if there else {})

    def executing(self, key: str, code: str, timeout: float | None, *, tool_call: str | None = None, idempotency_key: str | None = None,
                  on_event: Callable[[wire.Event], object] | None = None) -> Work[dict[str, Any]]:
        """Run code; an unknown or stopped session is a RuntimeError, a lost one is told as a result."""
        call = calls.run_session(check_key(key), code, timeout, idempotency_key, tool_call=tool_call)
        try:
            out: wire.SessionOutputInfo = yield Run(call, on_event)
        except NotFound as err:
            raise NotStarted(f"session {key!r} is not there: call start({key!r}) first") from err
        except Conflict as err:
            info = yield from self._known(key)
            if info.state == "stopped":
                raise NotStarted(f"session {key!r} is stopped: call start({key!r}) to go on") from err
            return self._no_result(key, f"{err}. Nothing was run.", "conflict")
        except Gone as err:
            with self._lock:
                self._told.add(key)
            return self._no_result(key, f"The sandbox of this session was lost: {err}. The next start makes a new one.", "lost")
        result = self._result(key, out)
        yield from self._copying(key, out)
        yield from self._mirroring(key, None)
        return result

    def running(self, key: str, code: str, timeout: float | None, **more: Any) -> Work[dict[str, Any]]:
        """Run code for a tool: a session that was never started or was stopped is started, and a loss is told once before
        anything replaces what was lost."""
        with self._lock:
            told = key in self._told
        if told:
            yield from self.starting(key)
        try:
            result = yield from self.executing(key, code, timeout, **more)
        except NotStarted:
            yield from self.starting(key)
            result = yield from self.executing(key, code, timeout, **more)
        return result | ({"note": "A new sandbox was started: variables of earlier calls are gone."} if told else {})

    def _no_result(self, key: str, error: str, outcome: str) -> dict[str, Any]:
        return {"ok": False, "stdout": "", "stderr": "", "error": error, "result": "", "results": [], "artifacts": [],
                "lost": outcome == "lost", "outcome": outcome, "session_dir": self._session_dir(key)}

    def _result(self, key: str, out: wire.SessionOutputInfo) -> dict[str, Any]:
        result: dict[str, Any] = {
            "ok": out.ok, "stdout": out.stdout, "stderr": out.stderr, "result": out.text, "results": list(out.results),
            "artifacts": [descriptor(a) for a in out.artifacts], "session_dir": self._session_dir(key), "outcome": out.outcome, "lost": out.lost,
            "run": out.run, "replayed": out.replayed, "duration_ms": out.usage.wall_ms, "cpu_ms": out.usage.cpu_ms, "peak_bytes": out.usage.peak_bytes}
        if not out.ok:
            result["error"] = "\n".join(filter(None, [out.error.text if out.error else "", out.message])) or out.outcome
        return result

    def _session_dir(self, key: str) -> str:
        return str(self.session_root / key) if self.session_storage is SessionStorage.BIND else ""

    def stopping(self, key: str) -> Work[None]:
        check_key(key)
        with self._lock:
            self._started.discard(key)
            self._told.discard(key)
        try:
            info = yield calls.stop_session(key)
        except (NotFound, Gone):
            return
        yield from self._mirroring(key, info)

    def _known(self, key: str) -> Work[wire.SessionInfo]:
        try:
            info: wire.SessionInfo = yield calls.get_session(check_key(key))
        except NotFound as err:
            raise NotStarted(f"session {key!r} is not there: call start({key!r}) first") from err
        return info

    def _copying(self, key: str, out: wire.SessionOutputInfo) -> Work[None]:
        """Copies of the artifacts in the blobstore of the Config, bytes first. The server has the originals: failing to copy fails no run."""
        if self.store is None:
            return
        try:
            for artifact in out.artifacts:
                if artifact.id and (yield Do(self.store.lacks, (artifact.sha256,))):
                    yield Save(calls.content(artifact.id), Landing(self.store.blob(artifact.sha256), artifact.size))
                if artifact.id:
                    yield Do(self.store.add, (artifact, key))
        except (CoveError, OSError, sqlite3.Error) as err:
            log.warning("session %s: its artifacts were not copied to %s: %s", key, self.store.directory, err)

    def _mirroring(self, key: str, info: wire.SessionInfo | None) -> Work[None]:
        """The files of a BIND session's directory. They tell what the server knows: failing to write them fails no run."""
        if self.session_storage is not SessionStorage.BIND:
            return
        directory = self.session_root / key
        try:
            info = info or (yield calls.get_session(key))
            seen = yield Do(mirror.prepare, (directory, info.id))
            lines = yield calls.log(key, seen, None, False)
            state = None
            if info.runs:
                state = yield calls.state(key)
            yield Do(mirror.write, (directory, info, lines, state, self.image))
        except (CoveError, OSError) as err:
            log.warning("session %s: its directory %s was not updated: %s", key, directory, err)

    # --- datasets

    @property
    def _local(self) -> bool:
        return self.dataset_access is DatasetAccess.LOCAL_RO

    @property
    def datasets_dir(self) -> str:
        """Where code finds datasets; empty when there are none."""
        return {DatasetAccess.API: STAGED_DIR, DatasetAccess.LOCAL_RO: LOCAL_DIR, DatasetAccess.NONE: ""}[self.dataset_access]

    def opened(self, key: str) -> Work[wire.SessionInfo]:
        """The session with a living sandbox: one that was never started or was stopped is started, a loss is told."""
        try:
            info = yield from self._known(key)
        except NotStarted:
            info = None
        with self._lock:
            told = key in self._told
        if info is None or info.state == "stopped" or told:
            yield from self.starting(key)
            info = yield from self._known(key)
        elif info.state != "running":
            with self._lock:
                self._told.add(key)
            why = info.lost.message or info.lost.cause if info.lost else info.state
            raise Gone(f"the sandbox of this session was lost: {why}. The next call starts a new one.")
        return info

    def staging(self, key: str, dataset_id: str, fetch: Callable[..., Any], *args: Any) -> Work[wire.Dataset]:
        """Fetch a dataset and stage it, unless the session has it."""
        if self.dataset_access is not DatasetAccess.API:
            raise Invalid(f"datasets are fetched only with DATASET_ACCESS=API, and this is {self.dataset_access.value}" +
                          (f": they are in {LOCAL_DIR} already" if self._local else ""))
        yield from self.opened(key)
        there: list[wire.Dataset] = yield calls.datasets(key)
        for known in there:
            if known.id == dataset_id and known.status == "loaded":
                yield from self._caching(key)
                return known
        yield from self._marking(key, dataset_id, "pending")
        try:
            content = yield Ask(fetch, args)
            if content is None or isinstance(content, int | dict):
                raise TypeError(f"fetch_fn returned {type(content).__name__}: want bytes, a file, or pieces of bytes")
            staged: wire.Dataset = yield Send(lambda body: calls.stage(key, dataset_id, body, None), content)
        except Exception as err:
            yield from self._marking(key, dataset_id, "failed", str(err) or type(err).__name__)
            raise
        yield from self._caching(key)
        return staged

    def _marking(self, key: str, dataset_id: str, status: str, error: str | None = None) -> Work[None]:
        yield calls.mark(key, dataset_id, wire.body(status=status, error=error))
        yield from self._caching(key)

    def _caching(self, key: str) -> Work[None]:
        """The file that tells a BIND session's datasets."""
        if self.session_storage is SessionStorage.BIND:
            known = yield calls.datasets(key)
            yield Do(cache.write_entries, (self.session_root / key / self.cache_filename, known))

    def listing(self, key: str) -> Work[list[dict[str, Any]]]:
        if not self.datasets_dir:
            return []
        info = yield from self.opened(key)
        found = []
        for entry in (yield calls.ls(info.sandbox, self.datasets_dir, 1, None)):
            if entry.type == "symlink":  # a staged dataset: what matters is the file itself
                try:
                    real = yield calls.stat(info.sandbox, posixpath.join(self.datasets_dir, entry.target), None)
                except NotFound:
                    continue
                entry = wire.Entry(entry.name, entry.path, real.type, real.size, mod_time=real.mod_time)
            found.append(_listed(entry))
        return found

    def exporting(self, key: str, path: str) -> Work[dict[str, Any]]:
        clean = posixpath.normpath(posixpath.join(STAGED_DIR, path))
        if not clean.startswith((SESSION_DIR + "/", LOCAL_DIR + "/")) or "\0" in clean:
            raise Invalid(f"{path!r} cannot be exported: only files below {SESSION_DIR} and {LOCAL_DIR} can")
        info = yield from self._known(key)
        entry = yield calls.stat(info.sandbox, clean, None)
        if entry.type == "dir":
            raise Invalid(f"{clean} is a directory: export its files one by one")
        if entry.size > self.max_export_bytes:
            raise Exhausted(f"{clean} has {entry.size} bytes, and at most {self.max_export_bytes} are exported (max_export_bytes)")
        artifact = yield from self._keeping(key, clean, entry.size)
        target = yield Do(mirror.reserve, (Path.cwd() / EXPORTS, posixpath.basename(clean)))
        source = calls.content(artifact.id) if artifact.id else calls.read(info.sandbox, clean, 0, None, None)
        exported = False
        try:
            yield Save(source, Landing(target, self.max_export_bytes))
            exported = True
        finally:
            if not exported:
                target.unlink(missing_ok=True)
        return {"container_path": clean, "host_path": str(target), "artifact": descriptor(artifact)}

    def _keeping(self, key: str, path: str, size: int) -> Work[wire.ArtifactInfo]:
        """The file as an artifact; one that is too large to be kept is exported nevertheless."""
        try:
            artifact: wire.ArtifactInfo = yield calls.keep(key, {"path": path})
        except Exhausted as err:
            return wire.ArtifactInfo(name=posixpath.basename(path), path=path, mime="application/octet-stream", size=size, error=str(err))
        return artifact


def _listed(entry: wire.Entry) -> dict[str, Any]:
    if entry.is_dir:
        return {"name": entry.name + "/", "path": entry.path, "type": "directory"}
    return {"name": entry.name, "path": entry.path, "size": entry.size, "modified": entry.mod_time.timestamp() if entry.mod_time else 0.0}


def parse_size(size: int | str) -> int:
    """Bytes of a size: a number of MB, or text such as 512m or 2g."""
    found = re.fullmatch(r"(\d+)\s*([kmg]?)b?", str(size).strip().lower())
    if not found or int(found[1]) <= 0:
        raise ValueError(f"tmpfs_size={size!r}: want MB as a number, or text such as 512m or 2g")
    return int(found[1]) << {"k": 10, "m": 20, "": 20, "g": 30}[found[2]]
