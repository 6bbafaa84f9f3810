"""The client for threads: Cove makes sandboxes and sessions, whose methods wait for the server."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from . import _calls as calls
from . import _wire as wire
from ._transport import CHUNK, Transport
from .errors import Exhausted, Gone

T = TypeVar("T")
OnEvent = Callable[[wire.Event], object]
Content = bytes | str | BinaryIO | Iterable[bytes]


class Cove:
    """A server, asked with one key: arguments, or COVE_URL and COVE_API_KEY. Safe for concurrent use."""

    def __init__(self, url: str | None = None, api_key: str | None = None, *, timeout: float | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        self._t = Transport(url, api_key, timeout, headers)

    @property
    def url(self) -> str:
        return self._t.settings.url

    def close(self) -> None:
        """Let go of the connections."""
        self._t.close()

    def __enter__(self) -> Cove:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def create(self, template: str | None = None, *, image: str | None = None, key: str | None = None, timeout: float | None = None,
               idle_timeout: float | None = None, idle_action: str | None = None, env: Mapping[str, str] | None = None,
               metadata: Mapping[str, str] | None = None, limits: wire.Limits | Mapping[str, Any] | None = None,
               network: wire.Network | Mapping[str, Any] | None = None, storage: str | None = None,
               mounts: Sequence[Mapping[str, Any]] | None = None, auto_resume: bool = False) -> Sandbox:
        """A sandbox that takes code; with a key the living one that has it."""
        request = wire.body(template=template, image=image, key=key, timeout_seconds=timeout, idle_timeout_seconds=idle_timeout,
                            idle_action=idle_action, env=env, metadata=metadata, limits=limits, network=network, storage=storage,
                            mounts=mounts, auto_resume=auto_resume or None)
        return Sandbox(self, self._t.send(calls.create(request)))

    def get(self, id: str) -> Sandbox:
        """A sandbox by its id, living or ended."""
        return Sandbox(self, self._t.send(calls.get(id)))

    def sandboxes(self, *, state: str | Sequence[str] | None = None, metadata: Mapping[str, str] | None = None,
                  template: str | None = None, key: str | None = None) -> Iterator[wire.SandboxInfo]:
        """Your sandboxes, newest first."""
        return self._pages(calls.sandboxes, calls.listing(state, metadata, template, key))

    def templates(self) -> list[wire.TemplateInfo]:
        """What a sandbox can start from."""
        return self._t.send(calls.templates())

    def images(self) -> list[Mapping[str, Any]]:
        """The container images of yours that are on the server."""
        return self._t.send(calls.images())

    def session(self, key: str, **request: Any) -> Session:
        """The session of a key, with a living sandbox: the fields of the API's session request are keyword arguments."""
        return Session(self, self._t.send(calls.open_session(key, wire.body(**request))))

    def get_session(self, key: str) -> Session:
        """A session as it is; nothing is started."""
        return Session(self, self._t.send(calls.get_session(key)))

    def sessions(self, *, state: str | Sequence[str] | None = None) -> Iterator[wire.SessionInfo]:
        """Your sessions, those used last first."""
        return self._pages(calls.sessions, calls.query(state=[state] if isinstance(state, str) else list(state or ())))

    def artifacts(self, *, session: str | None = None, run: str | None = None, sha256: str | None = None) -> Iterator[Artifact]:
        """Your artifacts, newest first."""
        return (Artifact.of(self, info) for info in self._pages(calls.artifacts, calls.query(session=session, run=run, sha256=sha256)))

    def artifact(self, id: str) -> Artifact:
        return Artifact.of(self, self._t.send(calls.artifact(id)))

    def snippet(self, code: str, *, timeout: float = 10, cpu_seconds: int = 8, memory_mb: int = 128, open_files: int = 32,
                env: Mapping[str, str] | None = None, network: bool = False, template: str | None = None,
                sandbox: str | None = None) -> wire.SnippetResult:
        """Run Python code in a fresh process of a fresh sandbox, with limits of its own."""
        return self._t.send(calls.snippet(code, timeout, cpu_seconds=cpu_seconds, memory_mb=memory_mb, open_files=open_files, env=env,
                                          network=network or None, template=template, sandbox=sandbox))

    def _pages(self, ask: Callable[[list[tuple[str, str]]], calls.Call[tuple[list[T], str]]], params: list[tuple[str, str]]) -> Iterator[T]:
        cursor = ""
        while True:
            found, cursor = self._t.send(ask(params + calls.query(cursor=cursor)))
            yield from found
            if not cursor:
                return

    def _run(self, call: calls.Call[T], on_event: OnEvent | None, cls: type[T]) -> T:
        """A run collected by the server, or here while its events are told."""
        if on_event is None:
            return self._t.send(call)
        collected = wire.Collector()
        for e in self._t.events(call):
            collected.add(e)
            on_event(e)
        return collected.output(cls)


class Sandbox:
    """One sandbox; info is what the server said last."""

    def __init__(self, cove: Cove, info: wire.SandboxInfo) -> None:
        self._cove, self._t = cove, cove._t
        self.info = info

    @property
    def id(self) -> str:
        return self.info.id

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.info.state}>"

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def run(self, code: str, *, timeout: float | None = None, env: Mapping[str, str] | None = None, cwd: str | None = None,
            kernel: str | None = None, silent: bool = False, on_event: OnEvent | None = None) -> wire.Output:
        """Run a cell in a kernel. An exception of the code is in the output and not raised."""
        call = calls.run(self.id, code, timeout, env=env, cwd=cwd, kernel=kernel, silent=silent or None)
        return self._cove._run(call, on_event, wire.Output)

    def exec(self, command: str | Sequence[str], *, timeout: float | None = None, env: Mapping[str, str] | None = None,
             cwd: str | None = None, user: str | None = None, stdin: str | None = None, clean_env: bool = False,
             limits: wire.RunLimits | Mapping[str, Any] | None = None, on_event: OnEvent | None = None) -> wire.Output:
        """Run a command: a line for /bin/sh, or a list of arguments. A non-zero exit is in the output and not raised."""
        call = calls.exec(self.id, command, timeout, env=env, cwd=cwd, user=user, stdin=stdin, clean_env=clean_env or None, limits=limits)
        return self._cove._run(call, on_event, wire.Output)

    def start_kernel(self, language: str = "python", *, name: str | None = None, cwd: str | None = None) -> str:
        """Start another interpreter with variables of its own and tell its name, for run(kernel=…)."""
        return self._t.send(calls.start_kernel(self.id, wire.body(language=language, name=name, cwd=cwd)))

    def read(self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None) -> bytes:
        """A file's bytes; read_stream is for large ones."""
        return self._t.send(calls.read(self.id, path, offset, length, user))

    def read_stream(self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None) -> Iterator[bytes]:
        """A file in pieces, as they come."""
        return self._t.chunks(calls.read(self.id, path, offset, length, user))

    def write(self, path: str, data: Content, *, mode: int | None = None, append: bool = False, user: str | None = None) -> wire.Entry:
        """Write a file of any size: parents are made, and the content appears at once or not at all."""
        return self._t.send(calls.write(self.id, path, _content(data), mode, append, user))

    def stat(self, path: str, *, user: str | None = None) -> wire.Entry:
        return self._t.send(calls.stat(self.id, path, user))

    def ls(self, path: str, depth: int = 1, *, user: str | None = None) -> list[wire.Entry]:
        """The entries of a directory, and of those below it down to depth."""
        return self._t.send(calls.ls(self.id, path, depth, user))

    def mkdir(self, path: str, *, parents: bool = True, mode: int | None = None, user: str | None = None) -> wire.Entry:
        return self._t.send(calls.change(self.id, "mkdir", wire.body(path=path, parents=parents, mode=mode, user=user)))

    def move(self, source: str, target: str, *, user: str | None = None) -> wire.Entry:
        return self._t.send(calls.change(self.id, "move", {"from": source, "to": target, **wire.body(user=user)}))

    def chmod(self, path: str, mode: int | None = None, *, owner: str | None = None, group: str | None = None,
              user: str | None = None) -> wire.Entry:
        return self._t.send(calls.change(self.id, "chmod", wire.body(path=path, mode=mode, owner=owner, group=group, user=user)))

    def remove(self, path: str, recursive: bool = False, *, user: str | None = None) -> None:
        self._t.send(calls.remove(self.id, path, recursive, user))

    def fork(self, n: int = 1, **request: Any) -> Forks:
        """Copies of the sandbox, files and memory; all of them are made, or none."""
        told = self._t.send(calls.fork(self.id, wire.body(count=n, **request)))
        made = [Sandbox(self._cove, wire.decode(wire.SandboxInfo, each)) for each in told["sandboxes"]]
        return Forks(made, [wire.decode(wire.NotCopied, each) for each in told.get("not_copied") or []])

    def pause(self, **request: Any) -> None:
        """Stop the sandbox with its memory until it is resumed."""
        self.info = self._t.send(calls.post(self.id, "pause", wire.body(**request)))

    def resume(self, **request: Any) -> None:
        self.info = self._t.send(calls.post(self.id, "resume", wire.body(**request)))

    def set_timeout(self, seconds: float) -> None:
        """Give the sandbox a new lifetime, from now."""
        self.info = self._t.send(calls.post(self.id, "timeout", {"timeout_seconds": seconds}))

    def snapshot(self, name: str, **request: Any) -> wire.TemplateInfo:
        """Make a template of the sandbox's files."""
        return self._t.send(calls.snapshot(self.id, wire.body(name=name, **request)))

    def kill(self) -> None:
        """End the sandbox. One that has ended already is no error."""
        try:
            self.info = self._t.send(calls.kill(self.id))
        except Gone:
            pass

    def refresh(self) -> wire.SandboxInfo:
        """Ask the server again."""
        self.info = self._t.send(calls.get(self.id))
        return self.info

    def usage(self) -> wire.SandboxUsage:
        return self._t.send(calls.usage(self.id))


class Forks(list[Sandbox]):
    """The copies of a sandbox, and what they do not have of it."""

    def __init__(self, sandboxes: Iterable[Sandbox], not_copied: Sequence[wire.NotCopied]) -> None:
        super().__init__(sandboxes)
        self.not_copied = not_copied


@dataclass(frozen=True)
class Artifact(wire.ArtifactInfo):
    """A kept file that can be fetched."""

    _cove: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, cove: Cove, info: wire.ArtifactInfo) -> Artifact:
        return cls(**{f.name: getattr(info, f.name) for f in fields(wire.ArtifactInfo)}, _cove=cove)

    def content(self) -> bytes:
        """Its bytes, which the server has verified; download is for large ones."""
        content: bytes = self._cove._t.send(calls.content(self.id))
        return content

    def stream(self) -> Iterator[bytes]:
        chunks: Iterator[bytes] = self._cove._t.chunks(calls.content(self.id))
        return chunks

    def download(self, path: str | os.PathLike[str]) -> Path:
        """Write it to a file of yours, whole or not at all; a directory gets it by its name, unless something there has that name."""
        landing = Landing.at(path, self.name, self.size)
        landing.save(self.stream())
        return landing.target

    def link(self, ttl: float | None = None) -> wire.Link:
        """A signed link that needs no key."""
        link: wire.Link = self._cove._t.send(calls.link(self.id, ttl))
        return link

    def lineage(self) -> wire.Lineage:
        """Which cell made it, and from what."""
        lineage: wire.Lineage = self._cove._t.send(calls.lineage(self.id))
        return lineage

    def remove(self) -> None:
        self._cove._t.send(calls.remove_artifact(self.id))


@dataclass(frozen=True)
class SessionOutput(wire.SessionOutputInfo):
    """A whole run of a session, with the files it left."""

    artifacts: Sequence[Artifact] = ()

    @classmethod
    def of(cls, cove: Cove, info: wire.SessionOutputInfo) -> SessionOutput:
        told = {f.name: getattr(info, f.name) for f in fields(info)}
        return cls(**told | {"artifacts": [Artifact.of(cove, a) for a in info.artifacts]})


class Session:
    """A key pinned to a sandbox, with its log, its datasets and its artifacts."""

    def __init__(self, cove: Cove, info: wire.SessionInfo) -> None:
        self._cove, self._t = cove, cove._t
        self.info = info

    @property
    def key(self) -> str:
        return self.info.key

    def __repr__(self) -> str:
        return f"<Session {self.key} {self.info.state}>"

    @property
    def sandbox(self) -> Sandbox:
        """Its present sandbox."""
        return Sandbox(self._cove, wire.SandboxInfo(id=self.info.sandbox))

    def run(self, code: str, *, timeout: float | None = None, env: Mapping[str, str] | None = None, cwd: str | None = None,
            tool_call: str | None = None, idempotency_key: str | None = None, on_disconnect: str | None = None,
            on_event: OnEvent | None = None) -> SessionOutput:
        """Run a cell and keep what it leaves in /session/artifacts. The same idempotency key with the same code runs once."""
        call = calls.run_session(self.key, code, timeout, idempotency_key, env=env, cwd=cwd, tool_call=tool_call, on_disconnect=on_disconnect)
        return SessionOutput.of(self._cove, self._cove._run(call, on_event, wire.SessionOutputInfo))

    def stop(self) -> wire.SessionInfo:
        """End its sandbox; the session stays, with its log."""
        self.info = self._t.send(calls.stop_session(self.key))
        return self.info

    def remove(self) -> None:
        """End it and remove its log and its files; artifacts stay."""
        self._t.send(calls.remove_session(self.key))

    def refresh(self) -> wire.SessionInfo:
        self.info = self._t.send(calls.get_session(self.key))
        return self.info

    def log(self, *, after: int | None = None, last: int | None = None) -> list[dict[str, Any]]:
        """What happened, oldest first."""
        return self._t.send(calls.log(self.key, after, last, False))

    def follow(self, *, after: int | None = None) -> Iterator[dict[str, Any]]:
        """What happened and what happens next, until the loop is left."""
        return (calls.log_line(line) for line in self._t.lines(calls.log(self.key, after, None, True)))

    def state(self) -> wire.SessionState:
        """The kernel's variables and modules after the last cell."""
        return self._t.send(calls.state(self.key))

    def keep(self, path: str, *, tool_call: str | None = None) -> Artifact:
        """Keep one file of its sandbox as an artifact."""
        return Artifact.of(self._cove, self._t.send(calls.keep(self.key, wire.body(path=path, tool_call=tool_call))))

    def artifacts(self) -> Iterator[Artifact]:
        return self._cove.artifacts(session=self.key)

    def datasets(self) -> list[wire.Dataset]:
        return self._t.send(calls.datasets(self.key))

    def stage(self, id: str, data: Content, *, file: str | None = None) -> wire.Dataset:
        """Send a dataset of any size; it appears in /session/data when all of it has arrived."""
        return self._t.send(calls.stage(self.key, id, _content(data), file))

    def mark(self, id: str, status: str, *, sha256: str | None = None, file: str | None = None, error: str | None = None) -> wire.Dataset:
        """Say that a dataset is pending or failed, or stage content that the server has already."""
        return self._t.send(calls.mark(self.key, id, wire.body(status=status, sha256=sha256, file=file, error=error)))

    def remove_dataset(self, id: str) -> None:
        self._t.send(calls.remove_dataset(self.key, id))

    def checkpoint(self, id: str | None = None, *, metadata: Mapping[str, str] | None = None) -> wire.Checkpoint:
        """Keep the session as it is, files and memory."""
        return self._t.send(calls.checkpoint(self.key, wire.body(id=id, metadata=metadata)))

    def checkpoints(self) -> list[wire.Checkpoint]:
        return self._t.send(calls.checkpoints(self.key))

    def remove_checkpoint(self, id: str) -> None:
        self._t.send(calls.remove_checkpoint(self.key, id))

    def restore(self, checkpoint: str | wire.Checkpoint, *, session: str | None = None) -> wire.SessionInfo:
        """Put the session, or another one, back to a checkpoint."""
        id = checkpoint if isinstance(checkpoint, str) else checkpoint.id
        info = self._t.send(calls.restore(self.key, wire.body(checkpoint=id, session=session)))
        if info.key == self.key:
            self.info = info
        return info


def _content(data: Content) -> bytes | Iterable[bytes]:
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    if hasattr(data, "read"):
        return iter(lambda: data.read(CHUNK), b"")
    return data


@dataclass(frozen=True)
class Landing:
    """Where bytes of somebody else's become a file here: whole or not at all, and no more than was said."""

    target: Path
    most: int
    fresh: bool = False
    """Whether the file must not be there yet: its name is somebody else's word too."""

    @classmethod
    def at(cls, path: str | os.PathLike[str], name: str, most: int) -> Landing:
        """The file that a path names, or one in the directory that it names. There only the last part of the name counts,
        without dots in front: those are settings."""
        target, last = Path(path), os.path.basename(name).lstrip(".")
        return cls(target / (last or "artifact"), most, True) if target.is_dir() else cls(target, most)

    def save(self, chunks: Iterable[bytes]) -> None:
        with self.open() as write:
            for chunk in chunks:
                write(chunk)

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[bytes], None]]:
        """What writes the pieces, one after the other; the file is there when all went well."""
        if self.fresh and os.path.lexists(self.target):
            raise FileExistsError(errno.EEXIST, "there is something of that name: say which file to write", str(self.target))
        temporary = self.target.parent / f".cove-{secrets.token_hex(8)}"
        left = self.most

        def write(chunk: bytes) -> None:
            nonlocal left
            left -= len(chunk)
            if left < 0:
                raise Exhausted(f"{self.target.name}: there are more than the {self.most} bytes that may be written")
            f.write(chunk)

        try:
            with temporary.open("xb") as f:
                yield write
            if self.fresh:
                os.link(temporary, self.target)  # fails where a rename would replace
            else:
                os.replace(temporary, self.target)
        finally:
            temporary.unlink(missing_ok=True)
