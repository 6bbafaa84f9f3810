"""Commands, files and code, by the asynchronous SDK."""

import asyncio
from datetime import timedelta

import pytest

from code_interpreter import CodeInterpreter
from conftest import NEWEST, aeventually, err, line, out
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.models.execd import ExecutionHandlers, RunCommandOpts
from opensandbox.models.filesystem import ContentReplaceEntry, MoveEntry, SearchEntry, SetPermissionEntry, WriteEntry

proves = pytest.mark.proves


@proves("commands.run")
async def test_commands(asandbox):
    run = asandbox.commands.run
    ok = await run("echo one; echo two >&2")
    assert (out(ok), err(ok), ok.exit_code, ok.error) == (["one"], "two", 0, None)
    failed = await run("exit 3")
    assert (failed.error.name, failed.error.value, failed.exit_code) == ("CommandExecError", "3", 3)
    assert out(await run("pwd; echo $A; id -u", opts=RunCommandOpts(working_directory="/usr", envs={"A": "b"}, uid=1234))) == ["/usr", "b", "1234"]
    late = await run("sleep 3600", opts=RunCommandOpts(timeout=timedelta(seconds=1)))
    assert late.exit_code == -1


@proves("commands.run")
async def test_events_come_live(asandbox, afolder):
    seen = []

    async def note(event):
        seen.append(line(event.text) if hasattr(event, "text") else type(event).__name__)
        if seen[-1] == "a":
            await asandbox.files.write_file(f"{afolder}/go", "the first line is here")

    handlers = ExecutionHandlers(on_init=note, on_stdout=note, on_execution_complete=note)
    command = f"echo a; until [ -e {afolder}/go ]; do sleep 0.01; done; echo b"
    await asandbox.commands.run(command, opts=RunCommandOpts(timeout=timedelta(minutes=2)), handlers=handlers)
    assert seen == ["ExecutionInit", "a", "b", "ExecutionComplete"]


@proves("commands.run", "commands.get_command_status", "commands.get_background_command_logs", "commands.interrupt")
async def test_background_and_interrupt(asandbox):
    commands = asandbox.commands
    started = await commands.run("echo begun; sleep 3600", opts=RunCommandOpts(background=True))

    async def logged():
        return "begun" in (await commands.get_background_command_logs(started.id)).content

    await aeventually(logged)
    assert (await commands.get_command_status(started.id)).running
    await commands.interrupt(started.id)

    async def ended():
        return not (await commands.get_command_status(started.id)).running

    await aeventually(ended)


@proves("commands.create_session", "commands.run_in_session", "commands.delete_session")
async def test_sessions(asandbox):
    session = await asandbox.commands.create_session(working_directory="/usr")
    await asandbox.commands.run_in_session(session, "export A=1; cd lib")
    assert out(await asandbox.commands.run_in_session(session, "echo $A; pwd")) == ["1", "/usr/lib"]
    assert (await asandbox.commands.run_in_session(session, "(exit 7)")).exit_code == 7
    await asandbox.commands.delete_session(session)
    with pytest.raises(SandboxApiException):
        await asandbox.commands.run_in_session(session, "true")


@proves("commands.set_env")
@pytest.mark.newest
async def test_a_variable_stays(amake):
    sbx = await amake()
    await sbx.commands.set_env("KEPT", "a b")
    assert out(await sbx.commands.run(["sh", "-c", "echo $KEPT"])) == ["a b"]


@proves("files.write_file", "files.read_file", "files.read_bytes", "files.read_bytes_stream", "files.write_files", "files.get_file_info")
async def test_reading_and_writing(asandbox, afolder):
    files = asandbox.files
    await files.write_file(f"{afolder}/a", "text\n")
    assert await files.read_file(f"{afolder}/a") == "text\n"
    data = bytes(range(256)) * 1000
    await files.write_files([WriteEntry(path=f"{afolder}/b", data=data, mode=600), WriteEntry(path=f"{afolder}/c", data="c")])
    assert await files.read_bytes(f"{afolder}/b") == data
    assert await files.read_bytes(f"{afolder}/b", range_header="bytes=5-9") == data[5:10]
    got = b""
    async for chunk in await files.read_bytes_stream(f"{afolder}/b"):
        got += chunk
    assert got == data
    info = await files.get_file_info([f"{afolder}/b"])
    assert (info[f"{afolder}/b"].mode, info[f"{afolder}/b"].size) == (600, len(data))
    with pytest.raises(SandboxApiException) as missing:
        await files.read_file(f"{afolder}/none")
    assert missing.value.status_code == 404


@proves("files.create_directories", "files.delete_directories", "files.move_files", "files.delete_files", "files.replace_contents", "files.search", "files.set_permissions")
async def test_the_rest_of_files(asandbox, afolder):
    files = asandbox.files
    await files.create_directories([WriteEntry(path=f"{afolder}/d", mode=700)])
    await files.write_file(f"{afolder}/d/a.py", "x = 1")
    await files.move_files([MoveEntry(src=f"{afolder}/d/a.py", dest=f"{afolder}/e/b.py")])
    await files.replace_contents([ContentReplaceEntry(path=f"{afolder}/e/b.py", old_content="1", new_content="2")])
    await files.set_permissions([SetPermissionEntry(path=f"{afolder}/e/b.py", mode=640)])
    found = await files.search(SearchEntry(path=afolder, pattern="*.py"))
    assert [(f.path, f.mode) for f in found] == [(f"{afolder}/e/b.py", 640)]
    assert await files.read_file(f"{afolder}/e/b.py") == "x = 2"
    await files.delete_files([f"{afolder}/e/b.py"])
    await files.delete_directories([f"{afolder}/d", f"{afolder}/e"])
    assert await files.search(SearchEntry(path=afolder, pattern="*")) == []


@proves("files.list_directory", "files.replace_contents_detailed", "Sandbox.files_with_identity")
@pytest.mark.newest
async def test_what_is_new_of_files(asandbox, afolder):
    from opensandbox.models.filesystem import DirectoryListEntry

    await asandbox.commands.run(f"chmod 777 {afolder}")
    theirs = asandbox.files_with_identity(1234, 1234)
    await theirs.write_file(f"{afolder}/f", "x x")
    assert [(e.path, e.owner) for e in await asandbox.files.list_directory(DirectoryListEntry(path=afolder))] == [(f"{afolder}/f", "1234")]
    counted = await asandbox.files.replace_contents_detailed([ContentReplaceEntry(path=f"{afolder}/f", old_content="x", new_content="y")])
    assert counted[0].replaced_count == 2


@proves("CodeInterpreter.create", "codes.run")
async def test_code(acode):
    execution = await acode.codes.run("print('out')\n40 + 2")
    assert (execution.result[0].text, "".join(m.text for m in execution.logs.stdout)) == ("42", "out\n")
    assert (await acode.codes.run("nope")).error.name == "NameError"
    assert "".join(m.text for m in (await acode.codes.run("echo hi", language="bash")).logs.stdout).strip() == "hi"


@proves("codes.create_context", "codes.get_context", "codes.list_contexts", "codes.delete_context", "codes.delete_contexts", "codes.interrupt")
async def test_contexts(acode):
    codes = acode.codes
    a = await codes.create_context("python")
    b = await codes.create_context("python")
    await codes.run("x = 1", context=a)
    assert (await codes.run("x", context=b)).error.name == "NameError"
    assert (await codes.get_context(a.id)).language == "python"
    assert {a.id, b.id} <= {c.id for c in await codes.list_contexts("python")}

    async def interrupt(event):
        asyncio.get_running_loop().call_later(0.3, lambda: tasks.append(asyncio.ensure_future(codes.interrupt(event.id))))

    tasks = []
    stopped = await codes.run("import time; time.sleep(3600)", context=a, handlers=ExecutionHandlers(on_init=interrupt))
    await asyncio.gather(*tasks)
    assert stopped.error.name == "KeyboardInterrupt"
    assert (await codes.run("x", context=a)).result[0].text == "1"
    await codes.delete_context(a.id)
    await codes.delete_contexts("python")
    assert await codes.list_contexts("python") == []
    with pytest.raises(SandboxException):
        await codes.interrupt("none")


@proves("CodeInterpreter.ping", "CodeInterpreter.is_healthy")
@pytest.mark.newest
async def test_the_strict_health_check(asandbox):
    assert NEWEST
    interpreter = await CodeInterpreter.create(asandbox)
    assert await interpreter.ping() and await interpreter.is_healthy()
