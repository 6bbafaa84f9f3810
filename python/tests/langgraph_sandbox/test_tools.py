"""The tools, called by graphs, by agents and by hand."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from langchain.agents import create_agent
from langchain_core.messages import ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, ToolRuntime, create_react_agent
from langgraph.types import Command, interrupt

from cove import Cove
from cove.langgraph_sandbox import SessionManager, make_code_sandbox_tool, make_export_datasets_tool, make_list_datasets_tool, make_select_dataset_tool
from cove.testing import ScriptedModel, tool_call, tool_calls

Make = Callable[..., SessionManager]


def message(command: Any) -> ToolMessage:
    assert isinstance(command, Command)
    (told,) = command.update["messages"]  # type: ignore[index]
    assert isinstance(told, ToolMessage)
    return told


def run(tool: Any, **args: Any) -> ToolMessage:
    return message(tool.invoke(args))


def payload(told: ToolMessage) -> dict[str, Any]:
    text = str(told.text)
    return json.loads(text[text.index('{\n  "stdout"'):])


WAIT = "import os, time\nopen('/session/begun', 'w').close()\nwhile not os.path.exists('/session/go'): time.sleep(.01)\nprint('done')"


async def let_go(sm: SessionManager, keys: list[str]) -> None:
    """Wait in the event loop until the code of WAIT has begun in every session, and then let all of it end."""
    sandboxes = [(await sm.async_cove.get_session(k)).sandbox for k in keys]
    for sandbox in sandboxes:
        while "begun" not in [e.name for e in await sandbox.ls("/session")]:
            await asyncio.sleep(0.01)
    for sandbox in sandboxes:
        await sandbox.write("/session/go", b"")


def graph(*tools: Any) -> Any:
    return StateGraph(MessagesState).add_node("tools", ToolNode(list(tools))).add_edge(START, "tools").compile(checkpointer=InMemorySaver())


def test_S4_56_the_factories_have_the_documented_arguments_and_defaults(manager: Make) -> None:
    def told(f: Callable[..., Any]) -> dict[str, Any]:
        parameters = inspect.signature(f).parameters
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
        return {n: p.default for n, p in parameters.items() if n in ("session_key_fn", "name", "timeout_s", "client")}

    assert told(make_code_sandbox_tool) == {"session_key_fn": None, "name": "code_sandbox", "timeout_s": 30}
    assert told(make_select_dataset_tool) == {"session_key_fn": None, "name": "select_dataset", "client": None}
    assert told(make_export_datasets_tool) == {"session_key_fn": None, "name": "export_datasets"}
    assert told(make_list_datasets_tool) == {"session_key_fn": None, "name": "list_datasets"}


def test_S4_57_the_model_sees_only_its_own_arguments(manager: Make) -> None:
    sm = manager()
    tools = [make_code_sandbox_tool(session_manager=sm), make_select_dataset_tool(session_manager=sm, fetch_fn=bytes),
             make_export_datasets_tool(session_manager=sm), make_list_datasets_tool(session_manager=sm)]
    seen = {t.name: list(t.tool_call_schema.model_json_schema().get("properties", {})) for t in tools}  # type: ignore[union-attr]
    assert seen == {"code_sandbox": ["code"], "select_dataset": ["dataset_id"], "export_datasets": ["container_path"], "list_datasets": []}


def test_S4_58_the_answer_is_a_command_with_the_message_of_the_call(manager: Make, key: str) -> None:
    code = make_code_sandbox_tool(session_manager=manager(), session_key_fn=lambda: key)
    told = message(code.invoke({"type": "tool_call", "id": "call-7", "name": "code_sandbox",
                                "args": {"code": "import sys\nprint('out')\nprint('err', file=sys.stderr)\n5"}}))
    assert (told.tool_call_id, told.name, told.status, told.artifact) == ("call-7", "code_sandbox", "success", [])
    assert str(told.content).startswith("out\n")
    assert payload(told) == {"stdout": "out\n", "stderr": "err", "session_dir": "", "ok": True, "result": "5"}


def test_S4_59_the_traceback_reaches_the_model(manager: Make, key: str) -> None:
    told = run(make_code_sandbox_tool(session_manager=manager(), session_key_fn=lambda: key), code="x = 0\n1/x")
    assert told.status == "error" and "ZeroDivisionError" in payload(told)["stderr"] and "1/x" in payload(told)["stderr"]


def test_S4_60_S4_61_files_are_found_told_and_can_be_fetched(manager: Make, key: str) -> None:
    code = make_code_sandbox_tool(session_manager=manager(), session_key_fn=lambda: key)
    told = run(code, code="import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.savefig('/session/artifacts/plot.png')\nplt.close('all')")
    (artifact,) = told.artifact
    assert {k: type(v) for k, v in artifact.items()} == dict.fromkeys(["id", "name", "path", "mime", "sha256", "created_at", "url"], str) | {"size": int}
    assert (artifact["name"], artifact["mime"]) == ("plot.png", "image/png")
    assert "plot.png (image/png" in told.text and artifact["url"] in told.text
    got = httpx.get(artifact["url"])
    assert len(got.content) == artifact["size"] and got.content.startswith(b"\x89PNG")
    assert run(code, code="1").artifact == []


def test_figures_come_back_as_images_after_the_text(manager: Make, key: str) -> None:
    sm = manager()
    show = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
    told = run(make_code_sandbox_tool(session_manager=sm, session_key_fn=lambda: key), code=show)
    assert [b["type"] for b in told.content] == ["text", "image"]  # type: ignore[index]
    assert told.content[1]["mime_type"] == "image/png" and told.content[1]["base64"].startswith("iVBOR")  # type: ignore[index]
    assert isinstance(run(make_code_sandbox_tool(session_manager=sm, session_key_fn=lambda: key, images=False), code=show).content, str)


def test_S4_62_D9_bookkeeping_leaves_the_users_names_and_figures_alone(manager: Make, key: str) -> None:
    names = ["name", "value", "state", "f", "item", "gc", "Path", "path", "files", "json", "os"]
    sm = manager(session_storage="BIND")
    code = make_code_sandbox_tool(session_manager=sm, session_key_fn=lambda: key)
    run(code, code="\n".join(f"{n} = {i}" for i, n in enumerate(names)))
    run(code, code="import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.plot([1, 2])\nbefore = sorted(k for k in globals() if k[0] != '_')")
    run(make_list_datasets_tool(session_manager=sm, session_key_fn=lambda: key))
    told = run(code, code=f"print([{', '.join(names)}], sorted(k for k in globals() if k[0] != '_' and k != 'before') == [b for b in before if b != 'before'])")
    assert payload(told)["stdout"] == f"{list(range(len(names)))} True\n"
    assert [a["name"] for a in run(code, code="fig.savefig('/session/artifacts/later.png')").artifact] == ["later.png"]


def test_S4_62_between_runs_the_drop_box_is_emptied_and_memory_is_not_held(manager: Make, key: str) -> None:
    code = make_code_sandbox_tool(session_manager=manager(), session_key_fn=lambda: key)
    run(code, code="import os\nos.makedirs('/session/artifacts/d')\nopen('/session/artifacts/d/a', 'wb').write(b'x' * 1000)")
    assert payload(run(code, code="print([f for _, _, fs in os.walk('/session/artifacts') for f in fs])"))["stdout"] == "[]\n"


def test_S4_63_the_key_comes_from_a_function_or_from_the_thread_or_is_conv(manager: Make, key: str, server: Cove) -> None:
    sm = manager()
    by_function = make_code_sandbox_tool(session_manager=manager(), session_key_fn=lambda: f"{key}-f")
    by_config = make_code_sandbox_tool(session_manager=manager(), session_key_fn=lambda config: f"{key}-{config['configurable']['user']}")
    plain = make_code_sandbox_tool(session_manager=sm)
    run(by_function, code="me = 'f'")
    by_config.invoke({"code": "me = 'c'"}, {"configurable": {"user": "u"}})
    plain.invoke({"code": "me = 't'"}, {"configurable": {"thread_id": f"{key}-t"}})
    assert {k: server.get_session(k).state().variables["me"].value for k in (f"{key}-f", f"{key}-u", f"{key}-t")} == {
        f"{key}-f": "f", f"{key}-u": "c", f"{key}-t": "t"}
    run(plain, code="1")
    assert server.get_session("conv").info.runs >= 1
    server.get_session("conv").remove()


def test_S4_63_D3_a_function_that_gives_no_key_is_told(manager: Make) -> None:
    with pytest.raises(ValueError, match="session key"):
        run(make_code_sandbox_tool(session_manager=manager(), session_key_fn=lambda: "../x"), code="1")


def test_S4_63_S4_65_the_key_can_be_made_of_the_runtime_and_awaited(manager: Make, key: str, server: Cove) -> None:
    async def by_runtime(runtime: ToolRuntime) -> str:
        await asyncio.sleep(0)
        return f"{key}-{runtime.tool_call_id}"

    code = make_code_sandbox_tool(session_manager=manager(), session_key_fn=by_runtime)
    config: RunnableConfig = {"configurable": {"thread_id": key}}
    graph(code).invoke({"messages": [tool_call("code_sandbox", code="1", id="one")]}, config)
    asyncio.run(graph(code).ainvoke({"messages": [tool_call("code_sandbox", code="1", id="two")]}, config))
    assert {i.key for i in server.sessions() if i.key.startswith(key)} == {f"{key}-one", f"{key}-two"}


@pytest.mark.parametrize("make_agent", [create_agent, create_react_agent], ids=["create_agent", "create_react_agent"])
def test_S4_64_S4_65_agents_use_the_tool_in_the_session_of_their_thread(manager: Make, key: str, server: Cove, make_agent: Any) -> None:
    model = ScriptedModel(script=[tool_call("code_sandbox", code="x = 20"), tool_call("code_sandbox", code="print(x + 3)"), lambda m: str(m[-1].text)])
    agent = make_agent(model, [make_code_sandbox_tool(session_manager=manager())], checkpointer=InMemorySaver())
    answer = agent.invoke({"messages": [("user", "go")]}, {"configurable": {"thread_id": key}})
    assert answer["messages"][-1].text.startswith("23\n")
    assert server.get_session(key).info.runs == 2


def test_S4_64_a_tool_node_runs_parallel_calls_of_one_session_in_order(manager: Make, key: str) -> None:
    code = make_code_sandbox_tool(session_manager=manager(), session_key_fn=lambda: key)
    run(code, code="seen = []")
    calls = tool_calls(*[("code_sandbox", {"code": f"seen.append({i})\nprint(len(seen))"}) for i in range(10)])
    told = graph(code).invoke({"messages": [calls]}, {"configurable": {"thread_id": key}})["messages"][1:]
    assert [t.tool_call_id for t in told] == [c["id"] for c in calls.tool_calls]
    assert sorted(int(payload(t)["stdout"]) for t in told) == list(range(1, 11))


def test_S4_54_sync_and_async_invoke_do_the_same(manager: Make, key: str) -> None:
    code = make_code_sandbox_tool(session_manager=manager(), session_key_fn=lambda: key)
    run(code, code="x = 1")
    for _ in range(2):  # two event loops, one after the other
        told = message(asyncio.run(code.ainvoke({"code": "x += 1\nprint(x)"})))
    assert payload(told)["stdout"] == "3\n"


async def test_S4_54_an_async_graph_goes_on_while_code_runs(manager: Make, key: str) -> None:
    """Three runs wait for a file that this loop writes once all three have begun: one after the other none would end."""
    sm = manager()
    code = make_code_sandbox_tool(session_manager=sm)
    keys = [f"{key}-{i}" for i in range(3)]
    for each in keys:
        await sm.astart(each)
    runs = [graph(code).ainvoke({"messages": [tool_call("code_sandbox", code=WAIT)]}, {"configurable": {"thread_id": k}}) for k in keys]
    told = await asyncio.gather(*runs, let_go(sm, keys))
    assert [payload(t["messages"][-1])["stdout"] for t in told[:3]] == ["done\n"] * 3


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_stdout_is_streamed_while_the_code_runs(manager: Make, key: str, server: Cove, mode: str) -> None:
    code = make_code_sandbox_tool(session_manager=manager(), session_key_fn=lambda: key)
    run(code, code="1")
    sandbox = server.get_session(key).sandbox
    wait = "import os, time\nprint('first', flush=True)\nwhile not os.path.exists('/session/go'): time.sleep(.01)\nprint('second')"
    given = ({"messages": [tool_call("code_sandbox", code=wait, id="c")]}, {"configurable": {"thread_id": key}})
    seen: list[Any] = []

    def see(kind: str, told: Any) -> None:
        seen.append((kind, told))
        if kind == "custom" and told["text"] == "first\n":
            sandbox.write("/session/go", b"")  # only now can the code end

    async def stream() -> None:
        async for kind, told in graph(code).astream(*given, stream_mode=["custom", "tools"]):
            await asyncio.to_thread(see, kind, told)

    if mode == "async":
        asyncio.run(stream())
    else:
        for kind, told in graph(code).stream(*given, stream_mode=["custom", "tools"]):
            see(kind, told)
    assert [t for k, t in seen if k == "custom"] == [
        {"type": "code_output", "tool": "code_sandbox", "tool_call_id": "c", "stream": "stdout", "text": text} for text in ("first\n", "second\n")]
    assert [t["delta"] for k, t in seen if k == "tools" and t["event"] == "tool-output-delta"] == ["first\n", "second\n"]


def test_a_node_that_is_run_again_runs_its_code_once(manager: Make, key: str, server: Cove) -> None:
    """LangGraph runs a node from its start when it goes on after an interrupt."""
    sm = manager()
    node = ToolNode([make_code_sandbox_tool(session_manager=sm)])
    call = tool_call("code_sandbox", code="n = globals().get('n', 0) + 1\nprint(n)")

    def careful(state: MessagesState, config: RunnableConfig) -> Any:
        told = node.invoke({"messages": [call]}, config)
        interrupt("may it go on?")
        return told

    flow = StateGraph(MessagesState).add_node("careful", careful).add_edge(START, "careful").compile(checkpointer=InMemorySaver())
    config: RunnableConfig = {"configurable": {"thread_id": key}}
    flow.invoke({"messages": []}, config)
    flow.invoke(Command(resume=True), config)
    assert server.get_session(key).state().variables["n"].value == "1"
    flow.invoke({"messages": []}, config)  # another turn of the thread is another run
    assert server.get_session(key).state().variables["n"].value == "2"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_graph_that_goes_back_in_time_runs_the_code_again_in_the_sandbox_of_then(manager: Make, key: str, mode: str) -> None:
    from cove.checkpoint import CoveCheckpointer

    sm = manager(session_storage="DISK")
    model = ScriptedModel(script=[tool_call("code_sandbox", code="x = 1"), "one", tool_call("code_sandbox", code="x += 1\nprint(x)"), "two", "again"])
    agent = create_agent(model, [make_code_sandbox_tool(session_manager=sm)], checkpointer=CoveCheckpointer(InMemorySaver()))
    config: Any = {"configurable": {"thread_id": key}}

    def go(given: Any, config: Any) -> Any:
        return asyncio.run(agent.ainvoke(given, config)) if mode == "async" else agent.invoke(given, config)

    go({"messages": [("user", "make x")]}, config)
    told = go({"messages": [("user", "more")]}, config)
    assert payload(told["messages"][-2])["stdout"] == "2\n"
    before = next(s for s in agent.get_state_history(config) if s.next == ("tools",))  # the second call is about to run
    told = go(None, before.config)
    assert payload(told["messages"][-2])["stdout"] == "2\n"  # not 3: x was 1 again
    assert sm.exec(key, "print(x)")["stdout"] == "2\n"


def test_S4_38_a_lost_sandbox_is_told_to_the_model_before_it_is_replaced(manager: Make, key: str) -> None:
    sm = manager()
    code = make_code_sandbox_tool(session_manager=sm, session_key_fn=lambda: key)
    run(code, code="x = 1")
    sm.container_for(key).kill()
    lost = run(code, code="print(x)")
    assert lost.status == "error" and "lost" in payload(lost)["stderr"]
    again = run(code, code="print('x' in globals())")
    assert (payload(again)["stdout"], "new sandbox" in payload(again)["note"]) == ("False\n", True)
    assert "note" not in payload(run(code, code="1"))


def test_S4_38_a_sandbox_that_is_lost_while_code_runs_is_told_as_that(manager: Make, key: str) -> None:
    sm = manager()
    code = make_code_sandbox_tool(session_manager=sm, session_key_fn=lambda: key)
    run(code, code="x = 1")
    sandbox = sm.container_for(key)

    def end() -> None:
        while "begun" not in [e.name for e in sandbox.ls("/session")]:
            time.sleep(0.01)
        sandbox.kill()

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(end)
        lost = run(code, code=WAIT)
        ended.result()
    told = payload(lost)["stderr"]
    assert lost.status == "error" and "did not come to its end" in told and "Nothing was run" not in told


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 503 x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"], ids=["broken", "unavailable"])
def test_D7_a_connection_that_breaks_is_not_told_as_code_that_did_not_run(key: str, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # the test is over
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        sm = SessionManager(url=f"http://127.0.0.1:{server.getsockname()[1]}", api_key="k", dataset_access="NONE")
        told = run(make_code_sandbox_tool(session_manager=sm, session_key_fn=lambda: key), code="1")
        assert told.status == "error" and told.text.startswith("It is not known whether the code ran"), told.text
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_S4_46_the_tools_timeout_interrupts(manager: Make, key: str) -> None:
    code = make_code_sandbox_tool(session_manager=manager(), session_key_fn=lambda: key, timeout_s=10)
    told = run(code, code="print('before', flush=True)\nwhile True: pass")
    assert told.status == "error" and payload(told)["stdout"] == "before\n" and payload(told)["stderr"]


def test_D7_S4_123_a_server_that_cannot_be_reached_is_told_to_the_model(key: str) -> None:
    sm = SessionManager(url="http://127.0.0.1:1", api_key="k", dataset_access="API")
    tools = {"code_sandbox": {"code": "1"}, "list_datasets": {}, "export_datasets": {"container_path": "a"}}
    made = [make(session_manager=sm, session_key_fn=lambda: key) for make in (make_code_sandbox_tool, make_list_datasets_tool, make_export_datasets_tool)]
    for tool in made:
        told = run(tool, **tools[tool.name])
        assert told.status == "error" and "cove serve" in told.text
        assert "cove serve" in message(asyncio.run(tool.ainvoke(tools[tool.name]))).text


def test_a_stopped_session_is_started_again_by_the_tool(manager: Make, key: str) -> None:
    sm = manager()
    code = make_code_sandbox_tool(session_manager=sm, session_key_fn=lambda: key)
    run(code, code="1")
    sm.stop(key)
    assert payload(run(code, code="print(2)"))["stdout"] == "2\n"


def test_long_output_is_cut_for_the_model_and_kept_in_the_log(manager: Make, key: str, server: Cove) -> None:
    told = run(make_code_sandbox_tool(session_manager=manager(), session_key_fn=lambda: key), code="print('a' * 100_000)\nprint('the end')")
    assert len(told.text) < 50_000 and "left out" in told.text and "the end" in told.text


def exported(trace_id: str, name: str) -> dict[str, Any]:
    """The spans of a trace that the server exported, by id, once one of that name is there."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found: dict[str, Any] = {}
    deadline = time.monotonic() + 120
    while not any(s.name == name for s in found.values()) and time.monotonic() < deadline:
        for raw in httpx.get(os.environ["COVE_TEST_SPANS"] + "/requests").json():
            request = ExportTraceServiceRequest.FromString(base64.b64decode(raw))
            spans = [s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
            found |= {s.span_id.hex(): s for s in spans if s.trace_id.hex() == trace_id}
        time.sleep(0.05)
    return found


def test_every_call_is_a_span_above_what_the_server_does(manager: Make, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda *a, **k: provider.get_tracer("test"))
    code = make_code_sandbox_tool(session_manager=manager(), session_key_fn=lambda: key)
    seen = payload(run(code, code="import os\nprint(os.environ.get('TRACEPARENT', ''))"))["stdout"]
    asyncio.run(code.ainvoke({"code": "1"}))
    calls = exporter.get_finished_spans()
    assert [c.name for c in calls] == ["execute_tool code_sandbox"] * 2
    assert calls[0].attributes and calls[0].attributes["gen_ai.tool.name"] == "code_sandbox"
    assert f"{calls[0].context.trace_id:032x}" in seen
    for call in calls:
        spans = exported(f"{call.context.trace_id:032x}", "sandbox.exec")
        run_span = next(s for s in spans.values() if s.name == "sandbox.exec")
        above = [run_span.parent_span_id.hex()]
        while above[-1] in spans:
            above.append(spans[above[-1]].parent_span_id.hex())
        assert above[-1] == f"{call.context.span_id:016x}"


def test_the_program_of_the_readme_runs_with_its_import_changed(key: str, tmp_path: Any) -> None:
    text = """
from cove.langgraph_sandbox import (
    make_code_sandbox_tool,
    make_select_dataset_tool,
    make_export_datasets_tool,
    make_list_datasets_tool,
    SessionManager,
    Config
)

config = Config.from_env()

session_manager = SessionManager(
    image=config.sandbox_image,
    session_storage=config.session_storage,
    dataset_access=config.dataset_access,
    datasets_path=config.datasets_host_ro,
    session_root=config.sessions_root,
    tmpfs_size=config.tmpfs_size_mb,
)

def get_session_key():
    return KEY

code_tool = make_code_sandbox_tool(
    session_manager=session_manager,
    session_key_fn=get_session_key,
    timeout_s=60
)

def my_fetch_function(dataset_id: str) -> bytes:
    return dataset_bytes

dataset_tool = make_select_dataset_tool(
    session_manager=session_manager,
    fetch_fn=my_fetch_function
)
"""
    program: dict[str, Any] = {"KEY": key, "dataset_bytes": b"a,b\n1,2\n"}
    exec(text, program)
    selected = run(program["dataset_tool"], dataset_id="table.csv")
    assert "/session/data/table.csv" in selected.text, selected
    told = run(program["code_tool"], code="import pandas as pd\nprint(pd.read_csv('/session/data/table.csv').b.sum())")
    assert payload(told)["stdout"] == "2\n"


