"""Terminals."""

import re

import pytest

from e2b import NotFoundException
from e2b.sandbox.commands.command_handle import PtySize


def read_until(handle, pattern):
    """Reads a terminal until what it printed matches."""
    seen = b""
    for _, _, data in handle:
        seen += data or b""
        if re.search(pattern, seen):
            return seen.decode(errors="replace")
    raise AssertionError(f"{pattern!r} is not in {seen!r}")


@pytest.mark.proves("pty.create", "pty.send_stdin")
def test_a_terminal_echoes_and_answers(sandbox):
    handle = sandbox.pty.create(PtySize(rows=24, cols=80), envs={"WORD": "hey"}, cwd="/tmp")
    sandbox.pty.send_stdin(handle.pid, b"echo [$WORD:$TERM:$PWD]; whoami; exit\n")
    seen = read_until(handle, rb"\[hey:xterm-256color:/tmp\]\r\n")
    assert "echo [$WORD" in seen
    assert handle.wait().exit_code == 0


@pytest.mark.proves("pty.resize")
def test_a_terminal_takes_a_new_size(sandbox):
    handle = sandbox.pty.create(PtySize(rows=24, cols=80))
    sandbox.pty.send_stdin(handle.pid, b"echo cols=$(tput cols).\n")
    read_until(handle, rb"cols=80\.")
    sandbox.pty.resize(handle.pid, PtySize(rows=50, cols=123))
    sandbox.pty.send_stdin(handle.pid, b"echo cols=$(tput cols).\n")
    read_until(handle, rb"cols=123\.")
    assert sandbox.pty.kill(handle.pid) is True


@pytest.mark.proves("pty.kill")
def test_a_terminal_is_killed_once(sandbox):
    handle = sandbox.pty.create(PtySize(rows=24, cols=80))
    assert sandbox.pty.kill(handle.pid) is True
    for _ in handle:
        pass
    assert sandbox.pty.kill(handle.pid) is False


@pytest.mark.proves("pty.connect")
def test_a_terminal_is_left_and_found_again(sandbox):
    handle = sandbox.pty.create(PtySize(rows=24, cols=80))
    handle.disconnect()
    again = sandbox.pty.connect(handle.pid)
    sandbox.pty.send_stdin(again.pid, b"echo back$((40+2))\n")
    read_until(again, rb"back42")
    sandbox.pty.kill(again.pid)
    with pytest.raises(NotFoundException):
        sandbox.pty.connect(999_999)


@pytest.mark.proves("pty.stream_input")
def test_input_streams_into_a_terminal(sandbox):
    handle = sandbox.pty.create(PtySize(rows=24, cols=80))
    sandbox.pty.stream_input(handle.pid, [b"echo str", b"eam$((1+1))\n"])
    read_until(handle, rb"stream2")
    sandbox.pty.kill(handle.pid)


@pytest.mark.proves("commands.list")
def test_a_terminal_is_in_the_list_of_commands(sandbox):
    handle = sandbox.pty.create(PtySize(rows=24, cols=80))
    mine = [p for p in sandbox.commands.list() if p.pid == handle.pid]
    assert [(p.cmd, p.args) for p in mine] == [("/bin/bash", ["-i", "-l"])]
    sandbox.pty.kill(handle.pid)
