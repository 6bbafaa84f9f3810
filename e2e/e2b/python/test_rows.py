"""What the acceptance list asks of code in a sandbox and no other test says."""

import base64
import os
import subprocess
import sys
import threading

import pytest

from e2b_code_interpreter import Sandbox

PROGRAM = "from e2b_code_interpreter import Sandbox\nwith Sandbox.create(timeout=600) as s: print(s.run_code('1+1').text)"


def program(**env):
    base = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    return subprocess.run([sys.executable, "-c", PROGRAM], env={**base, **env}, capture_output=True, text=True, timeout=600)


def addresses():
    return {name: os.environ[name] for name in ("E2B_API_URL", "E2B_SANDBOX_URL")}


def test_S0_1_S0_2_variables_alone_are_enough():
    done = program(**addresses(), E2B_API_KEY=os.environ["E2B_API_KEY"])
    assert done.stdout == "2\n", done.stderr


def test_S0_4_a_key_of_another_form_is_taken_when_the_sdks_check_is_off():
    """The server's keys are E2B's form and are taken also without it: `e2b_` is a word for clients that look."""
    key = os.environ["E2B_API_KEY"]
    done = program(**addresses(), E2B_API_KEY=key.removeprefix("e2b_"), E2B_VALIDATE_API_KEY="false")
    assert done.stdout == "2\n", done.stderr


@pytest.mark.proves("run_code")
def test_S0_20_a_result_has_all_its_parts(code):
    run = code.run_code("import sys; print('o'); print('e', file=sys.stderr); 42")
    assert (run.logs.stdout, run.logs.stderr, [r.text for r in run.results], run.error) == (["o\n"], ["e\n"], ["42"], None)


@pytest.mark.proves("run_code")
def test_S0_23_the_sum_of_squares(code):
    assert code.run_code("sum(i*i for i in range(1,101))").results[0].text == "338350"


@pytest.mark.proves("run_code")
def test_S0_26_an_error_is_readable(code):
    error = code.run_code("raise ValueError('what went wrong')").error
    assert isinstance(error.value, str) and "what went wrong" in f"{error}" and "ValueError" in f"{error}"


@pytest.mark.proves("run_code")
def test_S0_27_a_syntax_error_is_told_like_any_other(code):
    error = code.run_code("def (").error
    assert error.name == "SyntaxError" and error.value and "SyntaxError" in error.traceback


@pytest.mark.proves("run_code")
def test_S0_29_S0_30_variables_outlive_a_failure(make_code):
    sbx = make_code()
    sbx.run_code("x = 42")
    assert sbx.run_code("y = 1; 1/0").error.name == "ZeroDivisionError"
    assert sbx.run_code("print(x, y)").logs.stdout == ["42 1\n"]


@pytest.mark.proves("run_code")
def test_S0_31_imports_functions_and_frames_stay(code):
    code.run_code("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3]})")
    code.run_code("def total(frame): return int(frame['a'].sum())")
    assert code.run_code("total(df)").text == "6"


@pytest.mark.proves("run_code")
def test_S0_36_S0_38_S0_39_a_plot_needs_no_screen_and_is_a_picture(code):
    run = code.run_code("import matplotlib.pyplot as plt, numpy as np\nplt.plot(np.arange(3))\nplt.show()\nprint('Visualization created successfully')")
    assert run.error is None and run.logs.stdout == ["Visualization created successfully\n"]
    assert base64.b64decode(run.results[0].png).startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.proves("run_code")
def test_S0_40_a_warning_is_no_error(code):
    run = code.run_code("import warnings; warnings.warn('soon gone', FutureWarning)\nprint('went on')")
    assert run.error is None and "soon gone" in "".join(run.logs.stderr) and run.logs.stdout == ["went on\n"]


@pytest.mark.proves("run_code")
def test_S0_41_ten_cells_at_once_have_their_own_output(code):
    said = {}

    def run(n):
        said[n] = code.run_code(f"import time\nfor _ in range(3): print('{n}', flush=True); time.sleep(0.01)\n{n} * 2")

    threads = [threading.Thread(target=run, args=(n,)) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: ("".join(r.logs.stdout), r.text) for n, r in said.items()} == {n: (f"{n}\n" * 3, str(n * 2)) for n in range(10)}


@pytest.mark.slow
@pytest.mark.proves("Sandbox.create")
def test_S0_16_a_client_that_is_killed_leaves_nothing_past_the_lifetime(tag):
    from conftest import eventually

    from e2b import SandboxQuery

    code = f"from e2b_code_interpreter import Sandbox\nimport os\nSandbox.create(timeout=20, metadata={{'k': '{tag}'}})\nos.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == -9
    assert eventually(lambda: not Sandbox.list(query=SandboxQuery(metadata={"k": tag})).next_items())


@pytest.mark.proves("Sandbox.list")
def test_S0_18_a_list_tells_id_age_and_metadata(make, tag):
    from e2b import SandboxQuery

    sbx = make(metadata={"k": tag})
    (found,) = Sandbox.list(query=SandboxQuery(metadata={"k": tag})).next_items()
    assert (found.sandbox_id, found.metadata) == (sbx.sandbox_id, {"k": tag}) and found.started_at < found.end_at
