from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cove import Cove
from cove.langgraph_sandbox import SessionManager

SETTINGS = ("SESSION_STORAGE", "DATASET_ACCESS", "SESSIONS_ROOT", "BLOBSTORE_DIR", "ARTIFACTS_DB", "ARTIFACTS_DB_PATH", "DATASETS_HOST_RO", "SANDBOX_IMAGE",
            "TMPFS_SIZE_MB", "CACHE_FILENAME")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of this machine, and a working directory of the test's own."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def manager(server: Cove, tmp_path: Path) -> Iterator[Callable[..., SessionManager]]:
    """Makes managers for small sessions; the sessions end with the test."""
    made: list[SessionManager] = []

    def make(**settings: Any) -> SessionManager:
        settings = {"dataset_access": "NONE", "session_root": tmp_path / "sessions", "tmpfs_size": 256} | settings
        made.append(SessionManager(**settings))
        return made[-1]

    yield make
    for each in made:
        each.cleanup_all_containers()
        each.close()


@pytest.fixture
def host_data() -> Iterator[Path]:
    """A directory of the server's host that the operator allowed."""
    root = os.environ.get("COVE_TEST_HOST_DATA")
    if not root:
        pytest.fail("COVE_TEST_HOST_DATA is not set: a directory that storage.host_paths allows", pytrace=False)
    directory = Path(root) / uuid.uuid4().hex[:8]
    directory.mkdir()
    directory.chmod(0o755)
    yield directory
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
