"""The client of whoever names none."""

from __future__ import annotations

import os
from functools import lru_cache

from .client import Cove


def client() -> Cove:
    """One client, and so one pool of connections, for each address that the environment named."""
    return _client(os.environ.get("COVE_URL"), os.environ.get("COVE_API_KEY"))


@lru_cache(maxsize=8)
def _client(url: str | None, key: str | None) -> Cove:
    return Cove(url, key)
