"""The directory of a BIND session on this host: its log, metadata and state as the server tells them."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from ... import _wire as wire
from ..._threads import KEY


def prepare(directory: Path, id: str) -> int:
    """Make the directory of a session and tell the seq of the last line that its log has. The log of an earlier session of the
    same key is put aside."""
    for each in ("artifacts", "data"):
        (directory / each).mkdir(parents=True, exist_ok=True)
    if (before := _id(directory)) not in ("", id) and (directory / "session.log").exists():
        (directory / "session.log").replace(directory / f"session-{before}.log")
    with _locked(directory / "session.log") as f:
        return _last(f)


def write(directory: Path, info: wire.SessionInfo, lines: list[dict[str, Any]], state: wire.SessionState | None, image: str) -> None:
    """Bring the files up to date. Several processes may do it at once."""
    with _locked(directory / "session.log") as f:
        seen = _last(f)
        f.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines if line.get("seq", 0) > seen))
    replace(directory / "session_metadata.json", metadata(info, image))
    if state is not None:
        replace(directory / "python_state.json", {
            "timestamp": _iso(state.timestamp), "imported_modules": list(state.imported_modules),
            "variables": {name: {"type": v.type, "value": v.value} for name, v in state.variables.items()}})


def _id(directory: Path) -> str:
    try:
        id = str(json.loads((directory / "session_metadata.json").read_text())["id"])
        return id if KEY.fullmatch(id) else ""  # it becomes a part of a name
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def metadata(info: wire.SessionInfo, image: str) -> dict[str, Any]:
    """A session as session_metadata.json has it."""
    told: dict[str, Any] = {
        "session_id": info.key, "id": info.id, "created_at": _iso(info.created_at), "container_id": info.sandbox, "host_port": None,
        "session_storage": {"bind": "BIND"}.get(info.storage, info.storage.upper()), "dataset_access": info.datasets.access.upper(), "image": image,
        "template": info.template, "state": info.state, "generation": info.generation, "execution_count": info.runs,
        "failed_count": info.failed, "artifact_count": info.artifacts, "last_used": _iso(info.last_used)}
    if info.stopped_at:
        told |= {"stopped_at": _iso(info.stopped_at), "final_execution_count": info.runs}
    return told


def replace(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        temporary.write_text(json.dumps(value, indent=2) + "\n")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def reserve(directory: Path, name: str) -> Path:
    """A new empty file with the time in front of its name, which no other export has."""
    directory.mkdir(parents=True, exist_ok=True)
    while True:
        target = directory / f"{datetime.now():%Y%m%d_%H%M%S_%f}_{name}"
        try:
            target.open("xb").close()
            return target
        except FileExistsError:
            continue  # a microsecond later the name is another


def _iso(at: datetime | None) -> str | None:
    return at.isoformat() if at else None


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    with path.open("ab+") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield f


def _last(f: BinaryIO) -> int:
    """The seq of the last line that tells one; half a line, left by a crash, is cut off, and a damaged one is passed over."""
    end = f.seek(0, os.SEEK_END)
    size = 1 << 16
    while end:
        f.seek(max(0, end - size))
        tail = f.read(end - f.tell())
        whole = size >= end
        if not tail.endswith(b"\n"):
            cut = tail.rfind(b"\n") + 1
            if cut or whole:
                f.truncate(end := end - len(tail) + cut)
                continue
        lines = tail.split(b"\n")
        for line in reversed(lines if whole else lines[1:]):
            if (seq := _seq(line)) is not None:
                return seq
        if whole:
            break
        size *= 4
    return 0


def _seq(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["seq"])
    except (ValueError, KeyError, TypeError):
        return None
