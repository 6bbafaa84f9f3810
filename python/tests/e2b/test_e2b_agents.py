"""Agents and graphs of LangChain and LangGraph whose code runs in sandboxes; the models are scripted."""

import ast
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from cove.e2b import CodeInterpreter
from cove.e2b.tools import execute_python, make_persistent_tool
from cove.testing import ScriptedModel, tool_call

WHERE = "import os; print(os.environ['E2B_SANDBOX_ID'])"
SQUARES = "sum(i*i for i in range(1, 101))"


def last(messages):
    """The answer of a model that repeats what its tool said."""
    return f"The answer is: {messages[-1].content}"


def test_S0_19_a_tool_returns_what_was_printed():
    assert execute_python.invoke({"code": "print(1)"}) == "1\n"
    assert list(execute_python.args) == ["code"]


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("6 * 7", "Value: 42"),
        ("x = 1", "The code ran and printed nothing."),
        ("import sys; print('o'); print('e', file=sys.stderr)", "o\nPrinted to stderr:\ne\n"),
        ("import sys; print('e', end='', file=sys.stderr); 1", "Printed to stderr:\ne\nValue: 1"),
    ],
)
def test_S0_19_S0_24_a_tool_says_all_there_is_to_say(code, want):
    assert execute_python.invoke({"code": code}) == want


def test_S0_19_S0_45_the_guides_tool(guide):
    tool = guide("tool").execute_python
    codes = ("print(1)", "import sys; print('o'); print('e', file=sys.stderr); 6 * 7", "x = 1")
    assert [tool.invoke({"code": code}) for code in codes] == ["1\n", "o\ne\n=> 42", "it ran and said nothing"]
    assert tool.invoke({"code": "1/0"}).startswith("Error: ZeroDivisionError")


def test_S0_42_an_agent_executor_uses_the_tool(guide, openai, capsys):
    openai(tool_call("execute_python", code=SQUARES), last)
    ran = guide("agent", execute_python=guide("tool").execute_python)
    assert "338350" in ran.answer and "338350" in capsys.readouterr().out


def test_S0_42_create_agent_uses_the_tool():
    from langchain.agents import create_agent

    agent = create_agent(ScriptedModel(script=[tool_call("execute_python", code=SQUARES), last]), [execute_python])
    said = agent.invoke({"messages": [("user", "the sum of the squares from 1 to 100")]})
    assert "338350" in said["messages"][-1].content


def test_S0_43_each_call_has_a_sandbox_that_ends_with_it(gone):
    ids = [execute_python.invoke({"code": WHERE}).strip() for _ in range(2)]
    assert ids[0] != ids[1] and all(gone(each) for each in ids)


def test_S0_44_a_persistent_tool_keeps_its_state(sandbox):
    tool = make_persistent_tool(sandbox)
    assert tool.invoke({"code": "x = 20"}) == "The code ran and printed nothing."
    assert tool.invoke({"code": "x + 1"}) == "Value: 21"
    assert tool.invoke({"code": WHERE}).strip() == sandbox.id


def test_S0_44_the_guides_persistent_tool(guide, gone):
    # The program ends its sandbox when it is done; here that waits until the tool was used.
    class Kept(CodeInterpreter):
        def close(self):
            return False

    program = guide("persistent", interpreter=Kept)
    try:
        first, second, third = (program.work_on.invoke({"code": code}) for code in ("x = 1", "print(x)\nx + 1", "1/0"))
    finally:
        program.desk.kill()
    assert (first, second) == ("done", "1\n=> 2") and third.startswith("Error: ZeroDivisionError")
    assert gone(program.desk.id)


def test_S0_45_a_failure_is_told_to_the_model_not_raised(sandbox):
    for tool in (execute_python, make_persistent_tool(sandbox)):
        said = tool.invoke({"code": "print('before'); 1/0"})
        assert said.startswith("Error: ZeroDivisionError: division by zero") and "Traceback" in said


def test_S0_46_S0_47_S0_48_S0_37_S0_38_three_nodes_share_a_sandbox(guide, gone):
    ran = guide("analysis")
    gathered, reckoned, drawn = ran.year["notes"]
    assert gathered.startswith("gather: ") and "2024-12-31" in gathered
    assert drawn == "draw: the bars are drawn\n"
    assert (ran.year["ready"], ran.year["sandbox_id"]) == (True, ran.desk.id)
    money = re.fullmatch(r"reckon: sold ([\d,]+) spent ([\d,]+) kept ([-\d,]+) mean ([\d,.]+)\n", reckoned)
    sold, spent, kept, mean = (ast.literal_eval(each.replace(",", "")) for each in money.groups())
    assert kept == sold - spent and mean == pytest.approx(sold / 12, abs=0.01)
    assert gone(ran.desk.id)


def test_S0_48_the_metrics_are_those_of_the_data(guide):
    rows = []

    class Kept(CodeInterpreter):
        def close(self):
            rows.append(self.notebook.exec_cell("(int(shop.sold.sum()), int(shop.spent.sum()), len(shop))").results[0].text)
            return super().close()

    ran = guide("analysis", interpreter=Kept)
    sold, spent, months = ast.literal_eval(rows[0])
    assert months == 12
    assert f"sold {sold:,} spent {spent:,} kept {sold - spent:,} mean {sold / 12:,.2f}" in ran.year["notes"][1]


@pytest.fixture
def retrying(guide, sandbox):
    """A node, a router and the graph of both, which says where it ended."""
    return guide("failures", desk=sandbox)


def test_S0_49_a_failing_node_counts(retrying):
    assert retrying.execute({"cell": "1/0"}) == {"error": "division by zero", "retry_count": 1}
    assert retrying.execute({"cell": "1/0", "retry_count": 4})["retry_count"] == 5
    assert retrying.execute({"cell": "print(1)"}) == {"printed": ["1\n"], "error": None}


def test_S0_49_a_sandbox_that_is_gone_counts_too(retrying, sandbox):
    sandbox.close()
    said = retrying.execute({"cell": "1"})
    assert said["retry_count"] == 1 and said["error"].startswith("no sandbox: ")


@pytest.mark.parametrize(
    ("state", "way"),
    [({"error": "e", "retry_count": 2}, "retry"), ({"error": "e", "retry_count": 3}, "fail"), ({"error": None, "retry_count": 2}, "continue"), ({}, "continue")],
)
def test_S0_50_a_router_has_three_ways(retrying, state, way):
    assert retrying.way(state) == way


def test_S0_51_two_failures_and_a_success_go_on(retrying):
    code = "n = globals().get('n', 0) + 1\nassert n > 2, f'try {n}'\nprint(n)"
    end = retrying.app.invoke({"cell": code, "printed": []})
    assert (end["reached"], end["retry_count"], end["error"], [str(each) for each in end["printed"]]) == ("next_step", 2, None, ["3\n"])


def test_S0_51_failing_always_is_handled_after_three_tries(retrying, sandbox):
    end = retrying.app.invoke({"cell": "tries = globals().get('tries', 0) + 1; 1/0", "printed": []})
    assert (end["reached"], end["retry_count"], end["printed"]) == ("handle_error", 3, [])
    assert sandbox.notebook.exec_cell("tries").results[0].text == "3"


def test_S0_52_workflows_do_not_disturb_each_other(guide):
    def run(_):
        return guide("analysis").year

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first["sandbox_id"] != second["sandbox_id"]
    assert first["notes"][1] != second["notes"][1] and first["notes"][2] == second["notes"][2]


def test_S0_72_a_function_with_a_sandbox_for_each_query(guide):
    program = guide("stateless", code_for=lambda question: f"seen = globals().get('seen', 0) + {question}; print(seen)")
    try:
        assert [str(program.ask_afresh(n)) for n in (1, 2)] == ["1\n", "2\n"]
        assert [str(program.ask_on(n)) for n in (1, 2)] == ["1\n", "3\n"]
    finally:
        program.memory.close()


def test_S0_53_S0_57_S0_61_the_guides_risky_code_is_contained(guide):
    hostile = guide("hostile")
    with CodeInterpreter() as victim, CodeInterpreter() as sibling:
        from e2b import TimeoutException

        with pytest.raises(TimeoutException):
            victim.notebook.exec_cell(hostile.LOOP, timeout=2)
        execution = victim.notebook.exec_cell(hostile.HOARD)
        assert execution.error is not None
        victim.notebook.exec_cell(hostile.REMOVE, timeout=60)
        assert sibling.notebook.exec_cell("1 + 1").results[0].text == "2"
        assert victim.close() is True
    with CodeInterpreter() as fresh:
        assert fresh.commands.run("ls /usr/bin | wc -l").stdout.strip() != "0"
