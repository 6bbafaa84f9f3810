"""Settings of langgraph_sandbox, from an env file and the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from .._threads import check_key

SESSION_DIR = "/session"
ARTIFACTS_DIR = "/session/artifacts"
STAGED_DIR = "/session/data"
LOCAL_DIR = "/data"

DEFAULT_IMAGE = "sandbox:latest"


class SessionStorage(str, Enum):
    """Where a session's files are: in memory, on a disk that outlives the sandbox, or on one that ends with it.

    DISK is for graphs that go back in time: its sandboxes can be copied at every checkpoint (cove.checkpoint).
    """

    TMPFS = "TMPFS"
    BIND = "BIND"
    DISK = "DISK"


class DatasetAccess(str, Enum):
    """Where data comes from: nowhere, a directory of the server's host, or an API whose answers are staged."""

    NONE = "NONE"
    LOCAL_RO = "LOCAL_RO"
    API = "API"


# Names that documents of this package's ancestor use for the same thing.
_ALIASES = {"API_TMPFS": "API", "LOCAL": "LOCAL_RO"}


def parse_storage(value: str | SessionStorage) -> SessionStorage:
    return SessionStorage(_choice("SESSION_STORAGE", value, [s.value for s in SessionStorage]))


def parse_access(value: str | DatasetAccess) -> DatasetAccess:
    return DatasetAccess(_choice("DATASET_ACCESS", value, [a.value for a in DatasetAccess]))


def _choice(name: str, value: str | Enum, allowed: list[str]) -> str:
    text = str(value.value if isinstance(value, Enum) else value).strip().upper()
    text = _ALIASES.get(text, text) if name == "DATASET_ACCESS" else text
    if text not in allowed:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(allowed)}")
    return text


@dataclass(frozen=True)
class Config:
    """How sandboxes of conversations are made. Paths are absolute."""

    session_storage: SessionStorage = SessionStorage.TMPFS
    dataset_access: DatasetAccess = DatasetAccess.API
    sessions_root: Path = Path("sessions")
    datasets_host_ro: Path | None = None
    blobstore_dir: Path = Path("blobstore")
    artifacts_db: Path = Path("artifacts.db")
    cache_filename: str = "cache_datasets.json"
    sandbox_image: str = DEFAULT_IMAGE
    tmpfs_size_mb: int = 1024
    cove_url: str = ""
    cove_api_key: str = ""

    def __repr__(self) -> str:
        shown = {k: v for k, v in vars(self).items() if k != "cove_api_key"}
        return f"Config({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    @classmethod
    def from_env(cls, env_file_path: str | os.PathLike[str] | None = None) -> Config:
        """Settings of the environment; those of the file, if one is named, win. Nothing of it stays in the environment."""
        told = dict(os.environ)
        if env_file_path is not None:
            told |= read_env_file(env_file_path)

        def get(name: str, default: str = "") -> str:
            return told.get(name, "").strip() or default

        access = parse_access(get("DATASET_ACCESS", "API"))
        datasets = get("DATASETS_HOST_RO")
        if access is DatasetAccess.LOCAL_RO and not datasets:
            raise ValueError("DATASET_ACCESS=LOCAL_RO needs DATASETS_HOST_RO: the directory with the datasets, on the server's host")
        return cls(
            session_storage=parse_storage(get("SESSION_STORAGE", "TMPFS")),
            dataset_access=access,
            sessions_root=Path(get("SESSIONS_ROOT", "./sessions")).resolve(),
            datasets_host_ro=Path(datasets).resolve() if datasets and access is not DatasetAccess.NONE else None,
            blobstore_dir=Path(get("BLOBSTORE_DIR", "./blobstore")).resolve(),
            artifacts_db=Path(get("ARTIFACTS_DB") or get("ARTIFACTS_DB_PATH", "./artifacts.db")).resolve(),
            cache_filename=get("CACHE_FILENAME", "cache_datasets.json"),
            sandbox_image=get("SANDBOX_IMAGE", DEFAULT_IMAGE),
            tmpfs_size_mb=_number("TMPFS_SIZE_MB", get("TMPFS_SIZE_MB", "1024")),
            cove_url=get("COVE_URL"),
            cove_api_key=get("COVE_API_KEY"),
        )

    @property
    def artifacts_db_path(self) -> Path:
        return self.artifacts_db

    @property
    def is_tmpfs(self) -> bool:
        return self.session_storage is SessionStorage.TMPFS

    @property
    def is_bind(self) -> bool:
        return self.session_storage is SessionStorage.BIND

    @property
    def uses_api_staging(self) -> bool:
        return self.dataset_access is DatasetAccess.API

    @property
    def uses_local_ro(self) -> bool:
        return self.dataset_access is DatasetAccess.LOCAL_RO

    @property
    def uses_no_datasets(self) -> bool:
        return self.dataset_access is DatasetAccess.NONE

    def session_dir(self, session_id: str) -> Path:
        return self.sessions_root / check_key(session_id)

    def mode_id(self) -> str:
        """The mode's name, such as TMPFS_API."""
        return f"{self.session_storage.value}_{self.dataset_access.value.removesuffix('_RO')}"


def _number(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r}: want a whole number") from None
    if number <= 0:
        raise ValueError(f"{name}={text!r}: want more than nothing")
    return number


def read_env_file(path: str | os.PathLike[str]) -> dict[str, str]:
    """The settings of an env file: KEY=VALUE lines, also with export; a value may be quoted, and # begins a comment only after a space."""
    found: dict[str, str] = {}
    for line in Path(path).read_text().splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and name.strip() and not name.lstrip().startswith("#"):
            found[name.strip()] = _value(value.strip())
    return found


def _value(text: str) -> str:
    if text[:1] in ("'", '"') and (end := text.find(text[0], 1)) > 0:
        return text[1:end]
    if text.startswith("#"):
        return ""
    return text.split(" #", 1)[0].strip()
