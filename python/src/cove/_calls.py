"""Every request of Cove's API as a value: what is sent, and what its answer is read as. Both clients send these."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from . import _wire as wire
from .errors import Invalid, fault

T = TypeVar("T")

PREFIX = "/cove/v1"
DEFAULT_TIMEOUT = 300.0
# How much longer than a run's own limit its answer may take: the server collects artifacts and writes its log.
GRACE = 60.0

Unset: Any = object()


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request. A timeout of Unset is the client's own, None is for ever."""

    method: str
    path: str
    read: Callable[[bytes], T]
    params: Sequence[tuple[str, str]] = ()
    json: Any = None
    content: Any = None
    headers: Mapping[str, str] | None = None
    accept: str = "application/json"
    timeout: Any = Unset


def server(url: str | None, api_key: str | None) -> tuple[str, str]:
    """Where the server is and with which key, from arguments or COVE_URL and COVE_API_KEY."""
    url = url or os.environ.get("COVE_URL", "")
    if not url:
        raise Invalid("COVE_URL is not set: start a server with `cove serve` and export the URL it prints")
    if not url.startswith(("http://", "https://")):
        raise Invalid(f"server URL {url!r}: want http://HOST:PORT or https://HOST")
    key = os.environ.get("COVE_API_KEY", "") if api_key is None else api_key
    return url.rstrip("/"), key


def at(*parts: str) -> str:
    return "/" + "/".join(quote(p, safe="") if i else p for i, p in enumerate(parts))


def one(cls: type[T]) -> Callable[[bytes], T]:
    return lambda raw: wire.decode(cls, json.loads(raw))


def many(cls: type[T], name: str) -> Callable[[bytes], list[T]]:
    return lambda raw: [wire.decode(cls, each) for each in json.loads(raw).get(name) or []]


def nothing(raw: bytes) -> None:
    return None


def page(cls: type[T], name: str) -> Callable[[bytes], tuple[list[T], str]]:
    def read(raw: bytes) -> tuple[list[T], str]:
        told = json.loads(raw)
        return [wire.decode(cls, each) for each in told.get(name) or []], told.get("cursor", "")

    return read


def query(**values: Any) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        if value is None or value is False or value == "":
            continue
        for each in value if isinstance(value, (list, tuple)) else [value]:
            pairs.append((name, "true" if each is True else str(each)))
    return pairs


def patience(timeout: float | None) -> float | None:
    return timeout + GRACE if timeout else None


# --- sandboxes


def create(request: Mapping[str, Any]) -> Call[wire.SandboxInfo]:
    return Call("POST", "/sandboxes", one(wire.SandboxInfo), json=request)


def get(id: str) -> Call[wire.SandboxInfo]:
    return Call("GET", at("sandboxes", id), one(wire.SandboxInfo))


def sandboxes(params: list[tuple[str, str]]) -> Call[tuple[list[wire.SandboxInfo], str]]:
    return Call("GET", "/sandboxes", page(wire.SandboxInfo, "sandboxes"), params=params)


def listing(state: Any, metadata: Mapping[str, str] | None, template: str | None, key: str | None) -> list[tuple[str, str]]:
    states = [state] if isinstance(state, str) else list(state or ())
    return query(state=states, template=template, key=key, **{f"metadata.{k}": v for k, v in (metadata or {}).items()})


def templates() -> Call[list[wire.TemplateInfo]]:
    return Call("GET", "/templates", many(wire.TemplateInfo, "templates"))


def images() -> Call[list[Mapping[str, Any]]]:
    return Call("GET", "/images", lambda raw: json.loads(raw).get("images") or [])


def kill(id: str) -> Call[wire.SandboxInfo]:
    return Call("DELETE", at("sandboxes", id), one(wire.SandboxInfo))


def post(id: str, what: str, request: Mapping[str, Any]) -> Call[wire.SandboxInfo]:
    return Call("POST", at("sandboxes", id, what), one(wire.SandboxInfo), json=request)


def usage(id: str) -> Call[wire.SandboxUsage]:
    return Call("GET", at("sandboxes", id, "usage"), one(wire.SandboxUsage))


def snapshot(id: str, request: Mapping[str, Any]) -> Call[wire.TemplateInfo]:
    return Call("POST", at("sandboxes", id, "snapshot"), one(wire.TemplateInfo), json=request)


def fork(id: str, request: Mapping[str, Any]) -> Call[Mapping[str, Any]]:
    return Call("POST", at("sandboxes", id, "fork"), json.loads, json=request)


# --- runs


def run(id: str, code: str, timeout: float | None, **more: Any) -> Call[wire.Output]:
    request = wire.body(code=code, timeout_seconds=timeout, **more)
    return Call("POST", at("sandboxes", id, "run"), one(wire.Output), json=request, timeout=patience(timeout))


def exec(id: str, command: str | Sequence[str], timeout: float | None, **more: Any) -> Call[wire.Output]:
    what = {"command": command} if isinstance(command, str) else {"argv": list(command)}
    request = wire.body(timeout_seconds=timeout, **what, **more)
    return Call("POST", at("sandboxes", id, "exec"), one(wire.Output), json=request, timeout=patience(timeout))


def start_kernel(id: str, request: Mapping[str, Any]) -> Call[str]:
    return Call("POST", at("sandboxes", id, "kernels"), lambda raw: str(json.loads(raw)["name"]), json=request)


def snippet(code: str, timeout: float, **more: Any) -> Call[wire.SnippetResult]:
    request = wire.body(code=code, timeout_seconds=timeout, **more)
    return Call("POST", "/snippets", one(wire.SnippetResult), json=request, timeout=patience(timeout))


# --- files


def read(id: str, path: str, offset: int, length: int | None, user: str | None) -> Call[bytes]:
    params = query(path=path, offset=offset or None, length=length, user=user)
    return Call("GET", at("sandboxes", id, "files"), bytes, params=params, accept="*/*")


def write(id: str, path: str, content: Any, mode: int | None, append: bool, user: str | None) -> Call[wire.Entry]:
    params = query(path=path, append=append, user=user, mode=f"0{mode:o}" if mode is not None else None)
    return Call("PUT", at("sandboxes", id, "files"), one(wire.Entry), params=params, content=content, timeout=None)


def stat(id: str, path: str, user: str | None) -> Call[wire.Entry]:
    return Call("GET", at("sandboxes", id, "files", "stat"), one(wire.Entry), params=query(path=path, user=user))


def ls(id: str, path: str, depth: int, user: str | None) -> Call[list[wire.Entry]]:
    return Call("GET", at("sandboxes", id, "files", "list"), many(wire.Entry, "entries"), params=query(path=path, depth=depth, user=user))


def change(id: str, what: str, request: Mapping[str, Any]) -> Call[wire.Entry]:
    return Call("POST", at("sandboxes", id, "files", what), one(wire.Entry), json=request)


def remove(id: str, path: str, recursive: bool, user: str | None) -> Call[None]:
    return Call("DELETE", at("sandboxes", id, "files"), nothing, params=query(path=path, recursive=recursive, user=user))


# --- sessions


def open_session(key: str, request: Mapping[str, Any]) -> Call[wire.SessionInfo]:
    return Call("PUT", at("sessions", key), one(wire.SessionInfo), json=request)


def get_session(key: str) -> Call[wire.SessionInfo]:
    return Call("GET", at("sessions", key), one(wire.SessionInfo))


def sessions(params: list[tuple[str, str]]) -> Call[tuple[list[wire.SessionInfo], str]]:
    return Call("GET", "/sessions", page(wire.SessionInfo, "sessions"), params=params)


def remove_session(key: str) -> Call[None]:
    return Call("DELETE", at("sessions", key), nothing)


def stop_session(key: str) -> Call[wire.SessionInfo]:
    return Call("POST", at("sessions", key, "stop"), one(wire.SessionInfo))


def run_session(key: str, code: str, timeout: float | None, idempotency_key: str | None, **more: Any) -> Call[wire.SessionOutputInfo]:
    request = wire.body(code=code, timeout_seconds=timeout, **more)
    headers = {"Idempotency-Key": idempotency_key} if idempotency_key else None
    # No patience: cells of a session wait for each other, and how long is not known here.
    return Call("POST", at("sessions", key, "run"), one(wire.SessionOutputInfo), json=request, headers=headers, timeout=None)


def keep(key: str, request: Mapping[str, Any]) -> Call[wire.ArtifactInfo]:
    return Call("POST", at("sessions", key, "keep"), one(wire.ArtifactInfo), json=request)


def log(key: str, after: int | None, last: int | None, follow: bool) -> Call[list[dict[str, Any]]]:
    params = query(after=after, last=last, follow=follow)
    timeout = None if follow else Unset
    return Call("GET", at("sessions", key, "log"), lines, params=params, accept="application/x-ndjson", timeout=timeout)


def lines(raw: bytes) -> list[dict[str, Any]]:
    return [log_line(line) for line in raw.split(b"\n") if line.strip()]


def log_line(line: bytes) -> dict[str, Any]:
    """One line of a log; a fault, which is how a broken stream ends, is raised."""
    told: dict[str, Any] = json.loads(line)
    if told.get("event") is None and isinstance(told.get("fault"), dict):
        raise fault(str(told["fault"].get("kind", "internal")), str(told["fault"].get("message", "")))
    return told


def state(key: str) -> Call[wire.SessionState]:
    return Call("GET", at("sessions", key, "state"), one(wire.SessionState))


def checkpoints(key: str) -> Call[list[wire.Checkpoint]]:
    return Call("GET", at("sessions", key, "checkpoints"), many(wire.Checkpoint, "checkpoints"))


def checkpoint(key: str, request: Mapping[str, Any]) -> Call[wire.Checkpoint]:
    return Call("POST", at("sessions", key, "checkpoints"), one(wire.Checkpoint), json=request)


def remove_checkpoint(key: str, id: str) -> Call[None]:
    return Call("DELETE", at("sessions", key, "checkpoints", id), nothing)


def restore(key: str, request: Mapping[str, Any]) -> Call[wire.SessionInfo]:
    return Call("POST", at("sessions", key, "restore"), one(wire.SessionInfo), json=request)


# --- datasets


def datasets(key: str) -> Call[list[wire.Dataset]]:
    return Call("GET", at("sessions", key, "datasets"), many(wire.Dataset, "datasets"))


def stage(key: str, id: str, content: Any, file: str | None) -> Call[wire.Dataset]:
    return Call("PUT", at("sessions", key, "datasets", id), one(wire.Dataset), params=query(file=file), content=content, timeout=None)


def mark(key: str, id: str, request: Mapping[str, Any]) -> Call[wire.Dataset]:
    return Call("POST", at("sessions", key, "datasets", id), one(wire.Dataset), json=request)


def remove_dataset(key: str, id: str) -> Call[None]:
    return Call("DELETE", at("sessions", key, "datasets", id), nothing)


# --- artifacts


def artifacts(params: list[tuple[str, str]]) -> Call[tuple[list[wire.ArtifactInfo], str]]:
    return Call("GET", "/artifacts", page(wire.ArtifactInfo, "artifacts"), params=params)


def artifact(id: str) -> Call[wire.ArtifactInfo]:
    return Call("GET", at("artifacts", id), one(wire.ArtifactInfo))


def content(id: str) -> Call[bytes]:
    return Call("GET", at("artifacts", id, "content"), bytes, accept="*/*")


def lineage(id: str) -> Call[wire.Lineage]:
    return Call("GET", at("artifacts", id, "lineage"), one(wire.Lineage))


def link(id: str, ttl: float | None) -> Call[wire.Link]:
    return Call("POST", at("artifacts", id, "link"), one(wire.Link), json=wire.body(ttl_seconds=ttl))


def remove_artifact(id: str) -> Call[None]:
    return Call("DELETE", at("artifacts", id), nothing)
