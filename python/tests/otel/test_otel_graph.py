"""The tool and the graph, with scripted models."""

import operator
import threading
from typing import Annotated, TypedDict

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Send
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cove.otel import TOOLS, AgentState, ExecResult, build_graph, make_run_python, run_python, set_tracer
from cove.testing import ScriptedModel, tool_call

# A rule refuses at once; without one a packet leaves, and whether somebody answers is the machine's business.
LEAVES = """
import socket
try:
    socket.create_connection(("{}", 53), timeout=2)
    print("let out")
except ConnectionRefusedError:
    print("refused")
except OSError:
    print("let out")
"""
FIBONACCI = "a, b, out = 0, 1, []\nfor _ in range(10):\n    out.append(str(a)); a, b = b, a + b\nprint(', '.join(out))"


@pytest.fixture
def spans():
    """What the tools' tracer finished."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    set_tracer(tracer)
    exporter.tracer = tracer
    yield exporter
    set_tracer(trace.get_tracer("cove.otel"))
    provider.shutdown()


def fixed(**fields):
    return lambda code, **_: ExecResult(**{"exit_code": 0, "stdout": "", "stderr": "", "timed_out": False, **fields})


def test_S2_45_the_tool_takes_code_alone():
    assert list(run_python.args_schema.model_json_schema()["properties"]) == ["code"]
    assert run_python.name == "run_python" and "code" in run_python.description


@pytest.mark.parametrize(
    ("code", "want"), [("print(1)", "1\n"), ("x = 1", "(no output)"), ("import sys; sys.exit('why')", "ERROR (exit 1): why\n")]
)
def test_S2_46_S2_48_what_the_model_reads(code, want):
    assert run_python.invoke({"code": code}) == want


def test_S2_48_a_long_failure_is_cut():
    tool = make_run_python(runner=fixed(exit_code=2, stderr="e" * 1000))
    assert tool.invoke({"code": "1"}) == "ERROR (exit 2): " + "e" * 400


def test_S2_47_a_timeout_is_told_in_words():
    assert make_run_python(runner=fixed(exit_code=-1, timed_out=True)).invoke({"code": "1"}) == "ERROR: execution timed out after 10 seconds"
    assert make_run_python(timeout=1.5).invoke({"code": "import time; time.sleep(3600)"}) == "ERROR: execution timed out after 1.5 seconds"


def test_S2_24_S2_44_each_call_of_the_tool_is_a_span_of_the_tracer_that_was_set(spans):
    run_python.invoke({"code": "print(1)"})
    assert [span.name for span in spans.get_finished_spans()] == ["sandbox.exec"]


class Echo(BaseChatModel):
    """A model that cannot be bound to tools: it says what it was told."""

    @property
    def _llm_type(self):
        return "echo"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        return ChatResult(generations=[ChatGeneration(message=AIMessage(messages[-1].content))])


def test_S2_2_S2_49_S2_50_the_graph_needs_no_key_and_no_tools_of_its_model(monkeypatch):
    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    graph = build_graph(Echo())
    assert {"model", "tools"} <= set(graph.get_graph().nodes)
    assert [message.content for message in graph.invoke({"messages": [HumanMessage("hi")]})["messages"]] == ["hi", "hi"]


def test_S2_51_S2_52_the_loop_goes_on_until_no_tool_is_called():
    script = [tool_call("run_python", code="print('first')"), tool_call("run_python", code=FIBONACCI), lambda messages: messages[-1].content.strip()]
    model = ScriptedModel(script=script)
    end = build_graph(model).invoke({"messages": [HumanMessage("the first 10 Fibonacci numbers")]})
    assert [message.type for message in end["messages"]] == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert end["messages"][-1].content == "0, 1, 1, 2, 3, 5, 8, 13, 21, 34"


async def test_S2_51_the_loop_of_an_asynchronous_graph(spans):
    model = ScriptedModel(script=[tool_call("run_python", code="print('async')"), lambda messages: messages[-1].content])
    end = await build_graph(model).ainvoke({"messages": [HumanMessage("go")]})
    assert end["messages"][-1].content == "async\n" and len(spans.get_finished_spans()) == 1


def test_S2_53_the_model_and_the_node_have_the_same_tools():
    bound = []

    class Binding(ScriptedModel):
        def bind_tools(self, tools, **kwargs):
            bound.append([tool.name for tool in tools])
            return self

    other = make_run_python(name="other")
    build_graph(Binding())
    graph = build_graph(Binding(script=[tool_call("other", code="print('o')"), lambda messages: messages[-1].content]), [run_python, other])
    assert bound == [["run_python"], ["run_python", "other"]] and [tool.name for tool in TOOLS] == ["run_python"]
    assert graph.invoke({"messages": [HumanMessage("go")]})["messages"][-1].content == "o\n"


def together(n):
    """A runner that returns only when n of them run at once."""
    barrier = threading.Barrier(n)

    def run(code, **_):
        barrier.wait(20)
        return ExecResult(0, code, "", False)

    return run


def test_S2_61_S2_62_calls_of_one_answer_run_at_once_as_siblings(spans):
    tool = make_run_python(runner=together(3))
    calls = AIMessage(content="", tool_calls=[{"name": "run_python", "args": {"code": str(n)}, "id": str(n)} for n in range(3)])
    graph = build_graph(ScriptedModel(script=[calls, "done"]), [tool])
    with spans.tracer.start_as_current_span("agent") as parent:
        end = graph.invoke({"messages": [HumanMessage("go")]})
    assert [message.content for message in end["messages"] if message.type == "tool"] == ["0", "1", "2"]
    runs = [span for span in spans.get_finished_spans() if span.name == "sandbox.exec"]
    assert [span.parent.span_id for span in runs] == [parent.get_span_context().span_id] * 3


class Fan(TypedDict):
    codes: list[str]
    said: Annotated[list[str], operator.add]


# Ends only when three of them run at the same time.
MEETS = """
import os, pathlib, time
here = pathlib.Path("/tmp/meeting")
here.mkdir(exist_ok=True)
(here / "{0}").touch()
while len(os.listdir(here)) < 3:
    time.sleep(0.02)
print({0})
"""


def test_S2_61_S2_62_a_fan_of_real_snippets_runs_at_the_same_time(spans, server):
    with server.create() as sandbox:
        end, parent = fan(make_run_python(sandbox=sandbox.id, timeout=600), [MEETS.format(n) for n in range(3)], spans)
    assert sorted(end["said"]) == ["0\n", "1\n", "2\n"]
    runs = [span for span in spans.get_finished_spans() if span.name == "sandbox.exec"]
    assert [span.parent.span_id for span in runs] == [parent.get_span_context().span_id] * 3


def test_S2_61_a_fan_of_snippets_in_sandboxes_of_their_own(spans):
    end, _ = fan(make_run_python(timeout=300), [f"import time; time.sleep(10); print({n})" for n in range(3)], spans)
    assert sorted(end["said"]) == ["0\n", "1\n", "2\n"]
    runs = [span for span in spans.get_finished_spans() if span.name == "sandbox.exec"]
    assert max(span.start_time for span in runs) < min(span.end_time for span in runs)


def fan(tool, codes, spans):
    """Runs each code in a branch of its own; what the graph ended with and the span around it."""
    builder = StateGraph(Fan)
    builder.add_node("run", lambda state: {"said": [tool.invoke({"code": state["code"]})]})
    builder.add_conditional_edges(START, lambda state: [Send("run", {"code": code}) for code in state["codes"]], ["run"])
    builder.add_edge("run", END)
    with spans.tracer.start_as_current_span("agent") as parent:
        return builder.compile().invoke({"codes": codes, "said": []}), parent


def test_S2_60_tools_have_network_rules_of_their_own():
    """One tool without a network, one with it."""
    asked = []

    def noted(code, **options):
        asked.append(options)
        return ExecResult(0, "", "", False)

    make_run_python(runner=noted).invoke({"code": "1"})
    make_run_python(runner=noted, network=True).invoke({"code": "1"})
    assert [options.get("network", False) for options in asked] == [False, True]
    codes = {"code": LEAVES.format("1.1.1.1")}
    assert [make_run_python(network=network).invoke(codes) for network in (False, True)] == ["refused\n", "let out\n"]


def test_S2_60_a_tool_may_have_an_allow_list():
    """A tool in a sandbox of its own: that sandbox's rules are the tool's."""
    from cove import Cove, Network

    with Cove().create(network=Network(mode="list", allow=("1.1.1.1/32",))) as sandbox:
        tool = make_run_python(sandbox=sandbox.id)
        assert [tool.invoke({"code": LEAVES.format(address)}) for address in ("1.1.1.1", "8.8.8.8")] == ["let out\n", "refused\n"]


def test_S2_1_the_packages_are_there_together():
    from importlib.metadata import version

    for package in ("langgraph", "langchain-core", "langchain-anthropic", "opentelemetry-sdk", "opentelemetry-api", "opentelemetry-exporter-otlp-proto-grpc"):
        assert version(package)


def test_S2_49_the_state_is_messages():
    assert list(AgentState.__annotations__) == ["messages"] and isinstance(ToolNode(TOOLS), ToolNode)
