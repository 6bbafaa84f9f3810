"""The values of Cove's API: frozen, made from JSON by their field types, fields that a newer server adds left out."""

from __future__ import annotations

import base64
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def _plan(cls: type[Any]) -> tuple[tuple[str, Callable[[Any], Any] | None], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((f.name, _reader(hints[f.name])) for f in dataclasses.fields(cls) if f.init and not f.name.startswith("_"))


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    """What turns JSON into a value of a type; None where JSON is that value."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        kinds = [a for a in args if a is not type(None)]
        return _reader(kinds[0]) if len(kinds) == 1 else None
    if dataclasses.is_dataclass(hint):
        return functools.partial(decode, typing.cast(type, hint))
    if hint is datetime:
        return datetime.fromisoformat
    if hint is bytes:
        return base64.b64decode
    if origin in (list, Sequence):
        return _each(_reader(args[0]))
    if origin in (dict, Mapping):
        return _values(_reader(args[1]))
    return None


def _each(reader: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return reader and (lambda told: [reader(v) for v in told])


def _values(reader: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return reader and (lambda told: {k: reader(v) for k, v in told.items()})


def decode(cls: type[T], value: Mapping[str, Any]) -> T:
    """The value of a dataclass that a JSON object tells."""
    known: dict[str, Any] = {}
    for name, reader in _plan(typing.cast(Any, cls)):
        told = value.get(name)
        if told is not None:
            known[name] = reader(told) if reader else told
    return cls(**known)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a sandbox; zero leaves the template's."""

    cpus: float = 0
    memory_bytes: int = 0
    pids: int = 0
    disk_bytes: int = 0
    open_files: int = 0


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Bounds of one command; zero is none."""

    cpu_seconds: int = 0
    memory_bytes: int = 0
    open_files: int = 0


@dataclass(frozen=True, slots=True)
class Network:
    """What may leave a sandbox: mode internet, none or list."""

    mode: str = ""
    allow: Sequence[str] = ()
    deny: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox as the server knows it, also after its end."""

    id: str
    state: str = ""
    template: str = ""
    image: str = ""
    key: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[Mapping[str, Any]] = ()
    limits: Limits = Limits()
    network: Network = Network()
    storage: str = ""
    forked_from: str = ""
    idle_timeout_seconds: float = 0
    idle_action: str = ""
    auto_resume: bool = False
    created_at: datetime | None = None
    started_at: datetime | None = None
    last_used: datetime | None = None
    paused_at: datetime | None = None
    deadline: datetime | None = None
    ended_at: datetime | None = None
    cause: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class SandboxUsage:
    """What a sandbox uses, by the host's own accounting."""

    cpu_ms: int = 0
    memory_bytes: int = 0
    peak_bytes: int = 0
    pids: int = 0
    disk_bytes: int = 0
    oom_kills: int = 0


@dataclass(frozen=True, slots=True)
class NotCopied:
    """One thing that a copy of a sandbox does not have."""

    kind: str
    what: str


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    """Something a sandbox can start from."""

    name: str
    description: str = ""
    source: str = ""
    digest: str = ""
    built: bool = False
    tenant_owned: bool = False
    user: str = ""
    workdir: str = ""
    python: Mapping[str, Any] | None = None
    limits: Limits = Limits()
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """One displayed value in several MIME types: text as str, binary as base64 text, JSON as itself."""

    data: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    main: bool = False
    id: str = ""
    update: bool = False

    @property
    def text(self) -> str:
        value = self.data.get("text/plain", "")
        return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class CodeError:
    """An exception that the code raised."""

    name: str = ""
    value: str = ""
    traceback: Sequence[str] = ()

    @property
    def text(self) -> str:
        return "\n".join(self.traceback) or f"{self.name}: {self.value}"


@dataclass(frozen=True, slots=True)
class RunUsage:
    """What a run cost."""

    wall_ms: float = 0
    cpu_ms: float = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """The last word of a run. Outcome is ok, error, timeout, interrupted, killed, oom or kernel_died."""

    outcome: str = ""
    exit_code: int = 0
    signal: str = ""
    message: str = ""
    lost: bool = False
    usage: RunUsage = RunUsage()


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a stream could not go on."""

    kind: str = "internal"
    message: str = ""


@dataclass(frozen=True)
class ArtifactDataset:
    """A dataset that a run could see."""

    id: str
    sha256: str = ""


@dataclass(frozen=True)
class ArtifactInfo:
    """A file that was kept, and where it came from. One that could not be kept has no id, and error says why."""

    name: str = ""
    path: str = ""
    mime: str = ""
    size: int = 0
    id: str = ""
    sha256: str = ""
    url: str = ""
    url_expires: datetime | None = None
    created_at: datetime | None = None
    expires_at: datetime | None = None
    session: str = ""
    sandbox: str = ""
    run: str = ""
    cell: int = 0
    tool_call: str = ""
    datasets: Sequence[ArtifactDataset] = ()
    error: str = ""


@dataclass(frozen=True)
class Event:
    """One thing a run tells: started, stdout, stderr, result, error, file, notice, artifact, end."""

    type: str
    time: datetime | None = None
    text: str = ""
    base64: bytes | None = None
    pid: int = 0
    id: str = ""
    count: int = 0
    result: Result | None = None
    error: CodeError | None = None
    file: Mapping[str, Any] | None = None
    message: str = ""
    end: End | None = None
    artifact: ArtifactInfo | None = None
    run: str = ""
    replayed: bool = False
    fault: Fault | None = None

    @property
    def data(self) -> bytes:
        """The output of a stdout or stderr event."""
        return self.base64 if self.base64 is not None else self.text.encode()


@dataclass(frozen=True)
class Output:
    """A whole run, collected."""

    stdout: str = ""
    stderr: str = ""
    stdout_base64: bytes | None = None
    stderr_base64: bytes | None = None
    truncated: bool = False
    results: Sequence[Result] = ()
    error: CodeError | None = None
    notices: Sequence[str] = ()
    count: int = 0
    outcome: str = ""
    exit_code: int = 0
    signal: str = ""
    message: str = ""
    lost: bool = False
    usage: RunUsage = RunUsage()

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def text(self) -> str:
        """The value of the last expression as plain text."""
        return next((r.text for r in self.results if r.main), "")

    @property
    def stdout_bytes(self) -> bytes:
        return self.stdout_base64 if self.stdout_base64 is not None else self.stdout.encode()

    @property
    def stderr_bytes(self) -> bytes:
        return self.stderr_base64 if self.stderr_base64 is not None else self.stderr.encode()


@dataclass(frozen=True)
class SessionOutputInfo(Output):
    """A whole run of a session."""

    run: str = ""
    replayed: bool = False
    artifacts: Sequence[ArtifactInfo] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a sandbox; type is file, dir, symlink or other."""

    name: str
    path: str
    type: str = ""
    size: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    user: str = ""
    group: str = ""
    mod_time: datetime | None = None
    target: str = ""
    xattrs: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_dir(self) -> bool:
        return self.type == "dir"


@dataclass(frozen=True, slots=True)
class SessionDatasets:
    """Where a session's data comes from: access none, local_ro (path of the server's host) or api."""

    access: str = "none"
    path: str = ""


@dataclass(frozen=True, slots=True)
class SessionLoss:
    """How a session's sandbox ended without its owner's wish."""

    sandbox: str = ""
    cause: str = ""
    message: str = ""
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A key pinned to a sandbox. State is running, stopped, lost or reaped."""

    key: str
    id: str = ""
    state: str = ""
    sandbox: str = ""
    generation: int = 0
    lost: SessionLoss | None = None
    template: str = ""
    storage: str = ""
    size_bytes: int = 0
    datasets: SessionDatasets = SessionDatasets()
    metadata: Mapping[str, str] = field(default_factory=dict)
    runs: int = 0
    failed: int = 0
    artifacts: int = 0
    created_at: datetime | None = None
    last_used: datetime | None = None
    stopped_at: datetime | None = None
    idle_timeout_seconds: float = 0
    deadline: datetime | None = None


@dataclass(frozen=True, slots=True)
class SessionVariable:
    """One variable of a kernel: its type, and its text cut after 1000 characters."""

    type: str = ""
    value: str = ""


@dataclass(frozen=True, slots=True)
class SessionState:
    """What the kernel of a session held after its last cell."""

    timestamp: datetime | None = None
    variables: Mapping[str, SessionVariable] = field(default_factory=dict)
    imported_modules: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A session as it was: files and the kernel's memory."""

    id: str
    session: str = ""
    created_at: datetime | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    not_copied: Sequence[NotCopied] = ()


@dataclass(frozen=True, slots=True)
class Dataset:
    """Data staged into a session; status is pending, loaded or failed."""

    id: str
    status: str = ""
    path: str = ""
    size: int = 0
    sha256: str = ""
    updated_at: datetime | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """A signed link: it needs no key, and ends."""

    url: str
    expires_at: datetime | None = None


@dataclass(frozen=True)
class Lineage:
    """Which cell made a file, and from what."""

    artifact: ArtifactInfo = ArtifactInfo()
    code: str = ""
    outcome: str = ""
    started_at: datetime | None = None
    same: Sequence[ArtifactInfo] = ()
    same_truncated: bool = False


@dataclass(frozen=True, slots=True)
class SnippetResult:
    """How a snippet ended: exit_code is -1 when the time was over, and minus the signal's number when a signal ended it."""

    exit_code: int = 0
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    truncated: bool = False
    signal: str = ""
    oom: bool = False
    message: str = ""
    sandbox: str = ""
    usage: RunUsage = RunUsage()


def plain(value: Any) -> Any:
    """A request's value as JSON: dataclasses as objects without what is empty, the rest as it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {k: plain(v) for k, v in fields.items() if v not in (None, "", 0, (), [], {}) or v is False}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [plain(v) for v in value]
    return value


def body(**fields: Any) -> dict[str, Any]:
    """A request without the fields that were left out."""
    return {k: plain(v) for k, v in fields.items() if v is not None}


# What one stream of a run holds at most when its events are collected here.
MAX_COLLECTED = 64 << 20


class Collector:
    """Gathers the events of a run in bounded memory."""

    def __init__(self) -> None:
        self._streams: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._sizes = {"stdout": 0, "stderr": 0}
        self._more: dict[str, Any] = {"results": [], "notices": [], "artifacts": []}

    def add(self, event: Event) -> None:
        if event.type in self._streams:
            self._keep(event.type, event.data)
        elif event.type == "result" and event.result:
            self._more["results"].append(event.result)
        elif event.type == "error":
            self._more["error"] = event.error
        elif event.type == "notice":
            self._more["notices"].append(event.message)
        elif event.type == "artifact" and event.artifact:
            self._more["artifacts"].append(event.artifact)
        elif event.type == "started":
            self._more |= {"count": event.count, "run": event.run, "replayed": event.replayed}
        elif event.type == "end" and event.end:
            self._more |= {f.name: getattr(event.end, f.name) for f in dataclasses.fields(End)}

    def _keep(self, stream: str, data: bytes) -> None:
        room = MAX_COLLECTED - self._sizes[stream]
        if len(data) > room:
            self._more["truncated"] = True
            data = data[:room]
        self._streams[stream].append(data)
        self._sizes[stream] += len(data)

    def output(self, cls: type[T]) -> T:
        """The run as an Output or a SessionOutputInfo."""
        for stream, parts in self._streams.items():
            raw = b"".join(parts)
            text = raw.decode("utf-8", "replace")
            self._more[stream] = text
            if "\ufffd" in text and text.encode() != raw:
                self._more[stream + "_base64"] = raw
        names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{k: v for k, v in self._more.items() if k in names})
