"""Commands: a real shell, limits that answer before the client gives up, and one execution however often it is asked for."""

import base64
import time

import pytest
from conftest import VERSION


def test_output_errors_and_exit_code_are_apart(sandbox):
    got = sandbox.commands.run("echo out; echo err >&2; exit 7")
    assert (got.stdout, got.stderr, got.exit_code) == ("out\n", "err\n", 7)


@pytest.mark.parametrize(("command", "stdout"), [
    ("for i in 1 2 3; do echo $i; done | sort -r | head -n 1", "3\n"),
    ("cat <<'END'\nä $HOME `x`\nEND", "ä $HOME `x`\n"),
    ("python3 -c 'import sys; print(\"in quotes\", sys.argv)'", "in quotes ['-c']\n"),
    ("pwd", "/app\n"),
    ("printf 'a\\0b'", "a\0b"),
    ("printf '\\377'", "�"),
    ("echo $((6 * 7)) && false || echo or", "42\nor\n"),
])
def test_a_real_shell_reads_them(sandbox, command, stdout):
    assert sandbox.commands.run(command).stdout == stdout


def test_a_command_of_200_kB(sandbox):
    body = base64.b64encode(b"x" * 150_000).decode()
    got = sandbox.commands.run(f"base64 -d <<'END' | wc -c\n{body}\nEND")
    assert (got.stdout.strip(), got.exit_code) == ("150000", 0)


def test_a_command_that_there_is_not(sandbox):
    got = sandbox.commands.run("no-such-program")
    assert got.exit_code == 127 and "no-such-program" in got.stderr


def test_files_stay_between_commands_and_variables_do_not(sandbox, folder):
    sandbox.commands.run(f"cd {folder} && export X=1 && echo kept > kept")
    assert sandbox.commands.run(f'cat {folder}/kept; pwd; echo "${{X:-none}}"').stdout == "kept\n/app\nnone\n"


def test_S1_29_S1_30_S1_32_over_its_time_a_command_ends_with_124_and_ran_once(sandbox, folder):
    begun = time.monotonic()
    got = sandbox.commands.run(f"echo run >> {folder}/counter; echo before; sleep 3600", timeout=20)
    took = time.monotonic() - begun
    assert got.exit_code == 124, got
    assert got.stdout == "before\n"
    assert "killed" in got.stderr
    assert took < (60 if VERSION < (0, 5) else 25)
    assert sandbox.commands.run(f"cat {folder}/counter").stdout == "run\n"
    assert sandbox.commands.run("echo usable").stdout == "usable\n"


def test_S1_31_the_whole_tree_is_killed(sandbox, folder):
    sandbox.commands.run(f"(sleep 3600; touch {folder}/late) & sleep 3600", timeout=1)
    # A client whose own clock runs out asks before the server has acted: the sleeps have a minute to end, not an hour.
    until = time.monotonic() + 60
    while (left := sandbox.commands.run("pgrep -x sleep").stdout) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == ""


def test_in_time_nothing_is_cut(sandbox):
    got = sandbox.commands.run("sleep 1; echo done", timeout=60)
    assert (got.stdout, got.exit_code) == ("done\n", 0)


def test_a_background_process_lives_on(sandbox, folder):
    got = sandbox.commands.run(f"nohup sh -c 'sleep 1; echo later > {folder}/later' >/dev/null 2>&1 & echo started")
    assert got.stdout == "started\n"
    got = sandbox.commands.run(f"until [ -s {folder}/later ]; do sleep 0.05; done; cat {folder}/later", timeout=120)
    assert got.stdout == "later\n"


def test_the_same_command_twice_is_run_twice(sandbox, folder):
    for _ in range(2):
        assert sandbox.commands.run(f"echo run >> {folder}/counter").exit_code == 0
    assert sandbox.commands.run(f"cat {folder}/counter").stdout == "run\nrun\n"


@pytest.mark.since(1, 0)
def test_a_limit_of_the_command_itself(sandbox):
    got = sandbox.commands.run("echo before; sleep 3600", command_timeout=10)
    assert (got.exit_code, got.timed_out, got.stdout) == (124, True, "before\n")


def test_much_output(sandbox):
    got = sandbox.commands.run("seq 200000")
    assert got.stdout.splitlines()[-1] == "200000" and len(got.stdout.splitlines()) == 200000
