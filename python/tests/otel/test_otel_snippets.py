"""Snippets from the user's side: what cove.otel.run_snippet promises, against the server."""

import inspect
import os
import time

import pytest

from cove import Cove, CoveError
from cove.otel import ExecResult, arun_snippet, run_snippet


def test_S2_3_a_result_has_four_fields_of_plain_types():
    result = run_snippet("print(1)")
    assert result == ExecResult(exit_code=0, stdout="1\n", stderr="", timed_out=False)
    assert [type(value) for value in vars(result).values()] == [int, str, str, bool]


def test_S2_3_a_code_of_its_own_is_told_without_words_that_it_did_not_say() -> None:
    assert run_snippet("import sys; sys.exit(7)") == ExecResult(exit_code=7, stdout="", stderr="", timed_out=False)
    killed = run_snippet("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.exit_code == -9 and "SIGKILL" in killed.stderr


def test_S2_4_the_defaults():
    parameters = inspect.signature(run_snippet).parameters
    positional = {name: p.default for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert positional == {"code": inspect.Parameter.empty, "timeout": 10.0, "cpu_seconds": 8, "mem_mb": 128, "allowed_env_keys": None}


def test_S2_5_it_prints():
    assert run_snippet("print(2 ** 10)") == ExecResult(0, "1024\n", "", False)


def test_S2_6_code_may_be_indented_as_a_whole():
    result = run_snippet(
        """
        for n in range(2):
            print(n)
        """
    )
    assert (result.exit_code, result.stdout) == (0, "0\n1\n")


def test_S2_7_S2_8_the_callers_secrets_stay_with_it(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/the/caller")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-of-the-caller")
    code = "import os; print([os.environ.get(k, 'ABSENT') for k in ('PYTHONPATH', 'ANTHROPIC_API_KEY', 'COVE_API_KEY')])"
    assert run_snippet(code).stdout == "['ABSENT', 'ABSENT', 'ABSENT']\n"


ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def environment(result):
    import json

    # What the interpreter and the run add themselves: the locale Python coerces, and where its span is.
    own = {"LC_CTYPE", "COVE_RUN", "TRACEPARENT", "TRACESTATE", "PWD", "SHLVL", "_"}
    return {name: value for name, value in json.loads(result.stdout).items() if name not in own}


def test_S2_9_only_four_variables_are_forwarded_and_none_is_made_up(monkeypatch):
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.delenv("LC_ALL", raising=False)
    assert environment(run_snippet(ENVIRONMENT)) == {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


def test_S2_10_an_own_list_is_all_that_is_forwarded(monkeypatch):
    monkeypatch.setenv("FOO", "1")
    monkeypatch.setenv("BAR", "2")
    assert environment(run_snippet(ENVIRONMENT, allowed_env_keys=["FOO", "NOT_SET_ANYWHERE"])) == {"FOO": "1"}
    assert environment(run_snippet(ENVIRONMENT, allowed_env_keys=[])) == {}


def test_S2_9_a_path_that_means_nothing_inside_does_no_harm(monkeypatch):
    monkeypatch.setenv("PATH", "/opt/of/the/caller")
    assert run_snippet("print(1)").stdout == "1\n"


def test_S2_11_S2_12_S2_13_a_timeout_is_prompt_and_keeps_the_output():
    begun = time.monotonic()
    result = run_snippet("import time; print('before', flush=True); time.sleep(3600)", timeout=10.0)
    assert (result.exit_code, result.stdout, result.timed_out) == (-1, "before\n", True)
    assert 10 <= time.monotonic() - begun < 300  # not the hour that it wanted; a slow machine makes sandboxes slowly


def test_S2_14_ignoring_the_signal_does_not_help():
    code = "import signal, time\nfor s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)\ntime.sleep(3600)"
    assert run_snippet(code, timeout=1).timed_out


def test_S2_15_what_it_started_ends_with_it():
    with Cove().create() as sandbox:
        code = "import subprocess, time; subprocess.Popen(['sleep', '4002'], start_new_session=True); time.sleep(3600)"
        assert run_snippet(code, timeout=1, sandbox=sandbox.id).timed_out
        assert sandbox.exec("pgrep -x sleep || echo none").stdout == "none\n"


def test_S2_16_processor_time_is_limited_apart_from_wall_time():
    result = run_snippet("while True: pass", timeout=300, cpu_seconds=1)
    assert result.exit_code != 0 and not result.timed_out and result.stderr != ""


def test_S2_17_S2_19_memory_is_limited_for_each_call():
    code = "x = bytearray(200 << 20); print(len(x))"
    small, large = run_snippet(code), run_snippet(code, mem_mb=512)
    assert small.exit_code != 0 and "MemoryError" in small.stderr
    assert (large.exit_code, large.stdout) == (0, f"{200 << 20}\n")


def test_S2_18_open_files_are_limited():
    result = run_snippet("f = [open('/dev/null') for _ in range(40)]")
    assert result.exit_code == 1 and "Too many open files" in result.stderr


def test_S2_20_nothing_is_carried_over():
    run_snippet("z = 1; open('/tmp/z', 'w').write('1')")
    result = run_snippet("import os; print(os.path.exists('/tmp/z')); z")
    assert (result.exit_code, result.stdout) == (1, "False\n") and "NameError" in result.stderr


def test_S2_21_the_code_is_in_no_command_line_and_no_file():
    code = (
        "import glob, os\nmark = 'sesa' + 'me-open'\n"
        "print([p for p in glob.glob('/proc/[0-9]*/cmdline') if b'me-open' in open(p, 'rb').read()], os.listdir('/tmp'))"
    )
    assert run_snippet(code).stdout == "[] []\n"


def test_S2_22_bytes_that_are_no_text_are_replaced():
    result = run_snippet("import sys; sys.stdout.buffer.write(b'a\\xff\\xfeb')")
    assert (result.exit_code, result.stdout[0], set(result.stdout[1:-1]), result.stdout[-1]) == (0, "a", {"\ufffd"}, "b")


def test_S2_23_exit_codes_and_signals_are_told():
    assert run_snippet("import sys; sys.exit(3)").exit_code == 3
    assert run_snippet("import os; os.kill(os.getpid(), 11)").exit_code == -11


def test_S2_55_nothing_leaves_unless_asked_for():
    code = "import socket; socket.create_connection(('1.1.1.1', 53), timeout=3)"
    result = run_snippet(code)
    assert result.exit_code == 1 and any(word in result.stderr for word in ("ConnectionRefusedError", "Network is unreachable")), result.stderr
    names = run_snippet("import socket; socket.getaddrinfo('example.com', 80)")
    assert names.exit_code == 1 and "gaierror" in names.stderr


def test_S2_56_memory_of_the_host_is_safe():
    result = run_snippet("x = []\nwhile True: x.append(bytearray(1 << 20))", mem_mb=256)
    assert result.exit_code != 0 and not result.timed_out and result.stderr != ""


def test_S2_66_a_missing_module_is_named():
    assert "ModuleNotFoundError: No module named 'not_there'" in run_snippet("import not_there").stderr


def test_S2_66_too_little_memory_for_python_is_told():
    result = run_snippet("print(1)", mem_mb=4)
    assert result.exit_code != 0 and result.stderr != ""


def test_S2_66_a_server_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setenv("COVE_URL", "http://127.0.0.1:9")
    with pytest.raises(CoveError, match="127.0.0.1:9"):
        run_snippet("print(1)")


def test_code_of_more_than_an_argument_may_be():
    assert run_snippet("#" * 300_000 + "\nprint('long')").stdout == "long\n"


async def test_S2_3_the_same_for_coroutines():
    assert await arun_snippet("print(1)") == ExecResult(0, "1\n", "", False)
