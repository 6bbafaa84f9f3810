"""Every method of the asynchronous SDK once: commands, terminals, files, watches, git, code."""

import asyncio

import pytest
from conftest import aeventually

from e2b import CommandExitException, FileNotFoundException, FilesystemEventType, NotFoundException, TimeoutException
from e2b.sandbox.commands.command_handle import PtySize


@pytest.mark.proves("commands.run", "CommandHandle.wait")
async def test_commands(asandbox):
    heard = []
    done = await asandbox.commands.run("echo out; echo err >&2", on_stdout=heard.append, on_stderr=heard.append)
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 0)
    assert sorted(heard) == ["err\n", "out\n"]
    with pytest.raises(CommandExitException) as failed:
        await asandbox.commands.run("exit 5")
    assert failed.value.exit_code == 5
    with pytest.raises(TimeoutException):
        await asandbox.commands.run("sleep 3600", timeout=1)


@pytest.mark.proves("commands.run", "commands.list", "commands.kill", "CommandHandle.kill")
async def test_background_commands(asandbox):
    handle = await asandbox.commands.run("echo begun; sleep 3600", background=True)
    assert handle.pid in [p.pid for p in await asandbox.commands.list()]

    async def begun():
        return handle.stdout == "begun\n"

    await aeventually(begun)
    assert await handle.kill() is True
    with pytest.raises(CommandExitException):
        await handle.wait()
    assert handle.exit_code == -1 and handle.error == "signal: killed" and handle.stdout == "begun\n" and handle.stderr == ""
    assert await asandbox.commands.kill(999_999) is False


@pytest.mark.proves("commands.connect", "CommandHandle.disconnect")
async def test_disconnect_and_connect(asandbox, afolder):
    handle = await asandbox.commands.run(f"until [ -e {afolder}/go ]; do sleep 0.01; done; echo late; exit 2", background=True, timeout=120)
    await handle.disconnect()
    again = await asandbox.commands.connect(handle.pid, timeout=120)
    await asandbox.files.write(f"{afolder}/go", "")
    with pytest.raises(CommandExitException) as ended:
        await again.wait()
    assert (ended.value.exit_code, ended.value.stdout) == (2, "late\n")


@pytest.mark.proves("commands.send_stdin", "commands.close_stdin", "CommandHandle.send_stdin", "CommandHandle.close_stdin")
async def test_stdin(asandbox):
    handle = await asandbox.commands.run("cat", background=True, stdin=True)
    await asandbox.commands.send_stdin(handle.pid, "one ")
    await handle.send_stdin("two")
    await handle.close_stdin()
    assert (await handle.wait()).stdout == "one two"
    other = await asandbox.commands.run("cat", background=True, stdin=True)
    await asandbox.commands.close_stdin(other.pid)
    assert (await other.wait()).exit_code == 0


@pytest.mark.proves("commands.stream_input")
async def test_streamed_stdin(asandbox):
    heard = []
    handle = await asandbox.commands.run("while read l; do echo got $l; done", background=True, stdin=True, on_stdout=heard.append)
    async with asandbox.commands.stream_input(handle.pid) as feed:
        await feed.send("a\n")

        async def came():
            return heard == ["got a\n"]

        await aeventually(came)  # while the stream is open: frames are delivered as they come
        await feed.send(b"b\n")
    await asandbox.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout == "got a\ngot b\n"


@pytest.mark.proves("pty.create", "pty.send_stdin", "pty.resize", "pty.connect", "pty.kill", "pty.stream_input")
async def test_terminals(asandbox):
    seen = bytearray()
    handle = await asandbox.pty.create(PtySize(24, 80), on_data=seen.extend)

    def said(word):
        async def check():
            return word in bytes(seen)

        return check

    await asandbox.pty.send_stdin(handle.pid, b"echo c=$(tput cols).\n")
    await aeventually(said(b"c=80."))
    await asandbox.pty.resize(handle.pid, PtySize(24, 99))
    await asandbox.pty.send_stdin(handle.pid, b"echo c=$(tput cols).\n")
    await aeventually(said(b"c=99."))
    again = await asandbox.pty.connect(handle.pid, on_data=seen.extend)
    async with asandbox.pty.stream_input(again.pid) as feed:
        await feed.send(b"echo s$((1+1))m\n")
    await aeventually(said(b"s2m"))
    assert await asandbox.pty.kill(handle.pid) is True
    with pytest.raises(NotFoundException):
        await asandbox.pty.connect(999_999, on_data=seen.extend)


@pytest.mark.proves("files.write", "files.read", "files.write_files", "files.get_info")
async def test_files(asandbox, afolder):
    info = await asandbox.files.write(f"{afolder}/f", "grüße", metadata={"k": "v"})
    assert info.path == f"{afolder}/f"
    assert await asandbox.files.read(f"{afolder}/f") == "grüße"
    assert await asandbox.files.read(f"{afolder}/f", format="bytes") == "grüße".encode()
    pieces = [piece async for piece in await asandbox.files.read(f"{afolder}/f", format="stream")]
    assert b"".join(pieces) == "grüße".encode()
    assert (await asandbox.files.get_info(f"{afolder}/f")).metadata == {"k": "v"}
    assert await asandbox.files.write_files([]) == []
    await asandbox.files.write_files([{"path": f"{afolder}/{n}", "data": n} for n in ("a", "b")], gzip=True)
    assert await asandbox.files.read(f"{afolder}/b", gzip=True) == "b"

    async def chunks():
        for i in range(3):
            yield f"{i}".encode()

    await asandbox.files.write(f"{afolder}/c", chunks())
    assert await asandbox.files.read(f"{afolder}/c") == "012"
    with pytest.raises(FileNotFoundException):
        await asandbox.files.read(f"{afolder}/nothing")


@pytest.mark.proves("files.make_dir", "files.list", "files.exists", "files.rename", "files.remove")
async def test_directories(asandbox, afolder):
    assert await asandbox.files.make_dir(f"{afolder}/d") is True
    assert await asandbox.files.make_dir(f"{afolder}/d") is False
    await asandbox.files.write(f"{afolder}/d/f", "")
    assert [e.name for e in await asandbox.files.list(afolder, depth=2)] == ["d", "f"]
    await asandbox.files.rename(f"{afolder}/d", f"{afolder}/e")
    assert await asandbox.files.exists(f"{afolder}/e/f") and not await asandbox.files.exists(f"{afolder}/d")
    await asandbox.files.remove(f"{afolder}/e")
    await asandbox.files.remove(f"{afolder}/e")


@pytest.mark.proves("files.watch_dir", "WatchHandle.stop")
async def test_a_watch_streams_its_events(asandbox, afolder):
    events, ended = [], asyncio.Event()
    watch = await asandbox.files.watch_dir(afolder, events.append, on_exit=lambda _: ended.set(), recursive=True, include_entry=True)
    await asandbox.files.make_dir(f"{afolder}/sub")
    await asandbox.files.write(f"{afolder}/sub/f", "x")

    async def came():
        return ("sub/f", FilesystemEventType.WRITE) in [(e.name, e.type) for e in events]

    await aeventually(came)
    created = next(e for e in events if e.name == "sub/f" and e.type == FilesystemEventType.CREATE)
    assert created.entry.path == f"{afolder}/sub/f"
    await watch.stop()
    await asyncio.wait_for(ended.wait(), 120)
    with pytest.raises(FileNotFoundException):
        await asandbox.files.watch_dir(f"{afolder}/nothing", events.append)


@pytest.mark.proves(
    "git.init", "git.configure_user", "git.add", "git.commit", "git.status", "git.branches", "git.create_branch", "git.checkout_branch",
    "git.delete_branch", "git.reset", "git.restore", "git.remote_add", "git.remote_get", "git.push", "git.pull", "git.clone",
    "git.set_config", "git.get_config", "git.dangerously_authenticate",
)
async def test_git(asandbox, afolder):
    git, repo, bare = asandbox.git, f"{afolder}/repo", f"{afolder}/bare.git"
    await git.init(bare, bare=True, initial_branch="main")
    await git.init(repo, initial_branch="main")
    await git.configure_user("Ada", "ada@example.com")
    await asandbox.files.write(f"{repo}/a", "1")
    await git.add(repo)
    await git.commit(repo, "first")
    assert (await git.status(repo)).is_clean
    await git.create_branch(repo, "side")
    await git.checkout_branch(repo, "main")
    await git.delete_branch(repo, "side")
    assert (await git.branches(repo)).branches == ["main"]
    await asandbox.files.write(f"{repo}/a", "2")
    await git.add(repo)
    await git.restore(repo, ["a"], staged=True)
    await git.reset(repo, mode="hard")
    assert await asandbox.files.read(f"{repo}/a") == "1"
    await git.remote_add(repo, "origin", f"file://{bare}")
    assert await git.remote_get(repo, "origin") == f"file://{bare}"
    await git.push(repo, remote="origin", branch="main")
    await git.clone(f"file://{bare}", path=f"{afolder}/copy")
    await git.pull(f"{afolder}/copy")
    await git.set_config("pull.rebase", "true", scope="local", path=repo)
    assert await git.get_config("pull.rebase", scope="local", path=repo) == "true"
    await git.dangerously_authenticate("someone", "token", host="git.example.com")


@pytest.mark.proves("run_code")
async def test_code(acode):
    heard = []
    run = await acode.run_code("print('said')\n40 + 2", on_stdout=lambda m: heard.append(m.line), on_result=lambda r: heard.append(r.text))
    assert (run.text, heard) == ("42", ["said\n", "42"])
    assert (await acode.run_code("1/0")).error.name == "ZeroDivisionError"
    with pytest.raises(TimeoutException):
        await acode.run_code("while True: pass", timeout=1)
    assert (await acode.run_code("40 + 2")).text == "42"


@pytest.mark.proves("run_code")
async def test_cancelling_a_task_interrupts_its_code(acode):
    await acode.run_code("kept = 1")
    begun = asyncio.Event()
    code = "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.01)"
    task = asyncio.create_task(acode.run_code(code, on_stdout=lambda _: begun.set(), timeout=0))
    await asyncio.wait_for(begun.wait(), 120)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await asyncio.wait_for(acode.run_code("kept", timeout=0), 50)).text == "1"


@pytest.mark.proves("create_code_context", "list_code_contexts", "restart_code_context", "remove_code_context", "run_code")
async def test_contexts(acode):
    ctx = await acode.create_code_context(cwd="/tmp", language="python")
    assert (await acode.run_code("import os; x = 1; os.getcwd()", context=ctx)).text == "/tmp"
    assert ctx.id in [c.id for c in await acode.list_code_contexts()]
    await acode.restart_code_context(ctx)
    assert (await acode.run_code("x", context=ctx)).error.name == "NameError"
    await acode.remove_code_context(ctx)
    with pytest.raises(NotFoundException):
        await acode.run_code("1", context=ctx)


@pytest.mark.proves("run_code")
async def test_contexts_run_side_by_side(acode, tag):
    """Each of three cells waits for the files of the others."""
    contexts = [await acode.create_code_context() for _ in range(3)]
    await acode.files.make_dir(f"/tmp/{tag}")
    meet = """
import os, time
open('/tmp/{tag}/{own}', 'w').close()
until = time.monotonic() + 120
while len(os.listdir('/tmp/{tag}')) < 3:
    assert time.monotonic() < until, 'the others never come'
    time.sleep(0.01)
'ok'
"""
    runs = await asyncio.gather(*(acode.run_code(meet.format(tag=tag, own=i), context=c, timeout=300) for i, c in enumerate(contexts)))
    assert [r.text for r in runs] == ["ok"] * 3
    for c in contexts:
        await acode.remove_code_context(c)
