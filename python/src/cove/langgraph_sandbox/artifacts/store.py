"""Copies of artifacts on this host: blobs by digest, and a SQLite file that names them."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from ..._wire import ArtifactInfo

_SCHEMA = """
CREATE TABLE IF NOT EXISTS artifacts (
    id TEXT PRIMARY KEY, sha256 TEXT NOT NULL, size INTEGER NOT NULL, mime TEXT NOT NULL, filename TEXT NOT NULL, created_at TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS links (
    artifact_id TEXT NOT NULL REFERENCES artifacts (id) ON DELETE CASCADE, session_id TEXT NOT NULL, run_id TEXT, tool_call_id TEXT,
    created_at TEXT NOT NULL, UNIQUE (artifact_id, session_id, run_id));
CREATE INDEX IF NOT EXISTS artifacts_by_sha256 ON artifacts (sha256);
CREATE INDEX IF NOT EXISTS links_by_session ON links (session_id);
"""


def descriptor(artifact: ArtifactInfo) -> dict[str, Any]:
    """An artifact as tools and exec tell it."""
    told: dict[str, Any] = {
        "id": artifact.id or None, "name": artifact.name, "path": artifact.path, "mime": artifact.mime, "size": artifact.size,
        "sha256": artifact.sha256 or None, "created_at": artifact.created_at.isoformat() if artifact.created_at else None}
    if artifact.url:
        told["url"] = artifact.url
    if artifact.error:
        told["error"] = artifact.error
    return told


class ArtifactStore:
    """A directory of blobs and the database beside it. The server has the originals: this can be removed at any time."""

    def __init__(self, directory: str | os.PathLike[str], database: str | os.PathLike[str]) -> None:
        self.directory, self.database = Path(directory).resolve(), Path(database).resolve()

    @classmethod
    def of(cls, directory: str | os.PathLike[str] | None, database: str | os.PathLike[str] | None) -> ArtifactStore | None:
        """The store that arguments or BLOBSTORE_DIR and ARTIFACTS_DB ask for; neither: none."""
        directory = directory or os.environ.get("BLOBSTORE_DIR")
        database = database or os.environ.get("ARTIFACTS_DB") or os.environ.get("ARTIFACTS_DB_PATH")
        if not directory and not database:
            return None
        return cls(directory or "./blobstore", database or "./artifacts.db")

    def blob(self, sha256: str) -> Path:
        """Where the bytes of a digest are."""
        return self.directory / sha256[:2] / sha256[2:4] / sha256

    def lacks(self, sha256: str) -> bool:
        """Whether the bytes of a digest are not here; the directory for them is."""
        path = self.blob(sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        return not path.exists()

    def add(self, artifact: ArtifactInfo, session: str) -> None:
        """Name an artifact whose bytes are here."""
        created = artifact.created_at.isoformat() if artifact.created_at else ""
        with closing(self._open()) as db, db:
            db.execute("INSERT OR IGNORE INTO artifacts VALUES (?, ?, ?, ?, ?, ?)",
                       (artifact.id, artifact.sha256, artifact.size, artifact.mime, artifact.name, created))
            db.execute("INSERT OR IGNORE INTO links VALUES (?, ?, ?, ?, ?)", (artifact.id, session, artifact.run, artifact.tool_call, created))

    def artifacts(self, session: str | None = None) -> list[dict[str, Any]]:
        """What is named here, newest first."""
        with closing(self._open()) as db:
            db.row_factory = sqlite3.Row
            rows = db.execute("SELECT DISTINCT a.* FROM artifacts a JOIN links l ON l.artifact_id = a.id WHERE ? IS NULL OR l.session_id = ? "
                              "ORDER BY a.created_at DESC, a.id", (session, session))
            return [dict(row) for row in rows]

    def _open(self) -> sqlite3.Connection:
        self.database.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(self.database, timeout=30)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA foreign_keys = ON")
        db.executescript(_SCHEMA)
        return db
