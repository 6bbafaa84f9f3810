"""Graphs that go back in time take their sandbox along."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any, TypedDict

import pytest
from deepagents import create_deep_agent
from langchain_core.messages import ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

import cove as package
from cove import AsyncCove, Cove
from cove.checkpoint import STATE, CoveCheckpointer, SandboxState, aattach, attach, remember
from cove.deepagents import CoveThreadBackend
from cove.testing import ScriptedModel, tool_call


class Steps(TypedDict, total=False):
    todo: list[str]
    said: list[str]


@pytest.fixture(scope="module")
def cove() -> Iterator[Cove]:
    with Cove() as c:
        yield c


@pytest.fixture
def thread(cove: Cove) -> Iterator[dict[str, Any]]:
    key = f"cp-{uuid.uuid4().hex[:12]}"
    yield {"configurable": {"thread_id": key}}
    try:
        cove.get_session(key).remove()
    except package.NotFound:
        pass


def steps(saver: CoveCheckpointer) -> Any:
    """A graph with one step per cell."""

    def run(state: Steps) -> Steps:
        cell, *rest = state["todo"]
        out = saver.session().run(cell)
        assert out.outcome == "ok", out.error
        return {"todo": rest, "said": [*state.get("said", []), out.stdout.strip()]}

    graph = StateGraph(Steps)
    graph.add_node("run", run)
    graph.add_edge(START, "run")
    graph.add_conditional_edges("run", lambda s: "run" if s["todo"] else END)
    return graph.compile(checkpointer=saver)


CELLS = ["x = 1; open('/session/f', 'w').write('old'); print(x)", "x = 2; open('/session/f', 'w').write('new'); print(x)"]
LOOK = "print(x, open('/session/f').read())"


def at(graph: Any, thread: dict[str, Any], said: list[str]) -> Any:
    """The checkpoint at which the graph had said that."""
    return next(s for s in graph.get_state_history(thread) if s.values.get("said", []) == said)


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_going_back_brings_variables_and_files_back(cove: Cove, thread: dict[str, Any], durability: str) -> None:
    graph = steps(CoveCheckpointer(InMemorySaver(), cove))
    assert graph.invoke({"todo": CELLS}, thread, durability=durability)["said"] == ["1", "2"]
    session = cove.get_session(thread["configurable"]["thread_id"])
    assert session.run(LOOK).stdout == "2 new\n"

    old = at(graph, thread, ["1"])
    assert graph.invoke(None, old.config, durability=durability)["said"] == ["1", "2"]  # the second cell ran again, on what was then
    forked = graph.update_state(old.config, {"todo": [LOOK]})
    assert graph.invoke(None, forked, durability=durability)["said"] == ["1", "1 old"]
    # and forward again, to the end of the first line
    end = next(s for s in graph.get_state_history(thread) if s.values.get("said") == ["1", "2"] and not s.next)
    forked = graph.update_state(end.config, {"todo": [LOOK]}, as_node="__start__")
    assert graph.invoke(None, forked, durability=durability)["said"] == ["1", "2", "2 new"]


def test_a_checkpoint_that_is_saved_late_is_still_of_its_time(cove: Cove, thread: dict[str, Any]) -> None:
    """LangGraph saves while it goes on: here nothing is saved before the last code has run."""
    ran = threading.Event()

    class Late(CoveCheckpointer):
        def put(self, *args: Any) -> Any:
            assert ran.wait(120)
            return super().put(*args)

    saver = Late(InMemorySaver(), cove)

    def run(state: Steps) -> Steps:
        cell, *rest = state["todo"]
        said = saver.session().run(cell).stdout.strip()
        if not rest:
            ran.set()
        return {"todo": rest, "said": [*state.get("said", []), said]}

    graph = StateGraph(Steps)
    graph.add_node("run", run)
    graph.add_node("think", lambda state: {"todo": state["todo"]})
    graph.add_edge(START, "run")
    graph.add_conditional_edges("run", lambda s: "think" if s["todo"] else END)
    graph.add_edge("think", "run")
    compiled = graph.compile(checkpointer=saver)
    compiled.invoke({"todo": CELLS}, thread)
    for before in [s for s in compiled.get_state_history(thread) if s.values.get("said") == ["1"]]:
        forked = compiled.update_state(before.config, {"todo": [LOOK]})
        assert compiled.invoke(None, forked)["said"] == ["1", "1 old"], before.next


def test_before_the_first_code_the_sandbox_is_a_new_one(cove: Cove, thread: dict[str, Any]) -> None:
    graph = steps(CoveCheckpointer(InMemorySaver(), cove))
    graph.invoke({"todo": CELLS}, thread)
    start = at(graph, thread, [])
    forked = graph.update_state(start.config, {"todo": ["print('x' in globals())"]})
    assert graph.invoke(None, forked)["said"] == ["False"]


def test_only_steps_that_ran_code_are_kept(cove: Cove, thread: dict[str, Any]) -> None:
    saver = CoveCheckpointer(InMemorySaver(), cove)

    def think(state: Steps) -> Steps:
        return {"todo": state["todo"]}

    def run(state: Steps) -> Steps:
        saver.session().run("x = 1")
        return {"todo": []}

    graph = StateGraph(Steps)
    for name, node in (("a", think), ("b", run), ("c", think), ("d", think)):
        graph.add_node(name, node)
    graph.add_edge(START, "a"), graph.add_edge("a", "b"), graph.add_edge("b", "c"), graph.add_edge("c", "d")
    compiled = graph.compile(checkpointer=saver)
    compiled.invoke({"todo": []}, thread)
    compiled.invoke({"todo": []}, thread)
    kept = cove.get_session(thread["configurable"]["thread_id"]).checkpoints()
    assert len(kept) == 2
    told = [s.metadata[STATE] for s in compiled.get_state_history(thread)]
    second, first = kept[1].id, kept[0].id
    assert told == [second] * 3 + [first] * 6 + [""] * 3


def test_looking_at_an_old_checkpoint_changes_nothing(cove: Cove, thread: dict[str, Any]) -> None:
    graph = steps(CoveCheckpointer(InMemorySaver(), cove))
    graph.invoke({"todo": CELLS}, thread)
    before = cove.get_session(thread["configurable"]["thread_id"]).info.sandbox
    graph.get_state(at(graph, thread, ["1"]).config)
    assert cove.get_session(thread["configurable"]["thread_id"]).info.sandbox == before


def test_another_process_goes_on_and_goes_back(cove: Cove, thread: dict[str, Any]) -> None:
    rows = InMemorySaver()
    steps(CoveCheckpointer(rows, cove)).invoke({"todo": CELLS}, thread)
    sandbox = cove.get_session(thread["configurable"]["thread_id"]).info.sandbox
    with Cove() as other:
        graph = steps(CoveCheckpointer(rows, other))
        assert graph.invoke({"todo": [LOOK]}, thread)["said"][-1] == "2 new"
        assert cove.get_session(thread["configurable"]["thread_id"]).info.sandbox == sandbox  # nothing was put back to go on
        forked = graph.update_state(at(graph, thread, ["1"]).config, {"todo": [LOOK]})
        assert graph.invoke(None, forked)["said"] == ["1", "1 old"]


def test_a_node_that_failed_runs_again_on_what_is_there(cove: Cove, thread: dict[str, Any]) -> None:
    saver = CoveCheckpointer(InMemorySaver(), cove)
    fails = [True]

    def run(state: Steps) -> Steps:
        out = saver.session().run("n = globals().get('n', 0) + 1; print(n)")
        if fails:
            fails.pop()
            raise RuntimeError("after the code ran")
        return {"said": [out.stdout.strip()]}

    graph = StateGraph(Steps)
    graph.add_node("run", run)
    graph.add_edge(START, "run")
    compiled = graph.compile(checkpointer=saver)
    with pytest.raises(RuntimeError, match="after the code ran"):
        compiled.invoke({"todo": []}, thread)
    assert compiled.invoke(None, thread)["said"] == ["2"]


def test_a_lost_sandbox_can_be_brought_back_from_its_checkpoint(cove: Cove, thread: dict[str, Any]) -> None:
    saver = CoveCheckpointer(InMemorySaver(), cove)
    graph = steps(saver)
    graph.invoke({"todo": CELLS}, thread)
    cove.get_session(thread["configurable"]["thread_id"]).sandbox.kill()
    with pytest.raises(package.Gone):
        graph.invoke({"todo": [LOOK]}, thread)
    saver.restore(thread)
    assert graph.invoke({"todo": [LOOK]}, thread)["said"][-1] == "2 new"


def test_a_checkpoint_that_is_no_longer_kept_is_told(cove: Cove, thread: dict[str, Any]) -> None:
    graph = steps(CoveCheckpointer(InMemorySaver(), cove))
    graph.invoke({"todo": CELLS}, thread)
    old = at(graph, thread, ["1"])
    session = cove.get_session(thread["configurable"]["thread_id"])
    session.remove_checkpoint(old.metadata[STATE])
    with pytest.raises(package.Gone, match="cannot be put back"):
        graph.invoke(None, old.config)
    session.refresh()
    assert session.run(LOOK).stdout == "2 new\n"  # and what is there stays
    session.remove()
    with pytest.raises(package.Gone, match="was removed"):
        graph.invoke(None, at(graph, thread, ["1", "2"]).config)


def test_storage_that_cannot_be_kept_is_told(cove: Cove, thread: dict[str, Any]) -> None:
    saver = CoveCheckpointer(InMemorySaver(), cove)
    cove.session(thread["configurable"]["thread_id"], storage="tmpfs")
    with pytest.raises(package.Unsupported, match="storage disk"):
        steps(saver).invoke({"todo": CELLS}, thread)


async def test_async_graphs_go_back_too(cove: Cove, thread: dict[str, Any]) -> None:
    saver = CoveCheckpointer(InMemorySaver(), cove)
    client = AsyncCove()
    backend = CoveThreadBackend(cove)

    async def run(state: Steps) -> Steps:
        command, *rest = state["todo"]
        done = await backend.aexecute(command)
        return {"todo": rest, "said": [*state.get("said", []), done.output.strip()]}

    graph = StateGraph(Steps)
    graph.add_node("run", run)
    graph.add_edge(START, "run")
    graph.add_conditional_edges("run", lambda s: "run" if s["todo"] else END)
    compiled = graph.compile(checkpointer=saver)
    done = await compiled.ainvoke({"todo": ["echo one >~/f; cat ~/f", "echo two >~/f; cat ~/f"]}, thread)
    assert done["said"] == ["one", "two"]
    old = [s async for s in compiled.aget_state_history(thread) if s.values.get("said") == ["one"]][0]
    forked = await compiled.aupdate_state(old.config, {"todo": ["cat ~/f"]})
    assert (await compiled.ainvoke(None, forked))["said"] == ["one", "one"]
    await client.close()
    await backend.aclose()
    await saver.aclose()


def test_a_deep_agent_goes_back(cove: Cove, thread: dict[str, Any]) -> None:
    def told(result: dict[str, Any]) -> list[str]:
        return [str(m.content).split("\n")[0] for m in result["messages"] if isinstance(m, ToolMessage)]

    model = ScriptedModel(script=[
        tool_call("execute", command="echo one >~/f; cat ~/f"), tool_call("execute", command="echo two >~/f; cat ~/f"), "done",
        tool_call("execute", command="cat ~/f"), "done",
    ])
    agent = create_deep_agent(model, backend=CoveThreadBackend(cove), checkpointer=CoveCheckpointer(InMemorySaver(), cove))
    assert told(agent.invoke({"messages": [{"role": "user", "content": "go"}]}, thread)) == ["one", "two"]
    old = next(s for s in agent.get_state_history(thread) if s.next == ("model",) and told(s.values) == ["one"])
    assert told(agent.invoke(None, old.config)) == ["one", "one"]


class Named(SandboxState, total=False):
    said: str


def test_a_graph_can_keep_its_sandbox_in_its_state(cove: Cove, thread: dict[str, Any]) -> None:
    def run(state: Named) -> dict[str, str]:
        sandbox = attach(state, cove)
        return {"said": sandbox.run("n = globals().get('n', 0) + 1; print(n)").stdout.strip(), **remember(sandbox)}

    graph = StateGraph(Named)
    graph.add_node("run", run)
    graph.add_edge(START, "run")
    rows = InMemorySaver()
    assert graph.compile(checkpointer=rows).invoke({"said": ""}, thread)["said"] == "1"
    result = graph.compile(checkpointer=rows).invoke({"said": ""}, thread)
    assert result["said"] == "2"
    cove.get(result["sandbox_id"]).kill()
    with pytest.raises(package.Gone, match="recreate"):
        graph.compile(checkpointer=rows).invoke({"said": ""}, thread)
    attach(result, cove, recreate=True).kill()


async def test_a_sandbox_named_in_a_state_is_found_by_async_code(cove: Cove) -> None:
    client = AsyncCove()
    made = await aattach({}, client)
    assert (await aattach(remember(made), client)).id == made.id
    await made.kill()
    with pytest.raises(package.Gone):
        await aattach(remember(made), client)
    await client.close()
