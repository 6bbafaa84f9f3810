"""Which session belongs to a thread of LangGraph: one answer for tools, backends and checkpoints."""

from __future__ import annotations

import hashlib
import re

KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@=+-]{0,127}")


def session_key(thread_id: object, prefix: str = "") -> str:
    """The session key of a thread: its id, or a digest of an id that cannot be a key."""
    key = prefix + str(thread_id)
    return key if KEY.fullmatch(key) else "thread-" + hashlib.sha256(key.encode()).hexdigest()[:32]


def check_key(key: str) -> str:
    """The key, if it can be one: nothing that could be a path."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise ValueError(f"session key {key!r}: want 1 to 128 of letters, digits and ._:@=+- with a letter or digit first")
    return key
