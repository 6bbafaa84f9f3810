"""What a cell printed, for programs that expect a list and for those that expect a text."""

from __future__ import annotations

from typing import Any, Iterable


class Lines(list[str]):
    """The pieces that were printed: a list that joins, formats, compares and searches as the text they make.

    `"" + lines`, `lines + ""`, `str(lines)`, `f"{lines}"` and `"".join(lines)` are the same string; `lines[0]`, `len(lines)`,
    loops and JSON see the list.
    """

    def __str__(self) -> str:
        return "".join(self)

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, str):
            return str(self) + other
        return Lines([*self, *other])

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, str):
            return other + str(self)
        return Lines([*other, *self])

    def __iadd__(self, other: Any) -> Any:
        # `output = logs.stdout; output += "\n…"` must not take the text apart into letters, as a list would.
        if isinstance(other, str):
            return str(self) + other
        self.extend(other)
        return self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return str(self) == other
        return list.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __contains__(self, part: object) -> bool:
        return part in str(self) if isinstance(part, str) else False

    def __getattr__(self, name: str) -> Any:
        """The methods of a text that a list has not: strip, splitlines, startswith …"""
        if name.startswith("_") or not hasattr(str, name):
            raise AttributeError(f"{type(self).__name__!r} has no {name!r}")
        return getattr(str(self), name)


def lines(parts: Iterable[str]) -> Lines:
    return parts if isinstance(parts, Lines) else Lines(parts)
