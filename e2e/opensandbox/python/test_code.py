"""The code interpreter package, synchronous."""

import threading
import time

import pytest

from code_interpreter import CodeInterpreterSync, SupportedLanguage
from conftest import NEWEST, err, out
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.models.execd_sync import ExecutionHandlersSync

proves = pytest.mark.proves
run = proves("codes.run")

# A cell that writes a file of its own and waits for another one, which a cell elsewhere or the test writes.
MEETS = """
import os, time
open('{folder}/{own}', 'w').close()
until = time.monotonic() + 120
while not os.path.exists('{folder}/{other}'):
    assert time.monotonic() < until, 'the other one never comes'
    time.sleep(0.01)
'met'
"""


def text(execution):
    return "".join(m.text for m in execution.logs.stdout)


@proves("CodeInterpreter.create", "codes.run")
def test_an_interpreter_is_ready_at_once(make):
    sbx = make(entrypoint=["/opt/code-interpreter/code-interpreter.sh"])
    began = time.monotonic()
    interpreter = CodeInterpreterSync.create(sbx)
    assert interpreter.codes.run("2 + 2").result[0].text == "4"
    assert time.monotonic() - began < 50
    assert interpreter.id == sbx.id


@run
def test_values_output_and_counts(code):
    execution = code.codes.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7", language=SupportedLanguage.PYTHON)
    assert [r.text for r in execution.result] == ["42"]
    assert text(execution) == "out\n" and err(execution).strip() == "err"
    assert execution.error is None and execution.execution_count >= 1 and execution.id


@run
def test_state_stays_in_the_default_context(code):
    code.codes.run("x = 41")
    assert code.codes.run("x + 1").result[0].text == "42"


@run
def test_an_exception_has_a_name_and_a_traceback(code):
    execution = code.codes.run("def f():\n    return undefined_name\nf()")
    assert execution.error.name == "NameError"
    assert "undefined_name" in execution.error.value
    assert any("undefined_name" in line for line in execution.error.traceback)
    assert code.codes.run("1").result[0].text == "1"


@run
def test_a_program_that_exits_is_an_error_and_its_variables_stay(code):
    """As in the notebook kernels of upstream's image."""
    context = code.codes.create_context("python")
    stopped = code.codes.run("kept = 41\nimport sys\nsys.exit(3)", context=context)
    assert (stopped.error.name, stopped.error.value) == ("SystemExit", "3")
    after = code.codes.run("kept + 1", context=context)
    assert after.result[0].text == "42" and after.logs.stderr == []
    code.codes.delete_context(context.id)


@proves("codes.create_context", "codes.get_context", "codes.list_contexts", "codes.delete_context", "codes.delete_contexts")
def test_contexts_are_apart(code):
    a = code.codes.create_context(SupportedLanguage.PYTHON)
    b = code.codes.create_context(SupportedLanguage.PYTHON)
    assert a.id != b.id and a.language == "python"
    code.codes.run("x = 'a'", context=a)
    code.codes.run("x = 'b'", context=b)
    assert code.codes.run("x", context=a).result[0].text == "'a'"
    assert code.codes.get_context(a.id).id == a.id
    assert {a.id, b.id} <= {c.id for c in code.codes.list_contexts("python")}
    code.codes.delete_context(a.id)
    with pytest.raises(SandboxApiException) as gone:
        code.codes.get_context(a.id)
    assert (gone.value.status_code, gone.value.error.code) == (404, "CONTEXT_NOT_FOUND")
    code.codes.delete_contexts("python")
    assert code.codes.list_contexts("python") == []


@run
def test_contexts_run_at_the_same_time(code, folder):
    a, b = (code.codes.create_context("python") for _ in range(2))
    met = []

    def meet(context, own, other):
        met.append(code.codes.run(MEETS.format(folder=folder, own=own, other=other), context=context).result[0].text)

    threads = [threading.Thread(target=meet, args=args) for args in ((a, "a", "b"), (b, "b", "a"))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert met == ["'met'", "'met'"]
    for c in (a, b):
        code.codes.delete_context(c.id)


@proves("codes.interrupt")
def test_an_interrupt_leaves_the_context_usable(code):
    context = code.codes.create_context("python")
    code.codes.run("kept = 1", context=context)
    began = time.monotonic()
    interrupt = lambda event: threading.Thread(target=lambda: code.codes.interrupt(event.id)).start()  # noqa: E731
    execution = code.codes.run("import time\ntime.sleep(3600)", context=context, handlers=ExecutionHandlersSync(on_init=interrupt))
    assert time.monotonic() - began < 100
    assert execution.error.name == "KeyboardInterrupt"
    assert code.codes.run("kept + 1", context=context).result[0].text == "2"
    with pytest.raises(SandboxException):
        code.codes.interrupt("none")
    code.codes.delete_context(context.id)


@run
def test_output_comes_while_code_runs(code, folder):
    seen = []

    def heard(message):
        seen.append(message.text)
        if "".join(seen).strip() == "a":
            code.sandbox.files.write_file(f"{folder}/b", "the first line is here")

    source = "print('a', flush=True)\n" + MEETS.format(folder=folder, own="a", other="b")
    execution = code.codes.run(source, handlers=ExecutionHandlersSync(on_stdout=heard))
    assert "".join(seen).strip() == "a" and execution.result[0].text == "'met'"


@run
@pytest.mark.parametrize(
    ("language", "source", "expected"),
    [("bash", "echo $((6 * 7))", "42"), ("javascript", "console.log(6 * 7)", "42"), ("typescript", "const x: number = 42; console.log(x)", "42")],
)
def test_other_languages(code, language, source, expected):
    execution = code.codes.run(source, language=language)
    assert execution.error is None, execution.error
    assert text(execution).strip() == expected


@proves("codes.run", "codes.interrupt")
def test_java_where_the_image_has_it(code):
    """The names of errors are those of Jupyter's kernel of Java, and an interrupt counts while the kernel still starts."""
    try:
        context = code.codes.create_context("java")
    except SandboxException as refused:
        assert "java" in str(refused)
        pytest.skip(str(refused))
    stop = ExecutionHandlersSync(on_init=lambda e: code.codes.interrupt(context.id))
    stopped = code.codes.run("while (true) {}", context=context, handlers=stop)
    assert stopped.error is not None and stopped.error.value
    four = code.codes.run('System.out.println("Hello");\nint result = 2 + 2;\nresult', context=context)
    assert text(four).strip() == "Hello" and four.result[0].text == "4"
    thrown = code.codes.run("int x = 10 / 0;", context=context)
    assert thrown.error.name == "EvalException" and "by zero" in thrown.error.value
    code.codes.delete_context(context.id)


@run
def test_bash_and_javascript_keep_state(code):
    for language, first, second in (("bash", "A=41", "echo $((A + 1))"), ("javascript", "var a = 41", "console.log(a + 1)")):
        context = code.codes.create_context(language)
        code.codes.run(first, context=context)
        assert text(code.codes.run(second, context=context)).strip() == "42"
        code.codes.delete_context(context.id)


@proves("codes.run", "codes.create_context")
def test_a_language_that_is_not_there_says_so(code):
    for language in ("cobol", "go", "java"):
        try:
            execution = code.codes.run("1", language=language)
        except SandboxException as refused:
            assert language in str(refused).lower()
        else:
            if execution.error is not None:
                assert language in (execution.error.value + execution.error.name).lower()
            else:
                assert language != "cobol"


@run
def test_what_a_command_makes_code_can_change_and_the_other_way(code, sandbox, folder):
    sandbox.commands.run(f"echo made > {folder}/f")
    execution = code.codes.run(f"open('{folder}/f', 'a').write('changed\\n')\nopen('{folder}/g', 'w').write('x')")
    assert execution.error is None, execution.error
    assert out(sandbox.commands.run(f"cat {folder}/f && rm {folder}/f {folder}/g")) == ["made", "changed"]


@run
def test_a_chart_is_a_result(code, wire):
    """Upstream loses them; the synchronous SDK shows a result's text only, so the wire is looked at."""
    endpoint = code.sandbox.get_endpoint(44772)
    source = "import matplotlib\nmatplotlib.use('agg')\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
    answer = wire.at(endpoint, "POST", "/code", json={"code": source, "context": {"language": "python"}}, timeout=600)
    assert '"image/png"' in answer.text


@run
def test_a_busy_context_says_so(code):
    context = code.codes.create_context("python")
    inits = threading.Event()
    thread = threading.Thread(target=lambda: code.codes.run("import time; time.sleep(1.5)", context=context, handlers=ExecutionHandlersSync(on_init=lambda e: inits.set())))
    thread.start()
    assert inits.wait(100)
    time.sleep(0.2)
    try:
        second = code.codes.run("1", context=context)
    except SandboxException:
        pass
    else:
        assert second.error is not None or second.result[0].text == "1"  # refused, or run when its turn came
    thread.join()
    code.codes.delete_context(context.id)


@proves("CodeInterpreter.ping", "CodeInterpreter.is_healthy")
@pytest.mark.newest
def test_the_strict_health_check(code):
    assert NEWEST and code.ping() and code.is_healthy()
