"""Running code: results, output, errors, languages, contexts."""

import base64
import threading
import time

import pytest
from conftest import eventually

from e2b import InvalidArgumentException, NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import Context


def meet(folder, own, other):
    """Lines of a cell that make a file and wait for another one, which a cell elsewhere or the test makes."""
    return f"""import os, time
open('{folder}/{own}', 'w').close()
until = time.monotonic() + 120
while not os.path.exists('{folder}/{other}'):
    assert time.monotonic() < until, 'the other one never comes'
    time.sleep(0.01)
"""


@pytest.mark.proves("run_code")
def test_S0_20_S0_23_the_value_of_the_last_line(code):
    run = code.run_code("x = 1\nx + 1")
    assert (run.text, run.error) == ("2", None)
    assert [r.is_main_result for r in run.results] == [True]
    assert run.logs.stdout == [] and run.logs.stderr == []


@pytest.mark.proves("run_code")
def test_S0_24_nothing_to_say(code):
    run = code.run_code("x = 1")
    assert (run.text, run.results, run.error) == (None, [], None)


@pytest.mark.proves("run_code")
def test_S0_30_state_stays(code):
    code.run_code("import math\ndef area(r): return math.pi * r * r\nradius = 2")
    assert code.run_code("round(area(radius), 3)").text == "12.566"


@pytest.mark.proves("run_code")
def test_quotes_around_a_text_are_taken_off(code):
    assert code.run_code("'plain'").text == "plain"
    assert code.run_code('"it\'s"').text == "it's"


@pytest.mark.proves("run_code")
def test_S0_21_S0_22_S0_85_output_streams_apart_and_in_order(code, tag):
    heard = []

    def hear(message):
        heard.append((message.line, message.error))
        if len(heard) == 2:
            code.files.write(f"/tmp/{tag}/two", "both lines are here")

    code.files.make_dir(f"/tmp/{tag}")
    run = code.run_code(
        "import sys\nprint('one', flush=True)\nprint('two', file=sys.stderr, flush=True)\n" + meet(f"/tmp/{tag}", "one", "two") + "print('three')",
        on_stdout=hear,
        on_stderr=hear,
    )
    assert run.error is None, run.error
    assert "".join(run.logs.stdout) == "one\nthree\n" and "".join(run.logs.stderr) == "two\n"
    assert sorted(heard[:2]) == [("one\n", False), ("two\n", True)]
    assert heard[2:] == [("three\n", False)]


@pytest.mark.proves("run_code")
def test_S0_25_S0_27_an_exception_is_a_result_not_a_failure(code):
    heard = []
    run = code.run_code("print('before')\n1/0", on_error=heard.append)
    assert run.logs.stdout == ["before\n"]
    assert (run.error.name, run.error.value) == ("ZeroDivisionError", "division by zero")
    assert "ZeroDivisionError" in run.error.traceback and "\x1b[" not in run.error.traceback
    assert heard == [run.error]
    assert code.run_code("def (").error.name == "SyntaxError"
    assert code.run_code("1").text == "1"


@pytest.mark.proves("run_code")
def test_executions_are_counted(make_code):
    sbx = make_code()
    assert [sbx.run_code("1").execution_count for _ in range(3)] == [1, 2, 3]


@pytest.mark.proves("run_code")
def test_envs_of_one_run(make_code):
    sbx = make_code(envs={"GLOBAL": "g"})
    get = "import os; (os.getenv('GLOBAL'), os.getenv('ONCE'))"
    assert sbx.run_code(get, envs={"ONCE": "o", "GLOBAL": "mine"}).text == "('mine', 'o')"
    assert sbx.run_code(get).text == "('g', None)"


@pytest.mark.proves("run_code")
def test_display_shows_without_being_the_result(code):
    heard = []
    run = code.run_code("from IPython.display import display, HTML\ndisplay(HTML('<b>x</b>'))\n7", on_result=heard.append)
    assert [(r.html, r.is_main_result) for r in run.results] == [("<b>x</b>", False), (None, True)]
    assert run.text == "7" and len(heard) == 2


@pytest.mark.parametrize(
    "key, expression, want",
    [
        ("html", "HTML('<i>h</i>')", "<i>h</i>"),
        ("markdown", "Markdown('# m')", "# m"),
        ("svg", "SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"></svg>')", None),
        ("latex", "Latex('$x$')", "$x$"),
        ("json", "JSON({'a': [1]})", {"a": [1]}),
        ("javascript", "Javascript('1+1')", "1+1"),
    ],
)
@pytest.mark.proves("run_code")
def test_results_of_every_kind(code, key, expression, want):
    run = code.run_code(f"from IPython.display import *\n{expression}")
    assert run.error is None
    got = getattr(run.results[0], key)
    assert got == want if want is not None else "svg" in got
    assert key in run.results[0].formats()


@pytest.mark.parametrize("mime, key", [("image/jpeg", "jpeg"), ("image/png", "png"), ("application/pdf", "pdf")])
@pytest.mark.proves("run_code")
def test_bytes_are_results_in_base64(code, mime, key):
    run = code.run_code(
        f"class Shown:\n def _repr_mimebundle_(self, **kw):\n  import base64; return {{'{mime}': base64.b64encode(b'bytes').decode()}}\nShown()"
    )
    assert base64.b64decode(getattr(run.results[0], key)) == b"bytes"


@pytest.mark.proves("run_code")
def test_kinds_that_nobody_knows_are_extra(code):
    run = code.run_code("class Shown:\n def _repr_mimebundle_(self, **kw): return {'application/x-own': 'mine', 'text/plain': 'p'}\nShown()")
    assert run.results[0].extra == {"application/x-own": "mine"} and run.text == "p"


@pytest.mark.proves("run_code")
def test_lists_and_dicts_are_also_json(code):
    assert code.run_code("{'a': [1, 2, None]}").results[0].json == {"a": [1, 2, None]}
    assert code.run_code("[1, 'two']").results[0].json == [1, "two"]


@pytest.mark.proves("run_code")
def test_a_dataframe_is_also_data(code):
    run = code.run_code("import pandas as pd\npd.DataFrame({'a': [1, 2], 't': pd.to_datetime(['2024-01-01', '2024-01-02'])})")
    assert run.results[0].data["a"] == [1, 2]
    assert run.results[0].data["t"][0].startswith("2024-01-01")
    assert "<table" in run.results[0].html and run.text


@pytest.mark.proves("run_code")
def test_S0_39_a_figure_is_a_picture_and_a_chart(code):
    run = code.run_code("import matplotlib.pyplot as plt\nplt.plot([1, 2, 3], [4, 5, 6])\nplt.title('T')\nplt.show()")
    assert run.error is None
    shown = [r for r in run.results if r.png]
    assert base64.b64decode(shown[0].png).startswith(b"\x89PNG")
    assert (shown[0].chart.type.value, shown[0].chart.title) == ("line", "T")


@pytest.mark.proves("run_code")
def test_a_picture_of_pillow_is_shown(code):
    run = code.run_code("from PIL import Image\nImage.new('RGB', (2, 2)).show()")
    assert run.error is None and any(r.png for r in run.results)
    run = code.run_code("Image.new('RGB', (2, 2)).save('/tmp/p.png')")
    assert run.error is None and any(r.png for r in run.results)


@pytest.mark.proves("run_code")
def test_top_level_await_magics_and_shell_lines(code):
    assert code.run_code("import asyncio\nawait asyncio.sleep(0, 'awaited')").text == "awaited"
    assert "".join(code.run_code("!echo from the shell").logs.stdout).strip() == "from the shell"
    assert code.run_code("%timeit -n1 -r1 1+1").error is None
    assert code.run_code("%%bash\necho cell").logs.stdout == ["cell\n"]


@pytest.mark.proves("run_code")
def test_S0_33_a_bare_pip_line_is_pip(code):
    for line in ("pip --version", "!pip --version", "%pip --version"):
        run = code.run_code(line)
        assert run.error is None and "pip" in "".join(run.logs.stdout), line


@pytest.mark.proves("run_code")
def test_unicode_and_long_output(code):
    text = "ö€😀" * 20_000
    assert "".join(code.run_code(f"print('ö€😀' * 20_000)").logs.stdout) == text + "\n"
    assert code.run_code("'ö€😀'").text == "ö€😀"


@pytest.mark.proves("run_code")
def test_S0_53_S0_54_S0_60_a_timeout_interrupts_and_keeps_the_state(make_code):
    sbx = make_code()
    sbx.run_code("kept = 5")
    with pytest.raises(TimeoutException):
        sbx.run_code("while True: pass", timeout=1)
    begun = time.monotonic()
    assert sbx.run_code("kept").text == "5"
    assert time.monotonic() - begun < 50


@pytest.mark.proves("run_code")
def test_S0_66_an_exit_and_a_crash_are_told_and_survived(make_code):
    sbx = make_code()
    run = sbx.run_code("exit()")
    assert run.error is None or run.error.name
    assert sbx.run_code("1+1").text == "2"
    run = sbx.run_code("import os; os._exit(3)")
    assert run.error is not None and run.error.value
    assert sbx.run_code("1+1").text == "2"
    run = sbx.run_code("import os; os.kill(os.getpid(), 11)")
    assert run.error is not None
    assert sbx.run_code("1+1").text == "2"


@pytest.mark.proves("run_code")
def test_S0_58_out_of_memory_is_told_and_survived(make_code):
    sbx = make_code()
    run = sbx.run_code("held = []\nwhile True: held.append(b'x' * 50_000_000)")
    assert run.error is not None
    assert "memory" in f"{run.error.name} {run.error.value} {run.error.traceback}".lower()
    assert eventually(lambda: sbx.run_code("1+1").text) == "2"


@pytest.mark.proves("run_code", "Sandbox.kill")
def test_a_kill_in_the_middle_is_told(make_code):
    sbx = make_code()
    kill = threading.Thread(target=sbx.kill)
    with pytest.raises(TimeoutException, match="killed"):
        sbx.run_code("import time; print('begun', flush=True); time.sleep(3600)", on_stdout=lambda _: kill.start(), timeout=120)
    kill.join()


@pytest.mark.proves("run_code")
def test_S0_41_runs_of_one_context_queue_and_those_of_two_do_not(code, tag):
    other = code.create_code_context()
    code.files.make_dir(f"/tmp/{tag}")
    code.run_code("order = []")
    mine = "order.append('in')\n" + meet(f"/tmp/{tag}", "mine", "other") + "time.sleep(0.2)\norder.append('out')"
    done = []
    threads = [
        threading.Thread(target=lambda source=source, kw=kw: done.append(code.run_code(source, timeout=300, **kw)))
        for source, kw in ((mine, {}), (mine, {}), (meet(f"/tmp/{tag}", "other", "mine"), {"context": other}))
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [d.error for d in done] == [None] * 3
    assert code.run_code("order").text == "['in', 'out', 'in', 'out']"
    code.remove_code_context(other)


@pytest.mark.proves("create_code_context", "run_code")
def test_contexts_keep_apart(code):
    ctx = code.create_code_context()
    assert ctx.id and ctx.language == "python" and ctx.cwd == "/home/user"
    code.run_code("who = 'default'")
    code.run_code("who = 'own'", context=ctx)
    assert code.run_code("who").text == "default"
    assert code.run_code("who", context=ctx).text == "own"
    with pytest.raises(InvalidArgumentException):
        code.run_code("1", context=ctx, language="python")
    code.remove_code_context(ctx)


@pytest.mark.proves("create_code_context")
def test_a_context_has_its_own_directory(code):
    code.files.make_dir("/home/user/elsewhere")
    ctx = code.create_code_context(cwd="/home/user/elsewhere")
    assert ctx.cwd == "/home/user/elsewhere"
    assert code.run_code("import os; os.getcwd()", context=ctx).text == "/home/user/elsewhere"
    assert code.run_code("import os; os.getcwd()").text == "/home/user"
    code.remove_code_context(ctx.id)


@pytest.mark.proves("list_code_contexts")
def test_the_list_begins_with_the_defaults(make_code):
    sbx = make_code()
    before = sbx.list_code_contexts()
    assert [c.language for c in before] == ["python", "javascript"]
    ctx = sbx.create_code_context(language="python")
    assert [c.id for c in sbx.list_code_contexts()] == [c.id for c in before] + [ctx.id]


@pytest.mark.proves("restart_code_context")
def test_a_restart_forgets_and_keeps_the_id(code):
    ctx = code.create_code_context()
    code.run_code("x = 1", context=ctx)
    code.restart_code_context(ctx)
    assert code.run_code("x", context=ctx).error.name == "NameError"
    assert code.run_code("1", context=ctx).execution_count == 2
    code.restart_code_context(ctx.id)
    code.remove_code_context(ctx)


@pytest.mark.proves("remove_code_context")
def test_a_removed_context_is_gone(code):
    ctx = code.create_code_context()
    code.remove_code_context(ctx)
    assert ctx.id not in [c.id for c in code.list_code_contexts()]
    for call in (
        lambda: code.run_code("1", context=ctx),
        lambda: code.remove_code_context(ctx),
        lambda: code.restart_code_context(ctx),
        lambda: code.run_code("1", context=Context("no-such", "python", "/")),
    ):
        with pytest.raises(NotFoundException):
            call()


def has(sbx, program):
    return sbx.commands.run(f"command -v {program} || true").stdout.strip() != ""


@pytest.mark.proves("run_code")
def test_bash_keeps_its_state(code):
    assert code.run_code("cd /tmp; word=kept; f() { echo fun $1; }", language="bash").error is None
    run = code.run_code("pwd; echo $word; f 1; echo oops >&2", language="bash", envs={"E": "1"})
    assert "".join(run.logs.stdout) == "/tmp\nkept\nfun 1\n"
    assert "".join(run.logs.stderr) == "oops\n"


@pytest.mark.proves("run_code")
def test_javascript_keeps_its_state(code):
    if not has(code, "node"):
        pytest.skip("the template has no Node.js")
    assert code.run_code("const a = 20; let b = 22; function sum() { return a + b }", language="javascript").error is None
    run = code.run_code("console.log('said'); console.error('cried'); sum()", language="js")
    assert (run.text, "".join(run.logs.stdout), "".join(run.logs.stderr)) == ("42", "said\n", "cried\n")
    assert code.run_code("await Promise.resolve(7)", language="javascript").text == "7"
    failed = code.run_code("throw new TypeError('wrong')", language="javascript").error
    assert (failed.name, failed.value) == ("TypeError", "wrong")
    assert code.run_code("process.env.ONCE", language="javascript", envs={"ONCE": "o"}).text == "o"


@pytest.mark.proves("run_code")
def test_typescript_runs(code):
    if not has(code, "node"):
        pytest.skip("the template has no Node.js")
    run = code.run_code("interface P { x: number }\nconst p: P = { x: 3 };\np.x * 2", language="typescript")
    if run.error and "TypeScript" in run.error.value:
        pytest.skip(f"the template's Node.js cannot strip types: {run.error.value}")
    assert (run.error, run.text) == (None, "6")


def skip_missing(e, language):
    """Ends a test whose language the template does not have; any other failure is one."""
    assert "image or template has no" in str(e) and f"which kernels of {language} need" in str(e)
    pytest.skip(str(e))


@pytest.mark.parametrize("language, makes, shows", [
    ("r", "kept <- 40; cat(Sys.getenv('ONCE'))", "kept + 2"), ("java", 'int kept = 40; System.out.print(System.getenv("ONCE"));', "kept + 2"),
])
@pytest.mark.proves("run_code")
def test_a_language_runs_or_is_told_to_be_missing(code, language, makes, shows):
    try:
        made = code.run_code(makes, language=language, envs={"ONCE": "o"})
    except SandboxException as e:
        skip_missing(e, language)
    assert (made.error, "".join(made.logs.stdout)) == (None, "o")
    assert code.run_code(shows, language=language).text.split()[-1] == "42"


@pytest.mark.parametrize("language, prints, pieces", [
    ("r", 'print("a")', ['[1] "a"\n']), ("java", 'System.out.println("a")', ["a", "\n"]), ("bash", "echo a", ["a\n"]), ("javascript", "console.log('a')", ["a\n"]),
])
@pytest.mark.proves("run_code")
def test_a_printed_line_is_told_in_the_pieces_that_clients_know(code, language, prints, pieces):
    """R writes a line in three steps; Java's println is two pieces in E2B's image, and users compare the first one."""
    try:
        told = [code.run_code(prints, language=language).logs.stdout for _ in range(10)]
    except SandboxException as e:
        skip_missing(e, language)
    if language == "r":  # whose steps may be too far apart on a busy machine
        assert ["".join(one) for one in told] == ["".join(pieces)] * 10 and pieces in told
    else:
        assert told == [pieces] * 10


@pytest.mark.proves("run_code", "Sandbox.create")
def test_variables_of_a_sandbox_are_properties_in_java(make_code):
    sbx = make_code(envs={"EVERYWHERE": "e"})
    read = 'System.getProperty("EVERYWHERE") + System.getProperty("ONCE", "-")'
    try:
        assert [sbx.run_code(read, language="java", envs=envs).text for envs in (None, {"ONCE": "o"}, {"EVERYWHERE": "f"}, None)] == ["e-", "eo", "f-", "e-"]
    except SandboxException as e:
        skip_missing(e, "java")


@pytest.mark.proves("run_code", "create_code_context")
def test_an_unknown_language_is_told(code):
    with pytest.raises(SandboxException, match="501"):
        code.run_code("1", language="klingon")
    with pytest.raises(SandboxException, match="501"):
        code.create_code_context(language="klingon")


@pytest.mark.proves("run_code", "commands.run")
def test_a_command_can_ask_whether_code_can_be_run(make_code):
    sbx = make_code()
    ask = "curl -s -o /dev/null -w '%{http_code}' http://localhost:49999/health"
    for _ in range(2):
        assert sbx.commands.run(ask).stdout == "200"
    assert sbx.run_code("x = 1; x").text == "1"
    assert sbx.commands.run("ss -Hltn sport = :49999 2>/dev/null | wc -l").stdout == "1\n"


@pytest.mark.proves("run_code")
def test_S0_32_code_and_commands_see_one_sandbox(code):
    code.run_code("open('/home/user/from-code', 'w').write('x')")
    assert code.files.read("from-code") == "x"
    code.files.write("from-files", "y")
    assert code.run_code("open('from-files').read()").text == "y"
    assert code.run_code("import os, pwd; pwd.getpwuid(os.getuid()).pw_name").text == "user"


@pytest.mark.proves("run_code")
def test_S0_13_fifty_runs_in_a_row(code):
    code.run_code("n = 0")
    for _ in range(50):
        code.run_code("n += 1")
    assert code.run_code("n").text == "50"
