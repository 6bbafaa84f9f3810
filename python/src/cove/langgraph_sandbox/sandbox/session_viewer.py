"""Prints a session's directory: metadata, log, state and artifacts. Sessions of any storage: `cove session export` makes such a directory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

_METADATA = [("Session ID", "session_id"), ("Created", "created_at"), ("Last Used", "last_used"), ("Stopped", "stopped_at"), ("Container ID", "container_id"),
             ("Host Port", "host_port"), ("Storage Mode", "session_storage"), ("Dataset Access", "dataset_access"), ("Image", "image"),
             ("Execution Count", "execution_count"), ("Final Execution Count", "final_execution_count")]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(1, f"{self.prog}: {message}\n")  # as for a directory that is not there


def main(argv: list[str] | None = None) -> int:
    parser = _Parser(prog="session_viewer", description="Show what happened in a session.")
    parser.add_argument("directory", type=Path, help="the session's directory, such as sessions/SESSION_ID")
    parser.add_argument("--limit", type=int, metavar="N", help="only the last N entries of the log")
    parser.add_argument("--no-state", action="store_true", help="without the state of Python")
    parser.add_argument("--no-artifacts", action="store_true", help="without the artifacts")
    args = parser.parse_args(argv)
    if not args.directory.is_dir():
        print(f"{args.directory}: there is no such session directory", file=sys.stderr)
        return 1
    if args.limit is not None and args.limit < 1:
        parser.error("--limit: want a number of at least 1")
    for line in view(args.directory, args.limit, not args.no_state, not args.no_artifacts):
        print(line)
    return 0


def view(directory: Path, limit: int | None = None, state: bool = True, artifacts: bool = True) -> Iterator[str]:
    """The lines that tell a session."""
    yield f"Session directory: {directory.resolve()}"
    yield "=" * 50
    yield from _metadata(_json(directory / "session_metadata.json"))
    yield from _log(directory / "session.log", limit)
    if state:
        yield from _state(_json(directory / "python_state.json"))
    if artifacts:
        yield from _artifacts(directory)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        told = json.loads(path.read_text())
        return told if isinstance(told, dict) else None
    except (OSError, ValueError):
        return None


def _metadata(told: dict[str, Any] | None) -> Iterator[str]:
    yield "\n=== SESSION METADATA ==="
    if told is None:
        yield "No session metadata found"
        return
    for label, name in _METADATA:
        if told.get(name) is not None:
            yield f"{label}: {_clean(told[name])}"


def _log(path: Path, limit: int | None) -> Iterator[str]:
    yield "\n=== SESSION LOG ==="
    if not path.is_file():
        yield "No session log found"
        return
    lines = [line for line in path.read_text(errors="replace").split("\n") if line.strip()]
    for line in lines[-limit:] if limit else lines:
        try:
            told = json.loads(line)
            yield from _event(told)
        except (ValueError, AttributeError, TypeError):
            yield f"Invalid log entry: {_clean(line[:100])}"


def _event(told: dict[str, Any]) -> Iterator[str]:
    kind = told.get("event", "?")
    yield f"[{_clean(told.get('timestamp', '?'))}] {_clean(kind)}"
    if kind == "code_execution":
        mark = "✓" if told.get("success") else "✗"
        yield f"  {mark} Code: {_preview(told.get('code', ''), 100)}"
        cost = [f"{told[name]:.0f} {unit}" for name, unit in (("duration_ms", "ms"), ("cpu_ms", "ms CPU")) if told.get(name)]
        cost += [f"{told['peak_bytes'] >> 20} MB peak"] if told.get("peak_bytes") else []
        cost += [f"exit code {told['exit_code']}"] if told.get("exit_code") is not None else []
        if cost:
            yield f"  Took: {', '.join(cost)}"
        for label, name in (("Output", "stdout"), ("Result", "result"), ("Stderr", "stderr"), ("Error", "error")):
            if told.get(name):
                yield f"  {label}: {_preview(told[name], 200)}"
    elif kind == "artifacts_created":
        yield from _created(told.get("artifacts") or [])
    else:
        for label, name in (("Container", "container_id"), ("Dataset", "dataset"), ("Cause", "cause"), ("Message", "message"), ("Error", "error")):
            if told.get(name):
                yield f"  {label}: {_clean(told[name])}"


def _created(artifacts: list[dict[str, Any]]) -> Iterator[str]:
    for each in artifacts[:3]:
        yield f"  - {_clean(each.get('filename'))} ({_clean(each.get('content_type'))}, {each.get('size_bytes')} bytes)"
    if len(artifacts) > 3:
        yield f"  ... and {len(artifacts) - 3} more"


def _state(told: dict[str, Any] | None) -> Iterator[str]:
    yield "\n=== PYTHON STATE ==="
    if told is None:
        yield "No Python state found"
        return
    yield f"Captured: {_clean(told.get('timestamp'))}"
    yield "Variables:"
    for name, variable in sorted((told.get("variables") or {}).items()):
        yield f"  {_clean(name)}: {_clean(variable.get('type'))} = {_preview(str(variable.get('value')), 200)}"
    modules = sorted(map(_clean, told.get("imported_modules") or []))
    yield f"Modules: {', '.join(modules[:20])}" + (f" ... and {len(modules) - 20} more" if len(modules) > 20 else "")


def _artifacts(directory: Path) -> Iterator[str]:
    """What is in the directory itself, and what the log says that the server keeps."""
    yield "\n=== ARTIFACTS ==="
    found = False
    root = directory / "artifacts"
    for path in sorted(root.rglob("*")) if root.is_dir() else []:
        if path.is_file() and not path.is_symlink():
            found = True
            yield f"{_clean(path.relative_to(root))} ({path.stat().st_size} bytes)"
    for each in _kept(directory / "session.log"):
        found = True
        yield f"{_clean(each.get('filename'))} ({each.get('size_bytes')} bytes, {_clean(each.get('id') or each.get('error'))})"
    if not found:
        yield "No artifacts found"


def _kept(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(errors="replace").split("\n") if path.is_file() else []:
        try:
            told = json.loads(line)
            yield from told.get("artifacts") or [] if told.get("event") == "artifacts_created" else []
        except (ValueError, AttributeError):
            continue


def _preview(text: str, most: int) -> str:
    """The beginning of a text."""
    clean = "\n    ".join(map(_clean, text.strip().split("\n")))
    return clean if len(clean) <= most else clean[:most] + "..."


def _clean(told: object) -> str:
    """One line of a text. What a sandbox chose, names of files included, says nothing to a terminal."""
    return "".join(c if c.isprintable() else "�" for c in str(told))


if __name__ == "__main__":
    sys.exit(main())
