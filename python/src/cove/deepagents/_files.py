"""What a deepagents backend does, as work that threads and event loops can do: each operation returns what deepagents wants to hear."""

from __future__ import annotations

import base64
import codecs
import dataclasses
import io
import posixpath
import secrets
import signal
from collections.abc import Callable
from typing import Any

from deepagents.backends import protocol, sandbox as upstream, utils
from deepagents.backends.protocol import (
    EditResult, ExecuteResponse, FileData, FileDownloadResponse, FileUploadResponse, GlobResult, LsResult, ReadResult, WriteResult,
)

from .. import _calls as calls, _wire as wire
from .._drive import Work
from ..errors import Conflict, CoveError, Denied, Exhausted, Gone, Invalid, NotFound

# deepagents 0.7 tells where a page of a file lies, overwrites on write, and can delete; 0.6 does not.
PAGES = "next_offset" in {f.name for f in dataclasses.fields(ReadResult)}
OVERWRITES = PAGES
_matcher = getattr(utils, "compile_grep_include_glob", None)

MAX_BINARY_BYTES = 500 * 1024
MAX_TEXT_BYTES = 500 * 1024
MAX_EDIT_BYTES = 32 << 20
MAX_DOWNLOAD_BYTES = 256 << 20
MAX_GLOB_MATCHES = 10_000
# The kernel takes at most 128 KiB in one argument.
MAX_ARGUMENT = 120 * 1024
_CHUNK = 1 << 20
_DEEPEST = 64
_EMPTY = "System reminder: File exists but has empty contents"
# Where deepagents itself keeps what is too large for a conversation: at the top, unless it is told another root.
_OWN = {"large_tool_results", "conversation_history"}
_CUT = getattr(upstream, "TRUNCATION_MSG", "\n\n[The page was cut at its size limit. Go on with a larger offset or a smaller limit.]")


# --- commands


def execute(id: str, command: str, timeout: float, env: dict[str, str] | None = None) -> Work[ExecuteResponse]:
    """Run a shell command; what it writes to stdout and stderr comes in the order it was written."""
    # One pipe for both: two would be read in an order of their own.
    line: str | list[str] = "exec 2>&1\n" + command
    try:
        if len(command.encode()) > MAX_ARGUMENT:
            script = f"/tmp/.cove-{secrets.token_hex(8)}.sh"
            yield calls.write(id, script, f"rm -f {script}\n{line}".encode(), 0o700, False, None)
            line = ["/bin/sh", script]
        out: wire.Output = yield calls.exec(id, line, timeout or None, env=env)
    except Invalid as err:
        return ExecuteResponse(output=err.message, exit_code=2)
    return _response(out, timeout)


def _response(out: wire.Output, timeout: float) -> ExecuteResponse:
    told = out.stdout
    if out.outcome == "timeout":
        told, code = _add(told, f"Command timed out after {timeout:g} seconds"), 124
    elif out.signal:
        told, code = _add(told, out.message), 128 + _number(out.signal)
    else:
        code = out.exit_code
        if out.outcome == "oom":
            told = _add(told, out.message)
    return ExecuteResponse(output=told, exit_code=code, truncated=out.truncated)


def _add(text: str, sentence: str) -> str:
    return f"{text}\n{sentence}" if text and not text.endswith("\n") else text + sentence


def _number(name: str) -> int:
    return int(signal.Signals[name]) if name in signal.Signals.__members__ else 0


# --- failures


def missing(err: CoveError) -> bool:
    """Whether it is the file that is not there, and not the sandbox."""
    return isinstance(err, NotFound) and err.message.endswith("no such file or directory")


def error_code(err: CoveError) -> str:
    """One of the four codes of deepagents, or a sentence; what no file is to blame for is raised."""
    if missing(err):
        return "file_not_found"
    if isinstance(err, Denied):
        return "permission_denied"
    if isinstance(err, Invalid):
        return "is_directory" if err.message.endswith("is a directory") else "invalid_path"
    if isinstance(err, Exhausted | Conflict):
        return err.message
    raise err


def _listing_error(err: CoveError) -> str:
    code = error_code(err)
    return {"file_not_found": "path_not_found", "invalid_path": "not_a_directory"}.get(code, code)


def _reading_error(err: CoveError) -> str:
    code = error_code(err)
    return "not_a_file" if code in ("is_directory", "invalid_path") else code


def bad_path(path: str) -> bool:
    return not path.startswith("/") or "\0" in path


# --- files


def upload(id: str, path: str, content: bytes, user: str | None = None) -> Work[FileUploadResponse]:
    if bad_path(path):
        return FileUploadResponse(path=path, error="invalid_path")
    try:
        try:
            yield calls.write(id, path, content, None, False, user)
        except Denied:
            if not _OWN.intersection(path.split("/")):
                raise
            yield from offer(id, posixpath.dirname(path))
            yield calls.write(id, path, content, None, False, user)
    except CoveError as err:
        return FileUploadResponse(path=path, error=error_code(err))
    return FileUploadResponse(path=path)


def offer(id: str, directory: str) -> Work[None]:
    """Make a directory that everybody may write to, where there is none: the user may not make one at the top."""
    try:
        yield calls.stat(id, directory, None)
    except CoveError as err:
        if not missing(err):
            raise
        yield calls.change(id, "mkdir", {"path": directory, "parents": True, "user": "root"})
        yield calls.change(id, "chmod", {"path": directory, "mode": 0o1777, "user": "root"})


def download(id: str, path: str, limit: int) -> Work[FileDownloadResponse]:
    """A whole file, unless it has more bytes than limit."""
    if bad_path(path):
        return FileDownloadResponse(path=path, error="invalid_path")
    try:
        content = yield from _whole(id, path, limit)
    except CoveError as err:
        return FileDownloadResponse(path=path, error=error_code(err))
    return FileDownloadResponse(path=path, content=content)


def _whole(id: str, path: str, limit: int) -> Work[bytes]:
    content: bytes = yield calls.read(id, path, 0, min(_CHUNK, limit + 1), None)
    if _CHUNK <= len(content) <= limit:
        # What the file is said to have saves a transfer in vain; what comes is what counts.
        entry: wire.Entry = yield calls.stat(id, path, None)
        if entry.size > limit:
            raise _too_large(path, limit)
        content = yield calls.read(id, path, 0, limit + 1, None)
    if len(content) > limit:
        raise _too_large(path, limit)
    return content


def _too_large(path: str, limit: int) -> Exhausted:
    return Exhausted(f"{path} has more than {limit} bytes: fetch a part of it, or let the backend have a larger max_download_bytes")


def ls(id: str, path: str) -> Work[LsResult]:
    try:
        entries: list[wire.Entry] = yield calls.ls(id, path, 1, None)
    except CoveError as err:
        return LsResult(error=f"Path '{path}': {_listing_error(err)}")
    return LsResult(entries=[_info(posixpath.join(path, e.name), e) for e in entries])


def _info(path: str, e: wire.Entry) -> protocol.FileInfo:
    info: protocol.FileInfo = {"path": path, "is_dir": e.type == "dir"}
    if e.type == "file":
        info["size"] = e.size
    if e.mod_time is not None:
        info["modified_at"] = e.mod_time.isoformat()
    return info


def write(id: str, path: str, content: str) -> Work[WriteResult]:
    if not OVERWRITES:
        try:
            yield calls.stat(id, path, None)
            return WriteResult(error=f"Error: File already exists: {path!r}")
        except CoveError as err:
            if not missing(err):
                return WriteResult(error=f"Failed to write file '{path}': {error_code(err)}")
    done = yield from upload(id, path, content.encode())
    if done.error:
        return WriteResult(error=f"Failed to write file '{path}': {done.error}")
    return WriteResult(path=path)


def edit(id: str, path: str, old: str, new: str, replace_all: bool) -> Work[EditResult | None]:
    """Replace text in a file; None when the file is too large to come here."""
    try:
        raw: bytes = yield calls.read(id, path, 0, MAX_EDIT_BYTES + 1, None)
        if len(raw) > MAX_EDIT_BYTES:
            return None
        text = raw.decode()
        found, put, count = _occurrences(text, old, new)
        if count == 0:
            return EditResult(error=f"Error: String not found in file: '{old}'")
        if count > 1 and not replace_all:
            return EditResult(error=f"Error: String '{old}' appears multiple times. Use replace_all=True to replace all occurrences.")
        yield calls.write(id, path, text.replace(found, put).encode(), None, False, None)
    except UnicodeDecodeError:
        return EditResult(error=f"Error: File '{path}' is not a text file")
    except CoveError as err:
        return EditResult(error=_edit_error(err, path))
    return EditResult(path=path, occurrences=count)


def _occurrences(text: str, old: str, new: str) -> tuple[str, str, int]:
    """What to replace by what, and how often it is there: as given, or with the line ends that the file has."""
    plain_old, plain_new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    dos = (plain_old.replace("\n", "\r\n"), plain_new.replace("\n", "\r\n"))
    for found, put in ((old, new), dos, (plain_old, plain_new)):
        if count := text.count(found):
            return found, put, count
    return old, new, 0


def _edit_error(err: CoveError, path: str) -> str:
    code = _reading_error(err)
    known = {
        "file_not_found": f"Error: File '{path}' not found",
        "permission_denied": f"Error: Permission denied editing file '{path}'",
        "not_a_file": f"Error: '{path}' is not a regular file",
    }
    return known.get(code, f"Error editing file '{path}': {code}")


def delete(id: str, path: str) -> Work[Any]:
    result: Any = getattr(protocol, "DeleteResult")
    try:
        yield calls.remove(id, path, True, None)
    except CoveError as err:
        if missing(err):
            return result(error=f"Error: '{path}' not found")
        return result(error=f"Error deleting file '{path}': {error_code(err)}")
    return result(path=path)


# --- pages of a file


def read(id: str, path: str, offset: int, limit: int) -> Work[ReadResult]:
    """A page of a text file, or a small binary one; only what the page needs is fetched, a megabyte at a time."""
    offset, limit = max(0, int(offset)), max(0, int(limit))
    try:
        first: bytes = yield calls.read(id, path, 0, _CHUNK, None)
        if not first:
            return ReadResult(file_data=FileData(content=_EMPTY, encoding="utf-8"))
        if not _is_text(path, first):
            return _binary(path, first)
        if limit == 0 and PAGES:
            return _result(content="", no_lines_requested=True)
        page = _Page(offset, limit)
        at = page.feed(first)
        while page.hungry:
            at += page.feed((yield calls.read(id, path, at, _CHUNK, None)))
    except CoveError as err:
        return ReadResult(error=f"File '{path}': {_reading_error(err)}")
    return page.result(path)


def _is_text(path: str, start: bytes) -> bool:
    kind = getattr(utils, "_get_backend_read_file_type", None) or getattr(utils, "_get_file_type", None)
    if kind is not None and kind(path) != "text":
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start[:8192])
    except UnicodeDecodeError:
        return False
    return True


def _binary(path: str, raw: bytes) -> ReadResult:
    if len(raw) > MAX_BINARY_BYTES:
        return ReadResult(error=f"File '{path}': Binary file exceeds maximum preview size of {MAX_BINARY_BYTES} bytes")
    return ReadResult(file_data=FileData(content=base64.b64encode(raw).decode(), encoding="base64"))


def _result(content: str, **pages: Any) -> ReadResult:
    return ReadResult(file_data=FileData(content=content, encoding="utf-8"), **(pages if PAGES else {}))


class _Page:
    """Finds the lines offset to offset+limit in a stream of bytes, and holds no more than a page can show."""

    def __init__(self, offset: int, limit: int) -> None:
        self.offset, self.limit = offset, limit
        self.hungry = True
        self._text = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
        self._lines = 0  # that have ended
        self._open = False  # a line has begun and not ended
        self._ended = False  # there is no more
        self._cut = False
        self._parts: list[str] = []
        self._room = MAX_TEXT_BYTES - len(_CUT.encode())

    def feed(self, chunk: bytes) -> int:
        """Take a piece; a short one is the last."""
        self._ended = len(chunk) < _CHUNK
        text = self._text.decode(chunk, final=self._ended)
        at = self._skip(text)
        while at < len(text) and not self._cut and self._lines < self.offset + self.limit:
            end = text.find("\n", at) + 1 or len(text)
            self._take(text[at:end])
            at = end
        if at < len(text) and not self._cut:
            self._lines, self._open = self._lines + text.count("\n", at), not text.endswith("\n")
        if self._ended and self._open:
            self._lines, self._open = self._lines + 1, False
        # A page that is full at the very end of a piece asks for one more: is there more?
        full = self._lines >= self.offset + self.limit and (self._lines > self.offset + self.limit or self._open)
        self.hungry = not (self._ended or self._cut or full)
        return len(chunk)

    def _skip(self, text: str) -> int:
        """Pass over lines before the page; where it begins."""
        ahead, there = self.offset - self._lines, text.count("\n")
        if ahead <= 0 or not text:
            return 0
        if there < ahead:
            self._lines, self._open = self._lines + there, not text.endswith("\n")
            return len(text)
        at = 0
        for _ in range(ahead):
            at = text.find("\n", at) + 1
        self._lines, self._open = self.offset, False
        return at

    def _take(self, piece: str) -> None:
        data = piece.encode()
        # The line end of a page's last line is not shown and needs no room.
        if len(data) - piece.endswith("\n") > self._room:
            self._parts.append(data[:self._room].decode("utf-8", "ignore"))
            self._cut = True
            return
        self._parts.append(piece)
        self._room -= len(data)
        self._lines, self._open = (self._lines + 1, False) if piece.endswith("\n") else (self._lines, True)

    def result(self, path: str) -> ReadResult:
        shown = min(self._lines, self.offset + self.limit) - self.offset
        if shown <= 0 and not self._cut:
            return ReadResult(error=f"File '{path}': Line offset {self.offset} exceeds file length ({self._lines} lines)")
        content = "".join(self._parts).removesuffix("\n")
        if self._cut:
            content += _CUT
        # A first line that is larger than a page is cut for good: the next page goes on after it.
        end = self.offset + max(1, shown)
        total = self._lines if self._ended and not self._cut else None
        more = total is None or end < total
        return _result(content, total_lines=total, start_line=self.offset + 1, end_line=end, next_offset=end if more else None)


# --- glob


def glob(id: str, pattern: str, path: str | None) -> Work[GlobResult | None]:
    """Files by a pattern, from one listing; None where a listing cannot tell exactly."""
    root = path or "/"
    root = root if root.startswith("/") else f"/{root}"
    if _matcher is None or posixpath.normpath(root) == "/":
        return None
    try:
        matches = _matcher(pattern)
    except ValueError as err:
        return GlobResult(error=str(err))
    try:
        entries: list[wire.Entry] = yield calls.ls(id, root, _DEEPEST, None)
    except Exhausted:
        return None
    except CoveError as err:
        return GlobResult(error=f"Path '{root}': {_listing_error(err)}")
    return _globbed(entries, root, matches)


def _globbed(entries: list[wire.Entry], root: str, matches: Callable[[str], bool]) -> GlobResult | None:
    top = posixpath.normpath(root) + "/"
    found: list[protocol.FileInfo] = []
    for e in entries:
        rel = e.path.removeprefix(top)
        if e.type == "dir" and rel.count("/") == _DEEPEST - 1 or e.type == "symlink" and matches(rel):
            return None  # what is below, or where the link leads, is for the sandbox to say
        if e.type == "file" and matches(rel):
            found.append(_info(f"{root.rstrip('/')}/{rel}", e))
    found.sort(key=lambda info: info["path"])
    if len(found) > MAX_GLOB_MATCHES:
        more: dict[str, Any] = {"truncated": True}
        if "truncation_reason" in {f.name for f in dataclasses.fields(GlobResult)}:
            more["truncation_reason"] = "budget"
        return GlobResult(matches=found[:MAX_GLOB_MATCHES], **more)
    return GlobResult(matches=found)


def living(info: wire.SandboxInfo) -> None:
    """Raise Gone for a sandbox that has ended, and say why."""
    if info.state in ("ended", "stopping"):
        raise Gone(f"sandbox {info.id} has ended ({info.cause or info.state}); create a new one")
