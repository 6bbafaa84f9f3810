"""The old names of the interpreter, over the official SDK against the server."""

import json
import os

import pytest
from e2b import Sandbox
from e2b.exceptions import SandboxException

from cove.e2b import AsyncCodeInterpreter, CellError, CodeInterpreter, Lines

SQUARES = "sum(i*i for i in range(1,101))"


def test_S0_5_the_constructor_makes_a_sandbox_and_close_ends_it(gone):
    sandbox = CodeInterpreter()
    assert sandbox.id == sandbox.sandbox_id != ""
    assert sandbox.notebook.exec_cell(SQUARES).results[0].text == "338350"
    assert sandbox.close() is True
    assert gone(sandbox.id)


def test_S0_5_the_constructor_takes_a_lifetime():
    with CodeInterpreter(timeout=300) as sandbox:
        info = sandbox.get_info()
        assert (info.end_at - info.started_at).total_seconds() == pytest.approx(300, abs=5)


def test_S0_5_S0_17_the_constructor_finds_a_sandbox_again(sandbox):
    sandbox.notebook.exec_cell("kept = 7")
    again = CodeInterpreter(sandbox_id=sandbox.id)
    assert (again.id, again.notebook.exec_cell("kept").results[0].text) == (sandbox.id, "7")


def test_S0_5_a_with_block_ends_the_sandbox(guide, gone):
    ran = guide("ephemeral")
    assert ran.greeting == "good morning\n"
    assert gone(ran.sandbox.id)


def test_S0_9_a_with_block_ends_the_sandbox_when_it_raises(gone):
    with pytest.raises(RuntimeError), CodeInterpreter() as sandbox:
        raise RuntimeError
    assert gone(sandbox.id)


def test_S0_12_closing_twice_is_harmless():
    sandbox = CodeInterpreter()
    assert (sandbox.close(), sandbox.close()) == (True, False)


def test_S0_5_S0_30_the_guides_long_lived_sandbox(guide, gone):
    ran = guide("long_lived")
    assert ran.basket == "pear plum\n" and gone(ran.desk.id)


def test_S0_14_the_guides_timeout(guide):
    with guide("timeout").sandbox as sandbox:
        info = sandbox.get_info()
        assert (info.end_at - info.started_at).total_seconds() == pytest.approx(90, abs=5)
        assert sandbox.notebook.exec_cell("1").results[0].text == "1"


def test_S0_76_the_guides_resources(guide):
    ran = guide("resources")
    made = [ran.small, ran.long]
    assert [sandbox.notebook.exec_cell("1").results[0].text for sandbox in made] == ["1", "1"]
    assert [sandbox.close() for sandbox in made] == [True, True]


def test_S0_73_the_guides_cleanup(guide, gone):
    ran = guide("cleanup")
    assert ran.ended is True and gone(ran.by_block.id) and gone(ran.by_hand.id)


def test_S0_33_the_guides_installation_of_packages(guide, gone):
    program = guide("dependencies", tables=["n\n1\n2", "n\n7"])
    installed, *read = program.ran
    assert installed.error is None, installed.error
    assert "scikit-learn" in installed.logs.stdout
    assert [(cell.error, [value.text for value in cell.results]) for cell in read] == [(None, ["2"]), (None, ["1"])]
    assert gone(program.desk.id)


def test_S0_6_output_is_a_list_and_a_text(sandbox):
    out = sandbox.notebook.exec_cell("print('a')\nprint('b')").logs.stdout
    text = "a\nb\n"
    assert isinstance(out, list)
    assert "" + out == out + "" == "".join(out) == f"{out}" == str(out) == "%s" % out == text
    assert json.loads(json.dumps(out)) == list(out)
    joined = "x"
    joined += out
    assert joined == "xa\nb\n"
    grown = out
    grown += "!"
    assert grown == "a\nb\n!" and out == text


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (Lines(["a", "b"]) + ["c"], ["a", "b", "c"]),
        (["z"] + Lines(["a"]), ["z", "a"]),
        (Lines(["ab", "cd"]) == "abcd", True),
        (Lines(["ab"]) == ["ab"], True),
        (Lines(["ab"]) != "ab", False),
        ("bc" in Lines(["ab", "cd"]), True),
        (1 in Lines(["1"]), False),
        (f"{Lines(['ab']):>4}", "  ab"),
        (Lines([" a\n"]).strip(), "a"),
        (bool(Lines()), False),
        (Lines() or "nothing", "nothing"),
    ],
)
def test_S0_6_lines_do_what_lists_and_texts_do(got, want):
    assert got == want


def test_S0_6_lines_have_no_made_up_methods():
    with pytest.raises(AttributeError):
        Lines().nothing_like_it


def test_S0_25_S0_26_an_error_prints_readably(sandbox):
    execution = sandbox.notebook.exec_cell("print(1); 1/0")
    error = execution.error
    assert isinstance(error, CellError) and execution.logs.stdout == "1\n"
    assert (error.name, error.value) == ("ZeroDivisionError", "division by zero")
    assert str(error).startswith("ZeroDivisionError: division by zero") and "Traceback" in f"{error}"


def test_S0_28_a_sandbox_that_is_gone_raises():
    sandbox = CodeInterpreter()
    sandbox.close()
    with pytest.raises(SandboxException):
        sandbox.notebook.exec_cell("1")


WAITS = """
import os, time
print("now", flush=True)
until = time.monotonic() + 600
while not os.path.exists("/tmp/heard") and time.monotonic() < until:
    time.sleep(0.02)
os.path.exists("/tmp/heard")
"""


def test_S0_85_callbacks_hear_output_while_the_cell_runs(sandbox):
    """The cell waits for the file that the callback makes."""
    heard = []

    def hear(message):
        heard.append(str(message))
        sandbox.files.write("/tmp/heard", "")

    execution = sandbox.notebook.exec_cell(WAITS, on_stdout=hear)
    assert (heard, execution.results[0].text) == (["now\n"], "True")


def test_the_rest_of_the_sdk_is_there(sandbox):
    sandbox.files.write("note.txt", "of the SDK")
    assert sandbox.commands.run("cat note.txt").stdout == "of the SDK"
    assert isinstance(sandbox, Sandbox)


def test_S0_1_E2Bs_variables_win(sandbox, monkeypatch):
    monkeypatch.setenv("E2B_API_URL", os.environ["COVE_URL"])
    monkeypatch.setenv("E2B_SANDBOX_URL", os.environ["COVE_URL"])
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
    with pytest.raises(Exception, match="(?i)key"):
        CodeInterpreter()


async def test_S0_5_the_same_for_coroutines(gone):
    async with await AsyncCodeInterpreter.create() as sandbox:
        execution = await sandbox.notebook.exec_cell("print('a'); 1/0")
        assert (execution.logs.stdout, execution.error.name, sandbox.id) == ("a\n", "ZeroDivisionError", sandbox.sandbox_id)
        assert await sandbox.close() is True
    assert gone(sandbox.id)
