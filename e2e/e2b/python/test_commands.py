"""Commands: what they print, how they end, who may still reach them."""

import pytest
from conftest import eventually

from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    TimeoutException,
)


def until(folder):
    """A part of a command that waits until the test writes the file go."""
    return f"until [ -e {folder}/go ]; do sleep 0.01; done"


@pytest.mark.proves("commands.run")
def test_output_and_exit_code(sandbox):
    done = sandbox.commands.run("echo out; echo err >&2")
    assert (done.stdout, done.stderr, done.exit_code, done.error) == ("out\n", "err\n", 0, None)


@pytest.mark.proves("commands.run")
def test_a_failure_carries_all_that_is_known(sandbox):
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo partly; echo why >&2; exit 7")
    e = failed.value
    assert (e.exit_code, e.stdout, e.stderr, e.error) == (7, "partly\n", "why\n", "exit status 7")


@pytest.mark.proves("commands.run")
def test_death_by_a_signal_is_told(sandbox):
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("kill -9 $$")
    assert (failed.value.exit_code, failed.value.error) == (-1, "signal: killed")


@pytest.mark.proves("commands.run")
def test_special_characters_and_many_lines(sandbox):
    text = "".join(f"line {i} ö € 😀 \"quoted\" $HOME `x` \\\n" for i in range(50))
    sandbox.files.write("/tmp/text", text)
    assert sandbox.commands.run("cat /tmp/text").stdout == text


@pytest.mark.proves("commands.run")
def test_half_a_character_becomes_one_replacement(sandbox):
    out = sandbox.commands.run("printf 'a%.0s' $(seq 8191); printf '\\xe2'").stdout
    assert out == "a" * 8191 + "\ufffd"
    assert sandbox.commands.run("printf '%8191s\\xc3\\xb6' x").stdout == " " * 8190 + "xö"


@pytest.mark.proves("commands.run")
def test_a_megabyte_of_output_is_whole(sandbox):
    out = sandbox.commands.run("head -c 1000000 /dev/zero | tr '\\0' x; echo").stdout
    assert out == "x" * 1_000_000 + "\n"


@pytest.mark.proves("commands.run")
def test_callbacks_hear_output_as_it_comes(sandbox, folder):
    heard = []

    def hear(text):
        heard.append(("out", text))
        sandbox.files.write(f"{folder}/go", "the first line is here")

    sandbox.commands.run(f"echo one; {until(folder)}; echo two >&2", on_stdout=hear, on_stderr=lambda s: heard.append(("err", s)), timeout=120)
    assert heard == [("out", "one\n"), ("err", "two\n")]


@pytest.mark.proves("commands.run")
def test_output_need_not_be_kept(sandbox):
    heard = []
    done = sandbox.commands.run("echo once", on_stdout=heard.append, retain_output=False)
    assert heard == ["once\n"] and done.stdout is None and done.exit_code == 0


@pytest.mark.proves("commands.run")
def test_cwd(sandbox):
    assert sandbox.commands.run("pwd").stdout == "/home/user\n"
    assert sandbox.commands.run("pwd", cwd="/var/tmp").stdout == "/var/tmp\n"
    with pytest.raises(InvalidArgumentException):
        sandbox.commands.run("pwd", cwd="/no/such/place")


@pytest.mark.proves("commands.run")
def test_envs_are_those_of_one_command(sandbox):
    assert sandbox.commands.run("echo $WORD", envs={"WORD": "hello"}).stdout == "hello\n"
    assert sandbox.commands.run("echo ${WORD-gone}").stdout == "gone\n"


@pytest.mark.proves("commands.run")
def test_a_commands_envs_win_over_the_sandboxs_and_stay_out_of_sudo(make):
    sbx = make(envs={"WORD": "sandbox", "KEPT": "yes"})
    assert sbx.commands.run("echo $WORD $KEPT", envs={"WORD": "command"}).stdout == "command yes\n"
    assert "secret" not in sbx.commands.run("sudo env", envs={"WORD": "secret", "OTHER": "secret"}).stdout


@pytest.mark.proves("commands.run")
def test_users(sandbox):
    assert sandbox.commands.run("whoami; echo $HOME; id -gn").stdout == "user\n/home/user\nuser\n"
    assert sandbox.commands.run("whoami; echo $HOME", user="root").stdout == "root\n/root\n"
    assert sandbox.commands.run("sudo whoami").stdout == "root\n"
    with pytest.raises(AuthenticationException, match="invalid username: 'nobodyknows'"):
        sandbox.commands.run("whoami", user="nobodyknows")


@pytest.mark.proves("commands.run")
def test_the_base_template_has_what_people_expect(sandbox):
    for tool in ("python3", "python", "curl", "git", "tput", "realpath", "ss", "pgrep", "sudo", "tar"):
        assert sandbox.commands.run(f"command -v {tool} || true").stdout, f"{tool} is missing"


@pytest.mark.proves("commands.run")
def test_a_timeout_ends_the_command(sandbox):
    with pytest.raises(TimeoutException):
        sandbox.commands.run("exec -a overslept sleep 3600", timeout=1)
    eventually(lambda: sandbox.commands.run("pgrep -cf '^overslept' || true").stdout == "0\n")


@pytest.mark.proves("commands.run")
def test_setsid_is_waited_for_and_ended_in_time(sandbox):
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("setsid sh -c 'sleep 1; echo late; exit 7'")
    assert (failed.value.exit_code, failed.value.stdout) == (7, "late\n")
    with pytest.raises(TimeoutException):
        sandbox.commands.run("""setsid bash -c 'trap "" TERM INT HUP; setsid -f sleep 4545; sleep 4545; :'""", timeout=2)
    eventually(lambda: sandbox.commands.run("pgrep -cxf 'sleep 4545' || true").stdout == "0\n")


@pytest.mark.proves("commands.run", "CommandHandle.wait")
def test_a_timeout_also_ends_what_is_iterated(sandbox):
    handle = sandbox.commands.run("sleep 3600", background=True, timeout=1)
    with pytest.raises(TimeoutException):
        for _ in handle:
            pass


@pytest.mark.proves("commands.run")
def test_without_a_timeout_a_command_may_take_its_time(sandbox):
    assert sandbox.commands.run("sleep 1; echo done", timeout=0).stdout == "done\n"


@pytest.mark.proves("commands.run", "CommandHandle.wait")
def test_a_background_command_is_waited_for(sandbox):
    handle = sandbox.commands.run("sleep 0.2; echo late", background=True)
    assert handle.pid > 0
    done = handle.wait()
    assert (done.stdout, done.exit_code) == ("late\n", 0)


@pytest.mark.proves("CommandHandle.kill", "commands.kill")
def test_a_command_is_killed_once(sandbox):
    handle = sandbox.commands.run("sleep 3600", background=True)
    assert handle.kill() is True
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert (ended.value.exit_code, ended.value.error) == (-1, "signal: killed")
    assert sandbox.commands.kill(handle.pid) is False
    assert sandbox.commands.kill(999_999) is False


@pytest.mark.proves("commands.list")
def test_the_list_shows_what_runs(sandbox):
    handle = sandbox.commands.run("sleep 3600", background=True, cwd="/tmp", envs={"A": "b"})
    mine = [p for p in sandbox.commands.list() if p.pid == handle.pid]
    assert [(p.cmd, p.args, p.envs, p.cwd, p.tag) for p in mine] == [
        ("/bin/bash", ["-l", "-c", "sleep 3600"], {"A": "b"}, "/tmp", None)
    ]
    handle.kill()
    eventually(lambda: handle.pid not in [p.pid for p in sandbox.commands.list()])


@pytest.mark.proves("CommandHandle.disconnect", "commands.connect")
def test_a_command_survives_its_client(sandbox, folder):
    handle = sandbox.commands.run(f"echo 1; {until(folder)}; for i in 2 3 4 5; do echo $i; done; exit 3", background=True, timeout=120)
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid, timeout=120)
    assert again.pid == handle.pid
    sandbox.files.write(f"{folder}/go", "")
    with pytest.raises(CommandExitException) as ended:
        again.wait()
    assert ended.value.exit_code == 3
    assert ended.value.stdout.endswith("5\n")


@pytest.mark.proves("commands.connect")
def test_several_may_listen_to_one_command(sandbox, folder):
    first = sandbox.commands.run(f"{until(folder)}; echo heard", background=True, timeout=120)
    second = sandbox.commands.connect(first.pid, timeout=120)
    sandbox.files.write(f"{folder}/go", "")
    assert first.wait().stdout == second.wait().stdout == "heard\n"


@pytest.mark.proves("commands.connect")
def test_how_a_command_ended_is_told_to_the_late(sandbox):
    handle = sandbox.commands.run("exit 4", background=True)
    with pytest.raises(CommandExitException):
        handle.wait()
    with pytest.raises(CommandExitException) as late:
        sandbox.commands.connect(handle.pid).wait()
    assert late.value.exit_code == 4
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(999_999)


@pytest.mark.parametrize(
    "data", ["hello", "", "ünï 😀 $X 'q'", "a\nb\nc", b"\x00\x01raw"], ids=["plain", "empty", "special", "lines", "bytes"]
)
@pytest.mark.proves("commands.send_stdin", "commands.close_stdin", "CommandHandle.send_stdin", "CommandHandle.close_stdin")
def test_cat_gives_back_what_it_gets(sandbox, data):
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, data)
    sandbox.commands.close_stdin(handle.pid)
    text = data.decode() if isinstance(data, bytes) else data
    assert handle.wait().stdout == text


@pytest.mark.proves("CommandHandle.send_stdin", "CommandHandle.close_stdin")
def test_a_handle_feeds_its_own_command(sandbox):
    handle = sandbox.commands.run("read a; echo got $a; cat", background=True, stdin=True)
    handle.send_stdin("one\n")
    handle.send_stdin("two")
    handle.close_stdin()
    assert handle.wait().stdout == "got one\ntwo"


@pytest.mark.proves("commands.stream_input")
def test_input_streams_into_a_command(sandbox):
    handle = sandbox.commands.run("head -n 3", background=True, stdin=True)
    sandbox.commands.stream_input(handle.pid, (f"{i}\n" for i in range(3)))
    assert handle.wait().stdout == "0\n1\n2\n"
    with pytest.raises(NotFoundException):
        sandbox.commands.stream_input(999_999, ["x"])


@pytest.mark.proves("commands.send_stdin")
def test_without_stdin_there_is_nothing_to_read_and_nowhere_to_write(sandbox):
    assert sandbox.commands.run("cat; echo over").stdout == "over\n"
    handle = sandbox.commands.run("sleep 3600", background=True)
    with pytest.raises(SandboxException):
        sandbox.commands.send_stdin(handle.pid, "x")
    handle.kill()
    with pytest.raises(NotFoundException):
        sandbox.commands.send_stdin(999_999, "x")


@pytest.mark.proves("commands.run")
def test_a_child_left_in_the_background_does_not_hold_the_command(sandbox):
    assert sandbox.commands.run("(sleep 3600 >/dev/null 2>&1 &) ; echo off", timeout=120).stdout == "off\n"


@pytest.mark.proves("commands.run")
def test_many_commands_at_once(sandbox):
    handles = [sandbox.commands.run(f"sleep 0.5; echo {i}", background=True) for i in range(20)]
    assert [h.wait().stdout for h in handles] == [f"{i}\n" for i in range(20)]
