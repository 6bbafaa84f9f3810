"""What can go wrong, by what a caller can do about it."""

from __future__ import annotations

import json
from typing import Any


class CoveError(Exception):
    """A failure that the server explained, or a server that could not be asked."""

    kind = "internal"

    def __init__(self, message: str, *, kind: str | None = None, status: int = 0, request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind or type(self).kind
        self.status = status
        self.request_id = request_id

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (type(self), self.message, self.kind, self.status, self.request_id)


def _remake(cls: type[CoveError], message: str, kind: str, status: int, request_id: str) -> CoveError:
    return cls(message, kind=kind, status=status, request_id=request_id)


class Invalid(CoveError):
    """The request itself is wrong."""

    kind = "invalid"


class Denied(CoveError):
    """The key is known and may not."""

    kind = "denied"


class Unauthorized(CoveError):
    """The key is not known."""

    kind = "unauthed"


class NotFound(CoveError):
    """No such thing, or it is somebody else's."""

    kind = "not_found"


class Conflict(CoveError):
    """The thing is in a state that forbids this."""

    kind = "conflict"


class Exhausted(CoveError):
    """A limit or quota is reached."""

    kind = "exhausted"


class DiskFull(Exhausted):
    """A disk has no space: the sandbox's own, or the server's."""

    kind = "disk_full"


class Timeout(CoveError):
    """The time given has passed."""

    kind = "timeout"


class Unavailable(CoveError):
    """The server is not there, or asks to try again later."""

    kind = "unavailable"


class Unreachable(Unavailable):
    """No server could be asked, so nothing was done."""


class Gone(CoveError):
    """It existed and has ended."""

    kind = "gone"


class Unsupported(CoveError):
    """This server cannot do that."""

    kind = "unsupported"


_KINDS: dict[str, type[CoveError]] = {
    cls.kind: cls
    for cls in (Invalid, Denied, Unauthorized, NotFound, Conflict, Exhausted, DiskFull, Timeout, Unavailable, Gone, Unsupported)
}

# What an answer without a body of ours means: something between us and the server spoke.
_STATUSES = {400: "invalid", 401: "unauthed", 403: "denied", 404: "not_found", 409: "conflict", 410: "gone", 429: "exhausted",
             501: "unsupported", 502: "unavailable", 503: "unavailable", 504: "timeout", 507: "disk_full"}


def fault(kind: str, message: str, status: int = 0, request_id: str = "") -> CoveError:
    """The error of a kind."""
    return _KINDS.get(kind, CoveError)(message, kind=kind, status=status, request_id=request_id)


def from_answer(status: int, body: bytes, request_id: str = "") -> CoveError:
    """The error that an answer tells."""
    try:
        told = json.loads(body)["error"]
        return fault(str(told["kind"]), str(told["message"]), status, request_id)
    except (ValueError, KeyError, TypeError):
        text = body[:200].decode("utf-8", "replace").strip()
        return fault(_STATUSES.get(status, "internal"), f"the server answered {status}: {text}", status, request_id)
