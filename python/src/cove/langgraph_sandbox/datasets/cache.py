"""The file of a session's datasets: ids in order, each pending, loaded or failed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from ..._wire import Dataset

Entry = dict[str, str]
PathLike = str | os.PathLike[str]


class DatasetStatus(str, Enum):
    """How far a dataset is."""

    PENDING = "pending"
    LOADED = "loaded"
    FAILED = "failed"


def read_entries(path: PathLike) -> list[Entry]:
    """What the file tells; a missing or broken one tells nothing."""
    try:
        told = json.loads(Path(path).read_text())["datasets"]
        return [e for e in told if isinstance(e, dict) and isinstance(e.get("id"), str) and e["id"].strip()]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def read_ids(path: PathLike) -> list[str]:
    return [e["id"] for e in read_entries(path)]


def read_pending_ids(path: PathLike) -> list[str]:
    return [e["id"] for e in read_entries(path) if e.get("status") == DatasetStatus.PENDING]


def get_entry_status(path: PathLike, dataset_id: str) -> DatasetStatus | None:
    return next((_status(e.get("status")) for e in read_entries(path) if e["id"] == dataset_id), None)


def _status(told: object) -> DatasetStatus:
    """One of ours: what arrives just now, and what nobody knows, is not there yet."""
    return DatasetStatus(told) if told in set(DatasetStatus) else DatasetStatus.PENDING


def is_cached(path: PathLike, dataset_id: str) -> bool:
    return dataset_id in read_ids(path)


def add_entry(path: PathLike, dataset_id: str, status: DatasetStatus | str = DatasetStatus.PENDING) -> None:
    """Add a dataset; one that is there stays as it is."""
    if dataset_id.strip():
        _change(path, lambda entries: entries if any(e["id"] == dataset_id for e in entries) else [*entries, _entry(dataset_id, status)])


def update_entry_status(path: PathLike, dataset_id: str, status: DatasetStatus | str) -> None:
    """Say how far a dataset is; one that is not there is added."""
    def change(entries: list[Entry]) -> list[Entry]:
        if not any(e["id"] == dataset_id for e in entries):
            return [*entries, _entry(dataset_id, status)]
        return [_entry(dataset_id, status) if e["id"] == dataset_id else e for e in entries]

    _change(path, change)


def write_ids(path: PathLike, ids: Iterable[str]) -> None:
    """Make these the datasets, pending, in this order, each once."""
    kept = list(dict.fromkeys(i.strip() for i in ids if i.strip()))
    _change(path, lambda _: [_entry(i, DatasetStatus.PENDING) for i in kept])


def write_entries(path: PathLike, datasets: Iterable[Dataset]) -> None:
    """Make the file tell what the server told."""
    told = [{"id": d.id, "status": _status(d.status).value, "timestamp": _stamp(d.updated_at)} for d in datasets]
    _change(path, lambda _: told)


def clear_cache(path: PathLike) -> None:
    _change(path, lambda _: [])


def discover(directory: PathLike, suffix: str = ".parquet") -> list[str]:
    """The ids of the datasets in a directory of the host's, sorted."""
    root = Path(directory)
    if not root.is_dir():
        raise ValueError(f"DATASETS_HOST_RO={str(directory)!r} is no directory: make it, or name the one that has the datasets")
    return sorted(p.stem if suffix else p.name for p in root.iterdir() if p.is_file() and p.name.endswith(suffix))


def _entry(dataset_id: str, status: DatasetStatus | str) -> Entry:
    return {"id": dataset_id, "status": DatasetStatus(status).value, "timestamp": _stamp(None)}


def _stamp(at: datetime | None) -> str:
    return (at or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _change(path: PathLike, change: Callable[[list[Entry]], list[Entry]]) -> None:
    """Rewrite the file whole, one writer at a time."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target):
        value: dict[str, Any] = {"datasets": change(read_entries(target))}
        temporary = target.with_name(f".{target.name}.new")
        temporary.write_text(json.dumps(value, indent=2))
        os.replace(temporary, target)


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    with target.with_name(f".{target.name}.lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield
