"""Sandboxes of sessions, kept for a while and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from cove.e2b._interpreter import CodeInterpreter

# How much longer than its session's age a sandbox is asked to live: the manager ends it, the server only when the manager is gone.
GRACE_SECONDS = 60


def _now() -> datetime:
    return datetime.now(timezone.utc)


class SandboxManager:
    """One sandbox for each session id, replaced when it is older than max_age_minutes.

    The server is told the same age, so that a program that dies leaves nothing behind. `create` and `now` are for programs that
    make sandboxes in a way of their own, and for tests. Safe to use from several threads.
    """

    def __init__(
        self,
        max_age_minutes: float = 30,
        *,
        create: Callable[[], Any] | None = None,
        now: Callable[[], datetime] = _now,
    ) -> None:
        self.sandboxes: dict[str, tuple[Any, datetime]] = {}
        self.max_age = timedelta(minutes=max_age_minutes)
        self._create = create or self._new
        self._now = now
        self._lock = threading.Lock()

    def _new(self) -> CodeInterpreter:
        made: CodeInterpreter = CodeInterpreter(timeout=int(self.max_age.total_seconds()) + GRACE_SECONDS)
        return made

    def get_or_create(self, session_id: str) -> Any:
        """The session's sandbox; a new one, with clean state, when there was none or it was too old."""
        with self._lock:
            kept = self.sandboxes.get(session_id)
            if kept is not None and self._now() - kept[1] <= self.max_age:
                return kept[0]
            if kept is not None:
                del self.sandboxes[session_id]
                kept[0].close()
            sandbox = self._create()
            self.sandboxes[session_id] = (sandbox, self._now())
            return sandbox

    def close(self, session_id: str) -> bool:
        """Ends a session's sandbox; False when it has none."""
        with self._lock:
            kept = self.sandboxes.pop(session_id, None)
        return kept is not None and bool(kept[0].close())

    def cleanup_all(self) -> None:
        """Ends every sandbox, also when ending one of them fails; the first failure is raised at the end."""
        with self._lock:
            kept = [sandbox for sandbox, _ in self.sandboxes.values()]
            self.sandboxes.clear()
        failures = []
        for sandbox in kept:
            try:
                sandbox.close()
            except Exception as e:
                failures.append(e)
        if failures:
            raise failures[0]

    def __enter__(self) -> SandboxManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup_all()
