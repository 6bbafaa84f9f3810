"""Read artifacts by id: metadata, bytes, text, tables, and links."""

from __future__ import annotations

import io
from typing import Any

from ... import _default
from ...client import Cove
from .store import descriptor


def get_metadata(artifact_id: str, *, client: Cove | None = None) -> dict[str, Any]:
    """What is known of an artifact."""
    return descriptor(_client(client).artifact(artifact_id))


def read_bytes(artifact_id: str, *, client: Cove | None = None) -> bytes:
    return _client(client).artifact(artifact_id).content()


def read_text(artifact_id: str, encoding: str = "utf-8", max_bytes: int | None = None, *, client: Cove | None = None) -> str:
    """Its text; with max_bytes the beginning, and no more than that is fetched."""
    if max_bytes is None:
        return read_bytes(artifact_id, client=client).decode(encoding)
    head = b""
    for chunk in _client(client).artifact(artifact_id).stream():
        head += chunk
        if len(head) >= max_bytes:
            break
    return head[:max_bytes].decode(encoding, "ignore")


def load_csv(artifact_id: str, *, client: Cove | None = None, **options: Any) -> Any:
    """A pandas DataFrame of a CSV file."""
    import pandas

    return pandas.read_csv(io.BytesIO(read_bytes(artifact_id, client=client)), **options)


def load_parquet(artifact_id: str, *, client: Cove | None = None, **options: Any) -> Any:
    """A pandas DataFrame of a Parquet file."""
    import pandas

    return pandas.read_parquet(io.BytesIO(read_bytes(artifact_id, client=client)), **options)


def fetch_artifact_urls(session: str, *, client: Cove | None = None, ttl: float | None = None) -> list[dict[str, Any]]:
    """The artifacts of a session with fresh links, newest first."""
    found = []
    for artifact in _client(client).artifacts(session=session):
        found.append(descriptor(artifact) | {"url": artifact.link(ttl).url})
    return found


def _client(client: Cove | None) -> Cove:
    return client or _default.client()
