"""Commands, their streams, sessions and terminals, by the synchronous SDK."""

import threading
import time
from datetime import datetime, timedelta, timezone

import pytest

from conftest import NEWEST, err, eventually, line, out
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.execd_sync import ExecutionHandlersSync

proves = pytest.mark.proves
run = proves("commands.run")
LIMIT = RunCommandOpts(timeout=timedelta(minutes=2))  # a command that waits in vain ends after it


def until(folder):
    """A part of a command that waits until the test writes the file go."""
    return f"until [ -e {folder}/go ]; do sleep 0.01; done"


@run
def test_S3_16_a_program_is_run_and_its_output_read(sandbox, folder):
    sandbox.files.write_file(f"{folder}/math.py", "result = 137 * 42\nprint(result)\n")
    execution = sandbox.commands.run(f"python3 {folder}/math.py")
    assert out(execution) == ["5754"]
    assert execution.exit_code == 0


@run
def test_S3_17_python_has_both_names(sandbox):
    for name in ("python3", "python"):
        assert out(sandbox.commands.run(f"{name} -c 'print(1 + 1)'")) == ["2"]


@run
def test_S3_18_output_is_a_list_of_messages_by_stream(sandbox):
    execution = sandbox.commands.run("echo one; echo two >&2; echo; echo three")
    assert out(execution) == ["one", "", "three"]
    assert err(execution) == "two"
    assert all(m.is_error for m in execution.logs.stderr) and not any(m.is_error for m in execution.logs.stdout)
    assert all(abs(m.timestamp / 1000 - time.time()) < 60 for m in execution.logs.stdout)


@run
def test_S3_19_a_failing_command_is_an_error_that_is_not_raised(sandbox):
    execution = sandbox.commands.run("exit 3")
    assert (execution.error.name, execution.error.value) == ("CommandExecError", "3")
    assert execution.exit_code == 3
    assert execution.complete is None
    missing = sandbox.commands.run("no-such-program")
    assert (missing.error.name, missing.error.value) == ("CommandExecError", "127")
    assert "no-such-program" in err(missing)


@run
def test_S3_20_success_has_an_exit_code_and_no_error(sandbox):
    execution = sandbox.commands.run("true")
    assert execution.exit_code == 0 and execution.error is None
    assert execution.complete.execution_time_in_millis >= 0
    assert execution.id


@run
def test_each_event_comes_once(sandbox):
    seen = []
    handlers = ExecutionHandlersSync(
        on_init=lambda e: seen.append("init"), on_stdout=lambda m: seen.append(line(m.text)), on_stderr=lambda m: seen.append("! " + line(m.text)),
        on_execution_complete=lambda e: seen.append("complete"), on_error=lambda e: seen.append("error"),
    )
    sandbox.commands.run("echo a", handlers=handlers)
    assert seen == ["init", "a", "complete"]
    seen.clear()
    sandbox.commands.run("echo b >&2; exit 1", handlers=handlers)
    assert seen == ["init", "! b", "error"]
    quiet = ExecutionHandlersSync(on_stdout=lambda m: seen.append(m.text), skip_accumulation=True)
    assert out(sandbox.commands.run("echo c", handlers=quiet)) == []


@run
def test_S3_49_output_comes_while_the_command_runs(sandbox, folder):
    seen = []

    def heard(message):
        seen.append(line(message.text))
        if seen == ["first"]:
            sandbox.files.write_file(f"{folder}/go", "the first line is here")

    handlers = ExecutionHandlersSync(on_stdout=heard)
    done = sandbox.commands.run(f"echo first; {until(folder)}; echo second", opts=LIMIT, handlers=handlers)
    assert seen == ["first", "second"] and done.exit_code == 0


@run
def test_a_command_ends_without_a_tail(sandbox):
    """Upstream holds every stream open for a while after the end."""
    took = []
    for _ in range(10):
        began = time.monotonic()
        sandbox.commands.run("true")
        took.append(time.monotonic() - began)
    assert min(took) < 0.5, took


@run
@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ("printf 'no newline'", ["no newline"]),
        ("printf 'a\\r\\nb\\n'", ["a", "b"]),
        ("printf 'a\\u0085b \\u2028 \\u2029 ü 🙂\\n'", ["a\u0085b \u2028 \u2029 ü 🙂"]),
        ("printf '\\033[31mred\\033[0m\\n'", ["\x1b[31mred\x1b[0m"]),
        ("printf 'bad \\xff byte\\n'", ["bad \ufffd byte"]),
        ("printf '{\"type\":\"error\"}\\n\\ndata: x\\n'", ['{"type":"error"}', "", "data: x"]),
    ],
)
def test_text_comes_as_it_was_said(sandbox, script, lines):
    assert out(sandbox.commands.run(script)) == lines


@run
def test_lines_have_the_endings_that_the_sdk_expects(sandbox):
    """From 1.0 on the texts of a stream, one after the other, are its output; before, each was a line without its end."""
    execution = sandbox.commands.run("printf 'a\\n\\nb\\r\\nc'")
    if NEWEST:
        assert "".join(m.text for m in execution.logs.stdout) == "a\n\nb\r\nc"
        assert execution.text == "a\n\nb\nc"
    else:
        assert [m.text for m in execution.logs.stdout] == ["a", "\n", "b", "c"]


@run
def test_much_output_is_complete_and_in_order(sandbox):
    execution = sandbox.commands.run("seq 1 20000")
    assert out(execution) == [str(i) for i in range(1, 20001)]
    long = sandbox.commands.run("head -c 3000000 /dev/zero | tr '\\0' x; echo")
    assert sum(map(len, out(long))) == 3_000_000


@run
def test_S3_50_where_and_with_what_it_runs(sandbox, folder):
    run = sandbox.commands.run
    assert out(run("pwd", opts=RunCommandOpts(working_directory=folder))) == [folder]
    assert out(run('echo "$A"', opts=RunCommandOpts(envs={"A": "per command"}))) == ["per command"]
    assert out(run('echo "[$A]"')) == ["[]"]
    assert out(run("id -u; id -g", opts=RunCommandOpts(uid=1234, gid=2345))) == ["1234", "2345"]
    with pytest.raises(SandboxApiException) as missing:
        run("pwd", opts=RunCommandOpts(working_directory="/no/such/place"))
    assert missing.value.status_code == 400


@run
def test_S3_50_a_timeout_ends_it(sandbox):
    began = time.monotonic()
    execution = sandbox.commands.run("sleep 3600 & sleep 3600", opts=RunCommandOpts(timeout=timedelta(seconds=1)))
    assert time.monotonic() - began < 50
    assert execution.error.name == "CommandExecError" and execution.exit_code == -1


@run
@pytest.mark.newest
def test_a_list_is_run_without_a_shell(sandbox):
    assert out(sandbox.commands.run(["printf", "%s|", "$HOME", "a b", ""])) == ["$HOME|a b||"]
    assert sandbox.commands.run(["false"]).exit_code == 1


@proves("commands.set_env")
@pytest.mark.newest
def test_a_variable_stays_for_later_commands(make):
    sbx = make("python:3.11-slim")
    sbx.commands.set_env("PLAIN", "one two $HOME")
    sbx.commands.set_env("QUOTED", "it's\na \"test\"")
    assert out(sbx.commands.run('printf "%s\\n" "$PLAIN"')) == ["one two $HOME"]
    assert sbx.commands.run(["sh", "-c", 'test "$QUOTED" = "it\'s\na \\"test\\""']).exit_code == 0
    session = sbx.commands.create_session()
    assert out(sbx.commands.run_in_session(session, 'printf "%s\\n" "$PLAIN"')) == ["one two $HOME"]


@proves("commands.run", "commands.get_command_status", "commands.get_background_command_logs")
def test_S3_50_a_command_in_the_background(sandbox, folder):
    started = sandbox.commands.run(f"echo one; echo two >&2; {until(folder)}; echo three; exit 4", opts=RunCommandOpts(background=True))
    assert started.exit_code is None  # and the call is over while the command waits
    status = sandbox.commands.get_command_status(started.id)
    assert status.id == started.id and status.running and status.exit_code is None
    assert "echo three" in status.content
    assert abs((status.started_at - datetime.now(timezone.utc)).total_seconds()) < 300
    first = eventually(lambda: (l := sandbox.commands.get_background_command_logs(started.id)).content.count("\n") >= 2 and l)
    assert {"one", "two"} <= set(first.content.split())
    sandbox.files.write_file(f"{folder}/go", "")
    done = eventually(lambda: not (s := sandbox.commands.get_command_status(started.id)).running and s)
    assert done.exit_code == 4 and done.finished_at >= done.started_at
    rest = sandbox.commands.get_background_command_logs(started.id, cursor=first.cursor)
    assert rest.content.strip() == "three"
    assert sandbox.commands.get_background_command_logs(started.id, cursor=rest.cursor).content == ""


@proves("commands.get_command_status", "commands.get_background_command_logs")
def test_status_of_a_foreground_command_and_of_none(sandbox):
    ran = sandbox.commands.run("exit 5")
    assert sandbox.commands.get_command_status(ran.id).exit_code == 5
    with pytest.raises(SandboxApiException) as logs:
        sandbox.commands.get_background_command_logs(ran.id)
    assert logs.value.status_code == 400
    with pytest.raises(SandboxApiException) as unknown:
        sandbox.commands.get_command_status("none")
    assert unknown.value.status_code == 404


@proves("commands.interrupt")
def test_S3_51_an_interrupt_ends_a_command(sandbox):
    began, ids = time.monotonic(), []
    ran = []

    def interrupt(event):
        ids.append(event.id)
        threading.Thread(target=lambda: sandbox.commands.interrupt(event.id)).start()

    ran.append(sandbox.commands.run("sleep 3600", handlers=ExecutionHandlersSync(on_init=interrupt)))
    assert time.monotonic() - began < 100
    assert ran[0].error.value and ran[0].complete is None
    with pytest.raises(SandboxException):
        sandbox.commands.interrupt(ids[0])


@proves("commands.create_session", "commands.run_in_session", "commands.delete_session")
def test_a_session_remembers(sandbox, folder):
    commands = sandbox.commands
    session = commands.create_session()
    assert commands.run_in_session(session, f"cd {folder}; export A=1; f() {{ echo f $A; }}").exit_code == 0
    assert out(commands.run_in_session(session, "pwd; f")) == [folder, "f 1"]
    assert out(commands.run_in_session(session, "pwd", working_directory="/usr")) == ["/usr"]
    failed = commands.run_in_session(session, "sh -c 'echo out; exit 7'")
    assert (out(failed), failed.exit_code, failed.error.name) == (["out"], 7, "CommandExecError")
    assert out(commands.run_in_session(session, "echo $A")) == ["1"]
    commands.delete_session(session)
    with pytest.raises(SandboxApiException) as gone:
        commands.run_in_session(session, "pwd")
    assert gone.value.status_code == 404
    if NEWEST:  # June's takes every answer
        with pytest.raises(SandboxApiException):
            commands.delete_session(session)


@proves("commands.create_session", "commands.run_in_session")
def test_a_session_begins_where_it_was_told_and_has_a_timeout(sandbox, folder):
    session = sandbox.commands.create_session(working_directory=folder)
    assert out(sandbox.commands.run_in_session(session, "pwd")) == [folder]
    began = time.monotonic()
    late = sandbox.commands.run_in_session(session, "sleep 3600", timeout=timedelta(seconds=1))
    assert late.error is not None and time.monotonic() - began < 80
    sandbox.commands.delete_session(session)


@run
def test_a_client_that_leaves_does_not_end_its_command(sandbox, folder, wire):
    endpoint = sandbox.get_endpoint(44772)
    command = {"command": f"{until(folder)}; touch {folder}/done"}
    with wire.client.stream("POST", f"http://{endpoint.endpoint}/command", headers=endpoint.headers, json=command) as stream:
        next(stream.iter_bytes())
    sandbox.files.write_file(f"{folder}/go", "")
    eventually(lambda: sandbox.commands.run(f"test -e {folder}/done").exit_code == 0)


@run
def test_twenty_commands_at_once(sandbox):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(lambda i: out(sandbox.commands.run(f"sleep 0.2; echo {i}")), range(20))) == [[str(i)] for i in range(20)]
