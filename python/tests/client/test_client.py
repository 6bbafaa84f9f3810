"""The client, sync and async, against a server."""

from __future__ import annotations

import asyncio
import io
import pickle
import socket
import threading
import uuid
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

import cove
from cove import AsyncCove, Cove, Exhausted, Gone, Invalid, NotFound, Sandbox, Unauthorized, Unavailable
from cove import _calls as calls
from cove.aio import save
from cove.client import Landing


@pytest.fixture(scope="module")
def sandbox(server: Cove) -> Iterator[Sandbox]:
    with server.create() as sandbox:
        yield sandbox


def test_a_cell_tells_output_value_and_error(sandbox: Sandbox) -> None:
    ok = sandbox.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    assert (ok.stdout, ok.stderr, ok.text, ok.ok, ok.error) == ("out\n", "err\n", "42", True, None)
    bad = sandbox.run("1/0")
    assert (bad.outcome, bad.error and bad.error.name) == ("error", "ZeroDivisionError")
    assert bad.error and "ZeroDivisionError" in bad.error.text


def test_a_streamed_run_tells_the_same_as_a_collected_one(sandbox: Sandbox) -> None:
    code = "import sys\nfor i in range(3): print(i)\nsys.stdout.buffer.write(b'\\xff')\nsys.stdout.flush()\n'last'"
    told: list[str] = []
    streamed = sandbox.run(code, on_event=lambda e: told.append(e.type))
    collected = sandbox.run(code)
    assert (streamed.stdout, streamed.stdout_bytes, streamed.text, streamed.outcome) == (
        collected.stdout, collected.stdout_bytes, collected.text, collected.outcome)
    assert streamed.stdout_bytes == b"0\n1\n2\n\xff"
    assert (told[0], told[-1]) == ("started", "end")


def test_what_unicode_takes_for_the_end_of_a_line_stays_text(sandbox: Sandbox) -> None:
    text = "a\x85b\u2028c\u2029d\x1ce\rf\r\ng"
    out = sandbox.run(f"print({text!r}, end='')", on_event=lambda e: None)
    assert out.stdout == text and sandbox.run(f"print({text!r}, end='')").stdout == text


def test_output_comes_while_the_code_runs(sandbox: Sandbox) -> None:
    seen = threading.Event()

    def on_event(e: cove.Event) -> None:
        if e.type == "stdout":
            sandbox.write("/tmp/go", b"")
            seen.set()

    out = sandbox.run("import os, time\nprint('first', flush=True)\nwhile not os.path.exists('/tmp/go'): time.sleep(.01)\n'done'",
                      timeout=120, on_event=on_event)
    assert seen.is_set() and out.text == "'done'"


def test_a_command_has_exit_code_stdin_environment_and_limits(sandbox: Sandbox) -> None:
    out = sandbox.exec("cat; echo $NAME; exit 3", stdin="in ", env={"NAME": "n"}, cwd="/tmp")
    assert (out.stdout, out.exit_code, out.outcome) == ("in n\n", 3, "error")
    assert sandbox.exec(["printf", "%s", "a b"]).stdout == "a b"
    assert sandbox.exec("ulimit -n", limits=cove.RunLimits(open_files=40)).stdout == "40\n"
    assert sandbox.exec("sleep 3600", timeout=0.2).outcome == "timeout"


def test_files_of_every_kind_of_content(sandbox: Sandbox) -> None:
    root = f"/tmp/{uuid.uuid4().hex}"
    big = b"0123456789abcdef" * (3 << 16)
    sandbox.write(f"{root}/bytes", b"\x00\xff")
    sandbox.write(f"{root}/text", "žluť", mode=0o600)
    sandbox.write(f"{root}/file", io.BytesIO(big))
    sandbox.write(f"{root}/pieces", (b"x" for _ in range(3)))
    sandbox.write(f"{root}/pieces", b"y", append=True)
    assert sandbox.read(f"{root}/bytes") == b"\x00\xff"
    assert sandbox.read(f"{root}/text").decode() == "žluť" and sandbox.stat(f"{root}/text").mode == 0o600
    assert b"".join(sandbox.read_stream(f"{root}/file")) == big
    assert sandbox.read(f"{root}/file", offset=10, length=4) == b"abcd"
    assert sandbox.read(f"{root}/pieces") == b"xxxy"
    sandbox.move(f"{root}/pieces", f"{root}/moved")
    sandbox.mkdir(f"{root}/a/b")
    sandbox.chmod(f"{root}/moved", 0o640)
    assert sorted(e.name for e in sandbox.ls(root)) == ["a", "bytes", "file", "moved", "text"]
    assert "b" in [e.name for e in sandbox.ls(root, depth=2)]
    sandbox.remove(root, recursive=True)
    with pytest.raises(NotFound):
        sandbox.stat(root)


def test_failures_have_the_kind_that_the_server_tells(server: Cove, sandbox: Sandbox) -> None:
    with pytest.raises(NotFound) as missing:
        sandbox.read("/nowhere")
    assert (missing.value.kind, missing.value.status) == ("not_found", 404)
    again = pickle.loads(pickle.dumps(missing.value))
    assert (type(again), again.kind, again.message) == (NotFound, "not_found", missing.value.message)
    with pytest.raises(Invalid):
        sandbox.exec([])
    with pytest.raises(Unauthorized):
        next(Cove(server.url, "wrong").sandboxes(), None)
    ended = server.create()
    ended.kill()
    ended.kill()
    with pytest.raises(Gone):
        ended.run("1")


def test_S4_123_a_server_that_is_not_there_is_told() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
    with pytest.raises(Unavailable, match="cove serve"):
        Cove(url, "k").create()
    with pytest.raises(Invalid, match="http://HOST:PORT"):
        Cove("127.0.0.1:1", "k").create()
    with pytest.raises(Unavailable, match="cove serve"):
        asyncio.run(AsyncCove(url, "k").create())


def test_no_url_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COVE_URL")
    with pytest.raises(Invalid, match="COVE_URL"):
        Cove()


def test_sandboxes_are_found_by_id_key_and_metadata(server: Cove) -> None:
    mark = uuid.uuid4().hex
    with server.create(key=f"k-{mark}", metadata={"mark": mark}) as one:
        assert server.create(key=f"k-{mark}").id == one.id
        assert server.get(one.id).info.metadata == {"mark": mark}
        assert [s.id for s in server.sandboxes(state="running", metadata={"mark": mark})] == [one.id]
        assert one.usage().pids > 0
    assert one.refresh().state == "ended"


def test_a_fork_has_the_memory_and_a_paused_sandbox_goes_on(server: Cove) -> None:
    with server.create() as sandbox:
        sandbox.run("x = 41")
        copies = sandbox.fork(2)
        assert [c.run("x + 1").text for c in copies] == ["42", "42"]
        for copy in copies:
            copy.kill()
        sandbox.pause()
        assert sandbox.info.state == "paused"
        sandbox.resume()
        assert sandbox.run("x").text == "41"


def test_a_snippet_runs_in_a_fresh_process(server: Cove) -> None:
    result = server.snippet("import sys, os\nprint('hi')\nsys.exit(3)")
    assert (result.stdout, result.exit_code, result.timed_out) == ("hi\n", 3, False)
    assert server.snippet("while True: pass", timeout=0.5).timed_out


async def test_the_async_client_does_the_same() -> None:
    async with AsyncCove() as client:
        async with await client.create() as sandbox:
            told: list[str] = []

            async def on_event(e: cove.Event) -> None:
                told.append(e.type)

            out = await sandbox.run("print(1)\n2", on_event=on_event)
            assert (out.stdout, out.text, told[-1]) == ("1\n", "2", "end")

            async def pieces():  # type: ignore[no-untyped-def]
                yield b"a"
                yield b"b"

            await sandbox.write("/tmp/pieces", pieces())
            await sandbox.write("/tmp/file", io.BytesIO(b"c"))
            assert await sandbox.read("/tmp/pieces") == b"ab"
            assert [c async for c in sandbox.read_stream("/tmp/file")] == [b"c"]
            outs = await asyncio.gather(*(sandbox.exec(f"echo {i}") for i in range(5)))
            assert [o.stdout for o in outs] == [f"{i}\n" for i in range(5)]
            assert sandbox.id in [s.id async for s in client.sandboxes(state="running")]


def test_an_async_client_lives_through_event_loops(server: Cove) -> None:
    client = AsyncCove()
    with server.create() as sandbox:
        for _ in range(2):
            assert asyncio.run(_text(client, sandbox.id)) == "2"


async def _text(client: AsyncCove, id: str) -> str:
    return (await (await client.get(id)).run("1 + 1")).text


async def test_leaving_an_async_run_ends_it() -> None:
    async with AsyncCove() as client, await client.create() as sandbox:
        begun = asyncio.Event()
        code = "import time\ntry:\n  print('begun', flush=True)\n  time.sleep(3600)\nfinally:\n  gone = 1"
        running = asyncio.create_task(sandbox.run(code, on_event=lambda e: begun.set() if e.type == "stdout" else None))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await sandbox.run("gone", timeout=120)).text == "1"


def test_a_line_that_tells_a_fault_is_raised() -> None:
    with pytest.raises(Gone, match="it was removed"):
        calls.lines(b'{"seq": 1, "event": "session_started"}\n{"fault": {"kind": "gone", "message": "it was removed"}}\n')


def test_a_file_of_somebody_else_is_whole_bounded_and_replaces_nothing_by_its_own_name(tmp_path: Path) -> None:
    Landing.at(tmp_path, "../../.env", 3).save([b"ab", b"c"])
    assert [p.name for p in tmp_path.iterdir()] == ["env"] and (tmp_path / "env").read_bytes() == b"abc"
    with pytest.raises(FileExistsError):
        Landing.at(tmp_path, "env", 3).save([b"new"])
    Landing.at(tmp_path / "env", "x", 3).save([b"new"])  # the caller's own word
    with pytest.raises(Exhausted, match="more than the 3 bytes"):
        Landing.at(tmp_path, "more", 3).save([b"ab", b"cd"])
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("env", b"new")]
    assert [Landing.at(tmp_path, name, 1).target.name for name in ("..", ".", "/", "a/.b")] == ["artifact", "artifact", "artifact", "b"]


async def test_a_download_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    waits, closed = asyncio.Event(), asyncio.Event()

    async def chunks() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            waits.set()
            await asyncio.sleep(60)
        finally:
            closed.set()

    saving = asyncio.create_task(save(Landing(tmp_path / "f", 100), chunks()))
    await waits.wait()
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert closed.is_set() and list(tmp_path.iterdir()) == []


def test_the_current_span_travels_with_a_run(sandbox: Sandbox) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    with TracerProvider().get_tracer("test").start_as_current_span("outer") as span:
        seen = sandbox.exec("echo $TRACEPARENT").stdout
    assert f"{span.get_span_context().trace_id:032x}" in seen
