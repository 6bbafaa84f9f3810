"""The tool execute_python: an agent that keeps its files in its state, and a sandbox that is there only while code runs."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from deepagents import create_deep_agent
from langchain_core.messages import ToolMessage

from cove import Cove
from cove.deepagents import EXECUTE_PYTHON_PROMPT, ExecutePython, make_execute_python_tool
from cove.testing import ScriptedModel, tool_call

MARK = {"test": "execute-python"}


@pytest.fixture
def tool(cove: Cove) -> Iterator[ExecutePython]:
    yield make_execute_python_tool(cove, metadata=MARK)
    for info in cove.sandboxes(state=["starting", "running", "paused"], metadata=MARK):
        cove.get(info.id).kill()


def living(cove: Cove) -> int:
    return len(list(cove.sandboxes(state=["starting", "running", "paused"], metadata=MARK)))


def run(tool: ExecutePython, code: str, files: dict | None = None, thread: str | None = None) -> str:
    config = {"configurable": {"thread_id": thread}} if thread else None
    return tool.invoke({"code": code, "state": {"files": files or {}}}, config)


def test_S1_37_the_model_sees_only_code(tool: ExecutePython) -> None:
    assert tool.tool_call_schema.model_json_schema()["required"] == ["code"]
    assert list(tool.tool_call_schema.model_json_schema()["properties"]) == ["code"]


def test_S1_38_S1_39_S1_52_S1_54_a_sandbox_lives_from_the_first_call_to_the_end_of_the_run(tool: ExecutePython, cove: Cove) -> None:
    with tool.run_scope() as scope:
        assert (living(cove), scope.sandbox_id) == (0, None)
        run(tool, "open('/tmp/mark', 'w').write('x')")
        first = scope.sandbox_id
        assert run(tool, "print(open('/tmp/mark').read())") == "exit=0\nx\n"
        assert (scope.sandbox_id, living(cove)) == (first, 1)
    assert living(cove) == 0
    with tool.run_scope() as scope:
        assert run(tool, "import os; print(os.path.exists('/tmp/mark'))") == "exit=0\nFalse\n"
        assert scope.sandbox_id != first
    assert living(cove) == 0


def test_S1_40_after_a_death_the_next_call_has_a_new_sandbox_with_all_files(tool: ExecutePython, cove: Cove) -> None:
    files = {"a.txt": {"content": "kept", "encoding": "utf-8"}}
    with tool.run_scope() as scope:
        run(tool, "pass", files)
        first = scope.sandbox_id
        cove.get(first).kill()
        assert run(tool, "print(open('/app/a.txt').read())", files) == "exit=0\nkept\n"
        assert scope.sandbox_id != first


def test_S1_41_S1_42_S1_45_files_of_the_state_are_where_the_agent_looks(tool: ExecutePython) -> None:
    image = bytes(range(256))
    files = {
        "data.csv": {"content": "a,b\n1,2\n3,4\n", "encoding": "utf-8"},
        "/app/pic.bin": {"content": base64.b64encode(image).decode(), "encoding": "base64"},
        "/srv/deep/er/notes.txt": {"content": "héllo", "encoding": "utf-8"},
        "sub/lines.txt": {"content": ["one", "two"]},
        "gone.txt": None,
    }
    code = ("import pandas, os; print(pandas.read_csv('/app/data.csv')['b'].sum(), open('data.csv').readline().strip()); "
            "print(open('/app/pic.bin', 'rb').read() == bytes(range(256)), open('/srv/deep/er/notes.txt').read(), "
            "open('/app/sub/lines.txt').read().split(), os.path.exists('/app/gone.txt')); open('/app/data.csv', 'a').write('5,6')")
    with tool.run_scope():
        assert run(tool, code, files) == "exit=0\n6 a,b\nTrue héllo ['one', 'two'] False\n"


def test_S1_43_what_changed_between_calls_is_there_and_nothing_else_is_sent_again(tool: ExecutePython) -> None:
    with tool.run_scope():
        run(tool, "pass", {"a": "1", "b": "1", "c": "1"})
        run(tool, "open('/app/b', 'w').write('by the code')", {"a": "1", "b": "1", "c": "1"})
        told = run(tool, "import os; print(open('/app/a').read(), open('/app/b').read(), os.path.exists('/app/c'))", {"a": "2", "b": "1"})
        assert told == "exit=0\n2 by the code False\n"


def test_S1_44_without_files_nothing_is_sent(tool: ExecutePython, cove: Cove, monkeypatch: pytest.MonkeyPatch) -> None:
    from cove.deepagents import CoveSandbox

    monkeypatch.setattr(CoveSandbox, "upload_files", lambda *_: pytest.fail("something was uploaded"))
    with tool.run_scope():
        assert run(tool, "print(1)") == "exit=0\n1\n"


def test_S1_46_S1_47_code_runs_as_it_was_written(tool: ExecutePython) -> None:
    torture = "print('''it's \"$HOME\" `id` \\\\ $(id) \\u00e9 é 世界 %s {0} !!''')\n# EOF\nprint(\"\"\"a\nb\"\"\")"
    with tool.run_scope():
        assert run(tool, torture) == "exit=0\nit's \"$HOME\" `id` \\ $(id) é é 世界 %s {0} !!\na\nb\n"
        large = f"x = {'y' * 300_000!r}\nprint(len(x))"
        assert run(tool, large) == "exit=0\n300000\n"
        assert run(tool, "import sys; print(sys.argv[1:], __name__)") == "exit=0\n[] __main__\n"


def test_S1_48_S1_49_an_error_is_told_with_its_lines(tool: ExecutePython) -> None:
    with tool.run_scope():
        told = run(tool, "import sys\nprint('before', flush=True)\n1/0")
        assert re.fullmatch(r"exit=1\nbefore\nTraceback .*1/0\n.*ZeroDivisionError: division by zero\n", told, re.S)
        assert run(tool, "import sys; sys.exit(3)") == "exit=3\n"


def test_a_call_that_takes_too_long_answers_124(cove: Cove) -> None:
    tool = make_execute_python_tool(cove, timeout=10, metadata=MARK)
    with tool.run_scope():
        assert run(tool, "import time; print('begun', flush=True); time.sleep(3600)").startswith("exit=124\nbegun\n")
        assert run(tool, "print('goes on')") == "exit=0\ngoes on\n"


def test_S1_50_variables_end_with_a_call_and_files_with_the_run(tool: ExecutePython) -> None:
    with tool.run_scope():
        run(tool, "x = 1; open('made.txt', 'w').write('kept')")
        assert run(tool, "print('x' in globals(), open('/app/made.txt').read())") == "exit=0\nFalse kept\n"


def test_S1_51_a_run_ends_its_sandbox_whatever_happens_in_it(tool: ExecutePython, cove: Cove) -> None:
    with pytest.raises(RuntimeError, match="the agent failed"), tool.run_scope() as scope:
        run(tool, "pass")
        cove.get(scope.sandbox_id).kill()  # what is gone already is no error at the end
        raise RuntimeError("the agent failed")
    assert living(cove) == 0
    run(tool, "pass", thread="t1")
    assert living(cove) == 1
    tool.terminate("t1")
    tool.terminate("t1")
    tool.terminate()
    assert living(cove) == 0


def test_a_run_that_cannot_reach_the_server_at_its_end_does_not_raise(cove: Cove) -> None:
    mine = Cove(cove.url, cove._t.settings.headers.get("X-API-Key"))
    tool = make_execute_python_tool(mine, metadata=MARK)
    with tool.run_scope() as scope:
        run(tool, "pass")
        id = scope.sandbox_id
        mine._t.settings.url = "http://127.0.0.1:9"
    cove.get(id).kill()


def test_S1_53_runs_at_once_never_share(tool: ExecutePython, cove: Cove) -> None:
    def one(name: str) -> tuple[str, str | None]:
        with tool.run_scope() as scope:
            run(tool, f"open('/app/who', 'a').write({name!r})")
            return run(tool, "print(open('/app/who').read())"), scope.sandbox_id

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(one, "abcd"))
    assert [told for told, _ in done] == [f"exit=0\n{n}\n" for n in "abcd"]
    assert len({id for _, id in done}) == 4
    # Without a scope: by thread, and alone where there is none.
    run(tool, "open('/app/who', 'w').write('t1')", thread="t1")
    assert run(tool, "import os; print(os.path.exists('/app/who'))", thread="t2") == "exit=0\nFalse\n"
    assert run(tool, "import os; print(os.path.exists('/app/who'))") == "exit=0\nFalse\n"
    assert run(tool, "print(open('/app/who').read())", thread="t1") == "exit=0\nt1\n"
    tool.terminate("t1"), tool.terminate("t2")
    assert living(cove) == 0


def test_two_tools_of_a_run_have_a_sandbox_each(tool: ExecutePython, cove: Cove) -> None:
    other = make_execute_python_tool(cove, metadata=MARK, name="other")
    with tool.run_scope() as one, other.run_scope() as two:
        run(tool, "pass"), run(other, "pass")
        assert one.sandbox_id != two.sandbox_id and living(cove) == 2
    assert living(cove) == 0


async def test_S1_53_async_runs_at_once_never_share(tool: ExecutePython, cove: Cove) -> None:
    async def one(name: str) -> str:
        async with tool.arun_scope():
            await tool.ainvoke({"code": f"open('/app/who', 'a').write({name!r})", "state": {}})
            return await tool.ainvoke({"code": "print(open('/app/who').read())", "state": {}})

    assert await asyncio.gather(*map(one, "abcd")) == [f"exit=0\n{n}\n" for n in "abcd"]
    assert await asyncio.to_thread(living, cove) == 0


def test_S1_55_the_prompt_tells_the_limits() -> None:
    for word in ("execute_python(code)", "/app/", "exit=<code>", "first call", "print"):
        assert word in EXECUTE_PYTHON_PROMPT


def test_S1_38_S1_43_an_agent_with_files_in_its_state(tool: ExecutePython, cove: Cove) -> None:
    model = ScriptedModel(script=[
        tool_call("execute_python", code="print(open('/app/data.csv').read())"),
        tool_call("write_file", file_path="/app/more.csv", content="7,8\n"),
        tool_call("execute_python", code="print(open('/app/data.csv').read() + open('/app/more.csv').read())"),
        "done",
    ])
    agent = create_deep_agent(model, tools=[tool], system_prompt="Answer in one line." + EXECUTE_PYTHON_PROMPT)
    with tool.run_scope():
        result = agent.invoke({
            "messages": [{"role": "user", "content": "add them"}],
            "files": {"/app/data.csv": {"content": "1,2\n", "encoding": "utf-8", "created_at": "", "modified_at": ""}},
        })
    told = [m.content for m in result["messages"] if isinstance(m, ToolMessage) and m.name == "execute_python"]
    assert told == ["exit=0\n1,2\n\n", "exit=0\n1,2\n7,8\n\n"]
    assert living(cove) == 0
