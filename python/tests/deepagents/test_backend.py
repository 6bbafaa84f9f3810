"""CoveSandbox beyond what LangChain's suite asks for: time limits, failures, lifetimes, and files as they are."""

from __future__ import annotations

import asyncio
import inspect
import io
import time
import zipfile

import pytest
from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse, SandboxBackendProtocol
from deepagents.backends.sandbox import BaseSandbox

import cove as package
from cove import Cove
from cove.deepagents import CoveSandbox, _files as ops
from cove.deepagents._files import OVERWRITES, PAGES


def wheel(name: str, source: str) -> bytes:
    """A package that pip installs without an index."""
    info, made = f"{name}-1.dist-info", io.BytesIO()
    with zipfile.ZipFile(made, "w") as z:
        z.writestr(f"{name}/__init__.py", source)
        z.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    return made.getvalue()


def test_S1_1_S1_6_the_adapter_is_a_sandbox_backend_of_deepagents(shared: CoveSandbox) -> None:
    assert isinstance(shared, BaseSandbox) and isinstance(shared, SandboxBackendProtocol)


def test_S1_2_S1_3_S1_34_it_wraps_a_sandbox_that_exists(cove: Cove) -> None:
    raw = cove.create()
    backend = CoveSandbox(sandbox=raw)
    assert (backend.id, backend.sandbox.id, backend.sandbox.is_active) == (raw.id, raw.id, True)
    backend.sandbox.terminate()
    assert not backend.sandbox.is_active


def test_S1_13_S1_14_it_lives_until_it_is_terminated_and_then_says_so(cove: Cove) -> None:
    backend = CoveSandbox.create(cove=cove)
    assert backend.execute("echo alive").output == "alive\n"
    backend.sandbox.terminate()
    backend.sandbox.terminate()
    for use in (lambda: backend.execute("true"), lambda: backend.ls("/"), lambda: backend.upload_files([("/tmp/a", b"")]),
                lambda: backend.download_files(["/etc/passwd"]), lambda: backend.read("/etc/passwd")):
        with pytest.raises(package.Gone, match="ended"):
            use()
    with pytest.raises(package.Gone):
        asyncio.run(backend.aexecute("true"))
    with pytest.raises(package.Gone, match="ended"):
        CoveSandbox.from_id(backend.id, cove=cove)


def test_from_id_attaches_to_a_living_sandbox(shared: CoveSandbox, cove: Cove) -> None:
    shared.upload_files([("/tmp/attach.txt", b"same place")])
    assert CoveSandbox.from_id(shared.id, cove=cove).execute("cat /tmp/attach.txt").output == "same place"
    with pytest.raises(package.NotFound):
        CoveSandbox.from_id("sb-there-is-none", cove=cove)


def test_S1_11_what_a_command_leaves_is_there_for_the_next(own: CoveSandbox) -> None:
    own.execute("nohup sleep 300 >/dev/null 2>&1 & echo $! >/tmp/pid; echo KEPT=yes >/tmp/env")
    assert own.execute("kill -0 $(cat /tmp/pid) && . /tmp/env && echo $KEPT").output == "yes\n"
    own.upload_files([("/tmp/greet-1-py3-none-any.whl", wheel("greet", "hi = 5\n"))])
    installed = own.execute("python3 -m pip install --no-index /tmp/greet-1-py3-none-any.whl")
    assert installed.exit_code == 0, installed.output
    assert own.execute("python3 -c 'import greet; print(greet.hi)'").output == "5\n"


def test_a_background_process_does_not_hold_the_command_that_started_it(shared: CoveSandbox) -> None:
    began = time.monotonic()
    done = shared.execute("sleep 300 & echo started", timeout=200)
    assert (done.exit_code, done.output) == (0, "started\n")
    assert time.monotonic() - began < 100


def test_S1_12_every_command_has_a_shell_of_its_own(shared: CoveSandbox) -> None:
    home = shared.execute("pwd").output
    shared.execute("cd /tmp; export GONE=1; alias gone=true")
    assert shared.execute('pwd; echo "[$GONE]"').output == home + "[]\n"


def test_S1_15_S1_17_S1_20_S1_22_files_come_back_as_they_went(shared: CoveSandbox) -> None:
    everything = bytes(range(256)) * 4
    large = bytes(range(256)) * (10 << 12)
    up = shared.upload_files([("/tmp/a/deep/er/way/bytes.bin", everything), ("/tmp/large.bin", large), ("/tmp/empty", b"")])
    assert up == [FileUploadResponse("/tmp/a/deep/er/way/bytes.bin"), FileUploadResponse("/tmp/large.bin"), FileUploadResponse("/tmp/empty")]
    down = shared.download_files(["/tmp/large.bin", "/tmp/a/deep/er/way/bytes.bin", "/tmp/empty"])
    assert down == [FileDownloadResponse("/tmp/large.bin", large), FileDownloadResponse("/tmp/a/deep/er/way/bytes.bin", everything),
                    FileDownloadResponse("/tmp/empty", b"")]


def test_a_file_that_is_too_large_never_comes_here(shared: CoveSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code in the sandbox makes files of any size for nothing; what it costs is the caller's memory."""
    asked, read = [], ops.calls.read
    monkeypatch.setattr(ops.calls, "read", lambda id, path, offset, length, user: asked.append(length) or read(id, path, offset, length, user))
    small = CoveSandbox(shared.sandbox, max_download_bytes=2 << 20)
    shared.execute("truncate -s 3G /tmp/sparse; head -c 2097152 /dev/zero >/tmp/fits; head -c 2097153 /dev/zero >/tmp/over")
    refused, fits, over, endless = small.download_files(["/tmp/sparse", "/tmp/fits", "/tmp/over", "/proc/kmsg"])
    assert (fits.error, len(fits.content or b"")) == (None, 2 << 20)
    for done in (refused, over):
        assert done.content is None and done.error == (
            f"{done.path} has more than 2097152 bytes: fetch a part of it, or let the backend have a larger max_download_bytes")
    assert endless.content is None and endless.error
    assert max(asked) <= (2 << 20) + 1 and len(asked) == 5  # a look at each, and one of them whole
    assert asyncio.run(small.adownload_files(["/tmp/over"])) == [over]
    none = CoveSandbox(shared.sandbox, max_download_bytes=0)
    shared.execute("rm /tmp/sparse; : >/tmp/empty")
    assert [(d.content, bool(d.error)) for d in none.download_files(["/tmp/empty", "/tmp/fits"])] == [(b"", False), (None, True)]
    with pytest.raises(ValueError, match="negative"):
        CoveSandbox(shared.sandbox, max_download_bytes=-1)


def test_S1_16_S1_18_relative_paths_are_refused(shared: CoveSandbox) -> None:
    names = ["loose.txt", "./loose.txt", "../loose.txt", "", "/nul\0.txt"]
    assert shared.upload_files([(n, b"x") for n in names]) == [FileUploadResponse(n, "invalid_path") for n in names]
    assert shared.download_files(names) == [FileDownloadResponse(n, None, "invalid_path") for n in names]
    assert shared.execute("find / -name 'loose.txt' 2>/dev/null").output == ""


def test_S1_19_S1_21_each_file_has_its_own_answer(shared: CoveSandbox) -> None:
    shared.execute("rm -rf /tmp/mixed; mkdir -p /tmp/mixed/dir; echo locked >/tmp/mixed/locked; chmod 000 /tmp/mixed/locked; "
                   "mkdir /tmp/mixed/shut; chmod 555 /tmp/mixed/shut; echo plain >/tmp/mixed/plain")
    paths = ["/tmp/mixed/plain", "/tmp/mixed/none", "/tmp/mixed/dir", "/tmp/mixed/locked", "relative", "/tmp/mixed/plain"]
    assert shared.download_files(paths) == [
        FileDownloadResponse("/tmp/mixed/plain", b"plain\n"), FileDownloadResponse("/tmp/mixed/none", None, "file_not_found"),
        FileDownloadResponse("/tmp/mixed/dir", None, "is_directory"), FileDownloadResponse("/tmp/mixed/locked", None, "permission_denied"),
        FileDownloadResponse("relative", None, "invalid_path"), FileDownloadResponse("/tmp/mixed/plain", b"plain\n"),
    ]
    assert shared.upload_files([("/tmp/mixed/shut/new", b""), ("/tmp/mixed/dir", b""), ("/tmp/mixed/fine", b"1"), ("/etc/passwd", b"")]) == [
        FileUploadResponse("/tmp/mixed/shut/new", "permission_denied"), FileUploadResponse("/tmp/mixed/dir", "is_directory"),
        FileUploadResponse("/tmp/mixed/fine"), FileUploadResponse("/etc/passwd", "permission_denied"),
    ]
    assert asyncio.run(shared.adownload_files(paths)) == shared.download_files(paths)


def test_S1_23_S1_24_S1_25_a_command_answers_with_all_it_wrote_in_order(shared: CoveSandbox) -> None:
    done = shared.execute("for i in 1 2 3; do echo out$i; echo err$i >&2; done; exit 7")
    assert done == ExecuteResponse(output="out1\nerr1\nout2\nerr2\nout3\nerr3\n", exit_code=7, truncated=False)
    assert shared.execute("true") == ExecuteResponse(output="", exit_code=0, truncated=False)
    assert shared.execute("no-such-program").exit_code == 127
    assert shared.execute("kill -9 $$").exit_code == 137
    assert shared.execute("if then").exit_code == 2
    assert shared.execute("cat; echo read the end").output == "read the end\n"


def test_output_beyond_four_megabytes_is_cut_and_says_so(shared: CoveSandbox) -> None:
    done = shared.execute("head -c 6000000 /dev/zero | tr '\\0' x")
    assert (done.truncated, done.exit_code, len(done.output)) == (True, 0, 4 << 20)


def test_a_command_larger_than_an_argument_runs(shared: CoveSandbox) -> None:
    done = shared.execute(f"# {'x' * 300_000}\necho $0 >/dev/null; echo large; echo err >&2; exit 3")
    assert (done.output, done.exit_code) == ("large\nerr\n", 3)
    assert shared.execute("ls /tmp/.cove-*.sh 2>/dev/null").output == ""


def test_S1_26_S1_27_S1_28_limits_have_an_order(cove: Cove) -> None:
    assert inspect.signature(CoveSandbox).parameters["timeout"].default == 300
    with CoveSandbox(cove.create(), timeout=1) as backend:
        assert backend.execute("sleep 3600").exit_code == 124
        assert backend.execute("sleep 2; echo done", timeout=100) == ExecuteResponse("done\n", 0, False)


def test_S1_29_S1_30_S1_31_S1_32_at_the_limit_all_of_it_ends(own: CoveSandbox) -> None:
    done = own.execute("echo begun; sh -c 'sleep 3601 & exec sleep 3602' & setsid sleep 3603 & sleep 3600", timeout=10)
    assert done == ExecuteResponse("begun\nCommand timed out after 10 seconds", 124, False)
    left = own.execute("ps -eo args | grep -c '[s]leep 360[0-3]' || true")
    assert left.output == "0\n"
    assert asyncio.run(own.aexecute("sleep 3600", timeout=1)) == ExecuteResponse("Command timed out after 1 seconds", 124, False)
    assert own.execute("echo usable") == ExecuteResponse("usable\n", 0, False)


def test_S1_33_zero_is_no_limit_and_less_is_an_error(cove: Cove, shared: CoveSandbox) -> None:
    with CoveSandbox(cove.create(), timeout=1) as backend:
        assert backend.execute("sleep 2; echo done", timeout=0).output == "done\n"
    with pytest.raises(ValueError, match="negative"):
        shared.execute("true", timeout=-1)
    with pytest.raises(ValueError, match="negative"):
        asyncio.run(shared.aexecute("true", timeout=-1))
    with pytest.raises(ValueError, match="negative"):
        CoveSandbox(shared.sandbox, timeout=-5)


async def test_S1_36_async_calls_run_side_by_side_and_never_block_the_loop(cove: Cove) -> None:
    backend = await CoveSandbox.acreate(cove=cove)
    try:
        async def let_go() -> None:
            """Runs in the loop while the five run: when all of them do, they are told to end."""
            while (await backend.aexecute("ls /tmp/meet | wc -l")).output != "5\n":
                await asyncio.sleep(0.05)
            await backend.aexecute("touch /tmp/go")

        await backend.aexecute("mkdir /tmp/meet")
        meet = "touch /tmp/meet/{0}; until [ -e /tmp/go ]; do sleep 0.05; done; echo {0}"
        *done, _ = await asyncio.gather(*(backend.aexecute(meet.format(i), timeout=120) for i in range(5)), let_go())
        assert [d.output for d in done] == [f"{i}\n" for i in range(5)]
        await backend.awrite("/tmp/async/a.txt", "one\ntwo\n")
        assert (await backend.aread("/tmp/async/a.txt")).file_data["content"] == "one\ntwo"
        assert (await backend.aedit("/tmp/async/a.txt", "two", "2")).occurrences == 1
        assert [e["path"] for e in (await backend.als("/tmp/async")).entries] == ["/tmp/async/a.txt"]
        assert (await backend.agrep("one", "/tmp/async")).matches[0]["line"] == 1
        assert len((await backend.aglob("*.txt", "/tmp/async")).matches) == 1
    finally:
        await backend.aclose()
        backend.sandbox.terminate()


async def test_leaving_an_async_command_ends_it(own: CoveSandbox) -> None:
    running = asyncio.create_task(own.aexecute("exec sleep 7100"))

    async def becomes(count: str) -> None:
        while (await own.aexecute("ps -eo args | grep -c '[s]leep 710[0]' || true")).output != count:
            await asyncio.sleep(0.05)

    await asyncio.wait_for(becomes("1\n"), 120)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(becomes("0\n"), 120)


def test_paging_through_a_file_shows_every_line_once(shared: CoveSandbox) -> None:
    lines = [f"line {i} é" for i in range(1000)]
    shared.write("/tmp/paged.txt", "\n".join(lines))
    pages = [shared.read("/tmp/paged.txt", offset=at, limit=300) for at in range(0, 1000, 300)]
    assert [line for p in pages for line in p.file_data["content"].split("\n")] == lines
    assert shared.read("/tmp/paged.txt", offset=1000).error == "File '/tmp/paged.txt': Line offset 1000 exceeds file length (1000 lines)"
    if PAGES:
        told = [(p.start_line, p.end_line, p.total_lines, p.next_offset) for p in pages]
        assert told == [(1, 300, 1000, 300), (301, 600, 1000, 600), (601, 900, 1000, 900), (901, 1000, 1000, None)]


def test_a_page_of_a_huge_file_is_fetched_without_the_rest(shared: CoveSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.execute("seq 1 600000 >/tmp/huge.txt; truncate -s 3G /tmp/sparse.bin; mv /tmp/sparse.bin /tmp/sparse.txt")
    asked, read = [], ops.calls.read
    monkeypatch.setattr(ops.calls, "read", lambda id, path, offset, length, user: asked.append(length) or read(id, path, offset, length, user))
    assert shared.read("/tmp/huge.txt", offset=500_000, limit=2).file_data["content"] == "500001\n500002"
    sparse = shared.read("/tmp/sparse.txt", limit=1)
    assert len(sparse.file_data["content"]) <= 500 * 1024
    assert asked == [1 << 20] * 5  # four of the first file, one of the second
    shared.execute("rm /tmp/huge.txt /tmp/sparse.txt")


def test_lines_of_any_kind_are_read_as_lines(shared: CoveSandbox) -> None:
    shared.upload_files([("/tmp/crlf.txt", b"one\r\ntwo\rthree\nfour"), ("/tmp/sep.txt", "a\u2028b\x0bc\nd".encode()),
                         ("/tmp/nl.txt", b"\n\n\n"), ("/tmp/bad.txt", b"a" * 9000 + b"\xff\n")])
    assert shared.read("/tmp/crlf.txt").file_data["content"] == "one\ntwo\nthree\nfour"
    assert shared.read("/tmp/sep.txt", limit=1).file_data["content"] == "a\u2028b\x0bc"
    assert shared.read("/tmp/nl.txt").file_data["content"] == "\n\n"
    assert shared.read("/tmp/bad.txt").file_data["content"] == "a" * 9000 + "\ufffd"


def test_a_file_is_read_the_same_in_the_client_and_in_the_sandbox(shared: CoveSandbox) -> None:
    texts = {"one": "a", "end": "a\nb\n", "blank": "\n\na\n\n", "wide": "é世界🎉\n" * 50_000, "long": "x" * 600_000 + "\nafter\n",
             "exact": ("y" * 1023 + "\n") * 1024, "over": ("z" * 1023 + "\n") * 1025, "mixed": "a\r\nb\rc\n\rd", "page": "w" * 99 + "\n"}
    for name, text in texts.items():
        shared.upload_files([(f"/tmp/same-{name}.txt", text.encode())])
        for offset, limit in ((0, 2000), (0, 1), (1, 1), (2, 5), (1023, 1), (1023, 2), (1024, 5), (49_999, 1), (60_000, 1)):
            native = shared.read(f"/tmp/same-{name}.txt", offset, limit)
            script = BaseSandbox.read(shared, f"/tmp/same-{name}.txt", offset, limit)
            if PAGES and None in (native.total_lines, script.total_lines):  # how far a file is counted is each one's own choice
                native.total_lines = script.total_lines = None
            assert native == script, (name, offset, limit)


def test_an_edit_keeps_line_ends_and_modes(shared: CoveSandbox) -> None:
    shared.upload_files([("/tmp/run.sh", b"#!/bin/sh\r\necho a\r\necho b\r\n")])
    shared.execute("chmod 750 /tmp/run.sh")
    assert shared.edit("/tmp/run.sh", "echo a\necho b", "echo c\necho d").occurrences == 1
    assert shared.download_files(["/tmp/run.sh"])[0].content == b"#!/bin/sh\r\necho c\r\necho d\r\n"
    assert shared.execute("stat -c %a /tmp/run.sh").output == "750\n"


def test_files_are_found_by_the_same_rules_in_the_client_and_in_the_sandbox(shared: CoveSandbox) -> None:
    shared.execute("rm -rf /tmp/g; mkdir -p /tmp/g/src/sub /tmp/g/.hid; cd /tmp/g; touch a.py src/b.py src/sub/c.py .hid/d.py .e.py src/f.txt")
    for pattern in ("*.py", "**/*.py", "/*.py", "src/*.py", ".*", "*.{py,txt}", "src/**", "[a-b].py", "none*", "src/?.py"):
        native, script = shared.glob(pattern, "/tmp/g"), BaseSandbox.glob(shared, pattern, "/tmp/g")
        assert sorted(m["path"] for m in native.matches) == sorted(m["path"] for m in script.matches), pattern
    shared.execute("ln -s /tmp/g/a.py /tmp/g/link.py; ln -s /etc/passwd /tmp/g/out.py")
    assert {m["path"] for m in shared.glob("*.py", "/tmp/g").matches} == {m["path"] for m in BaseSandbox.glob(shared, "*.py", "/tmp/g").matches}


@pytest.mark.skipif(not OVERWRITES, reason="deepagents 0.6 has no delete")
def test_delete_takes_directories_and_tells_what_is_missing(shared: CoveSandbox) -> None:
    shared.execute("mkdir -p /tmp/del/a/b; touch /tmp/del/a/b/c; ln -s /tmp/nowhere /tmp/dangling")
    assert (shared.delete("/tmp/del").error, shared.delete("/tmp/dangling").error) == (None, None)
    assert shared.delete("/tmp/del").error == "Error: '/tmp/del' not found"
    assert "permission_denied" in shared.delete("/etc/passwd").error

