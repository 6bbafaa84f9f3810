"""examples/opensandbox-langgraph, run as it is and node by node."""

import asyncio
import os
import subprocess
import sys
import types

import pytest

langgraph = pytest.importorskip("langgraph", reason="the packages of June come without it")
sys.path.insert(0, os.environ["OPENSANDBOX_SUITE_EXAMPLE"])

import main as example  # noqa: E402
import model  # noqa: E402
import search  # noqa: E402
from langgraph.checkpoint.memory import InMemorySaver  # noqa: E402
from langgraph.types import RetryPolicy, TimeoutPolicy  # noqa: E402
from opensandbox.exceptions import SandboxException  # noqa: E402
from sandboxes import Sandboxes, connection  # noqa: E402
from workflow import Nodes, build, describe, follow, new_state  # noqa: E402

EXAMPLE = os.environ["OPENSANDBOX_SUITE_EXAMPLE"]
RETRY = RetryPolicy(initial_interval=0.01, max_attempts=3, retry_on=lambda e: isinstance(e, (ConnectionError, TimeoutError)) or type(e).__name__ == "NodeTimeoutError")


@pytest.fixture(autouse=True)
def where(monkeypatch):
    monkeypatch.setenv("SANDBOX_DOMAIN", os.environ["OPEN_SANDBOX_DOMAIN"])
    monkeypatch.setenv("SANDBOX_API_KEY", os.environ["OPEN_SANDBOX_API_KEY"])
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_MODEL", "SANDBOX_IMAGE"):
        monkeypatch.delenv(name, raising=False)


class Run:
    """One graph with a scripted model, and every state that it went through."""

    def __init__(self, state=None, **build_options):
        self.sandboxes, self.model = Sandboxes(), model.ScriptedModel(asked=[])
        self.nodes = Nodes(self.sandboxes, self.model)
        self.options, self.state = build_options, state or example.job()

    async def __call__(self, config=None):
        return await follow(build(self.nodes, **self.options), self.sandboxes, self.state, config)


def left_behind(wire, state):
    return wire.api("GET", f"/sandboxes?metadata=workflow%3D{state['run_id']}").json()["pagination"]["totalItems"]


def execution(stdout=(), stderr=(), error=None):
    text = lambda lines: [types.SimpleNamespace(text=line) for line in lines]  # noqa: E731
    return types.SimpleNamespace(logs=types.SimpleNamespace(stdout=text(stdout), stderr=text(stderr)), error=error and types.SimpleNamespace(name=error[0], value=error[1]))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (execution(["a", "b"]), "a\nb"),
        (execution(["a"], ["oops"]), "a\n[stderr]\noops"),
        (execution([], ["oops"], ("CommandExecError", "3")), "[stderr]\noops\n[error] CommandExecError: 3"),
        (execution(["a"], [], ("CommandExecError", "3")), "a\n[stderr]\n[error] CommandExecError: 3"),
        (execution(), "(no output)"),
    ],
)
def test_S3_21_what_a_command_said_as_text(given, told):
    assert describe(given) == told


def test_S3_8_one_credential_and_the_token_wins(monkeypatch):
    with pytest.raises(RuntimeError, match="ANTHROPIC_API_KEY"):
        model.claude()
    monkeypatch.setenv("ANTHROPIC_API_KEY", "key")
    assert model.choose_credential() == "ANTHROPIC_API_KEY"
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "token")
    assert model.choose_credential() == "ANTHROPIC_AUTH_TOKEN"
    assert "ANTHROPIC_API_KEY" not in os.environ and os.environ["ANTHROPIC_AUTH_TOKEN"] == "token"


def test_S3_9_the_models_name_and_address_are_settings(monkeypatch):
    package = types.ModuleType("langchain_anthropic")
    package.ChatAnthropic = lambda **kw: kw
    monkeypatch.setitem(sys.modules, "langchain_anthropic", package)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "key")
    assert model.claude() == {"model": model.DEFAULT_MODEL, "anthropic_api_url": None}
    monkeypatch.setenv("ANTHROPIC_MODEL", "other")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://localhost:1")
    assert model.claude() == {"model": "other", "anthropic_api_url": "http://localhost:1"}


def test_S3_5_and_S3_6_the_examples_defaults(monkeypatch):
    monkeypatch.delenv("SANDBOX_DOMAIN")
    monkeypatch.delenv("SANDBOX_API_KEY")
    config = connection()
    assert config.domain == "localhost:8080" and config.api_key is None
    assert config.request_timeout.total_seconds() == 120


def test_S3_22_and_S3_54_the_graph_shows_every_way():
    drawn = build(Nodes(Sandboxes(), None)).get_graph()
    assert set(drawn.nodes) == {"__start__", "create", "prepare", "run", "inspect", "cleanup", "__end__"}
    edges = {(e.source, e.target, e.conditional) for e in drawn.edges}
    assert edges == {
        ("__start__", "create", False), ("create", "prepare", False), ("prepare", "run", False), ("run", "run", True), ("run", "inspect", True),
        ("inspect", "cleanup", False), ("cleanup", "__end__", False),
    }
    assert "run" in drawn.draw_mermaid()


async def test_S3_24_S3_25_S3_31_the_first_command_is_enough(wire):
    run = Run()
    state = await run()
    assert (state["attempt"], state["run_output"], state["last_error"], state["command"]) == (1, "5754", "", "python3 /tmp/job.py")
    assert (state["sandbox_id"], state["cleaned"], state["max_attempts"]) == (None, True, 2)
    assert set(state) >= {"run_output", "summary", "last_error", "attempt", "max_attempts", "command", "fallback_command", "cleaned"}
    assert left_behind(wire, state) == 0


async def test_S3_26_and_S3_29_the_fallback_runs_in_the_same_sandbox(wire):
    seen = []
    run = Run(new_state({"/tmp/notes.txt": "n\n"}, "/tmp/notes.txt", "touch /tmp/first; exit 9", "test -e /tmp/first && echo found"))
    inner = run.nodes.run

    async def watched(state):
        seen.append(state["sandbox_id"])
        return await inner(state)

    run.nodes.run = watched
    state = await run()
    assert (state["attempt"], state["last_error"], state["run_output"]) == (2, "", "found")
    assert len(seen) == 2 and seen[0] == seen[1]
    assert left_behind(wire, state) == 0


async def test_S3_27_and_S3_28_when_all_fail_it_goes_on_to_inspect(wire):
    run = Run(new_state({"/tmp/notes.txt": "n\n"}, "/tmp/notes.txt", "exit 1", "echo tried >> /tmp/tries; exit 2", max_attempts=3))
    state = await run()
    assert (state["attempt"], state["last_error"]) == (3, "CommandExecError: 2")
    assert state["command"] == state["fallback_command"]
    assert "CommandExecError: 2" in run.model.asked[0] and state["cleaned"]
    once = Run(new_state({"/tmp/notes.txt": "n\n"}, "/tmp/notes.txt", "exit 1", "never", max_attempts=1))
    assert (await once())["command"] == "exit 1"


async def test_S3_30_the_model_sees_the_output_and_the_notes():
    run = Run()
    state = await run()
    assert len(run.model.asked) == 1
    assert "5754" in run.model.asked[0] and "A graph drives a sandbox." in run.model.asked[0]
    assert "5754" in state["summary"]


async def test_S3_36_each_nodes_state_is_streamed():
    run = Run()
    states = [s async for s in build(run.nodes).astream(run.state, stream_mode="values")]
    assert [bool(s["sandbox_id"]) for s in states] == [False, True, True, True, True, False]
    assert [s["attempt"] for s in states] == [0, 0, 0, 1, 1, 1]
    assert [bool(s["summary"]) for s in states] == [False, False, False, False, True, True]


@pytest.mark.parametrize("node", ["create", "prepare", "run", "inspect", "cleanup"])
async def test_S3_34_a_failure_in_any_node_leaves_no_sandbox(wire, node):
    run = Run()
    inner = getattr(run.nodes, node)

    async def broken(state):
        if node == "create":
            await inner(state)  # made, and lost before the state knew of it
        raise ValueError("injected")

    setattr(run.nodes, node, broken)
    with pytest.raises(ValueError, match="injected"):
        await run()
    assert left_behind(wire, run.state) == 0


async def test_S3_37_and_S3_38_a_checkpoint_is_continued_by_another_process(wire):
    saver, config = InMemorySaver(), {"configurable": {"thread_id": "t"}}
    first = Run()
    app = build(first.nodes, checkpointer=saver)
    async for _ in app.astream(first.state, config, interrupt_after=["prepare"]):
        pass
    held = (await app.aget_state(config)).values
    assert held["sandbox_id"] and not held["cleaned"]
    second = Run()  # knows nothing but what was saved
    final = await build(second.nodes, checkpointer=saver).ainvoke(None, config)
    assert (final["run_output"], final["cleaned"]) == ("5754", True)
    assert left_behind(wire, first.state) == 0


async def test_S3_55_a_retried_node_makes_no_second_sandbox(wire):
    run = Run(retry_policy=RETRY, timeout=TimeoutPolicy(run_timeout=20))
    inner, tries, most = run.nodes.create, [], []

    async def flaky(state):
        made = await inner(state)
        tries.append(made["sandbox_id"])
        most.append(left_behind(wire, run.state))
        if len(tries) == 1:
            raise ConnectionError("after the sandbox was made")
        return made

    run.nodes.create = flaky
    state = await run()
    assert len(tries) == 2 and tries[0] == tries[1] and most == [1, 1]
    assert state["run_output"] == "5754" and left_behind(wire, state) == 0


async def test_S3_56_another_pair_of_commands(wire):
    state = await follow(build(Nodes(sandboxes := Sandboxes(), model.ScriptedModel(asked=[]))), sandboxes, search.job())
    assert "TODO" in state["run_output"] and state["last_error"] == ""
    assert left_behind(wire, state) == 0


async def test_S3_41_twenty_graphs_in_one_loop(wire):
    runs = [Run() for _ in range(20)]
    states = await asyncio.gather(*(r() for r in runs))
    assert [s["run_output"] for s in states] == ["5754"] * 20
    assert sum(left_behind(wire, s) for s in states) == 0


@pytest.mark.parametrize("script", ["main.py", "search.py"])
def test_S3_23_S3_39_S3_40_the_program_as_a_person_runs_it(script):
    done = subprocess.run([sys.executable, "-B", script, "--scripted"], cwd=EXAMPLE, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    nodes = ["[create]", "[prepare]", "[run]", "[decide]", "[inspect]", "[cleanup]"]
    assert list(dict.fromkeys(w for w in (line.split(" ")[0] for line in lines) if w in nodes)) == nodes
    assert any(line.startswith("[create] ready: ") for line in lines) and any("attempt 1/2" in line for line in lines)
    assert lines[-2].startswith("Output: ") and lines[-1].startswith("Summary: In short")
    if script == "main.py":
        assert "Output: 5754" in lines


def test_S3_40_without_a_key_a_script_answers_and_it_says_what_to_do():
    done = subprocess.run([sys.executable, "-B", "main.py"], cwd=EXAMPLE, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "Summary: In short" in done.stdout, done.stderr
    assert "ANTHROPIC_API_KEY" in done.stderr and "--scripted" in done.stderr


async def test_S3_7_the_examples_image_is_a_setting(monkeypatch):
    monkeypatch.setenv("SANDBOX_IMAGE", "base")
    sandboxes = Sandboxes()
    sandbox = await sandboxes.create("s3-7-" + os.urandom(4).hex())
    assert (await sandbox.get_info()).image.image == "base"
    await sandboxes.end(sandbox.id)
    monkeypatch.setenv("SANDBOX_IMAGE", "127.0.0.1:1/none")
    with pytest.raises(SandboxException):
        await sandboxes.create("s3-7-" + os.urandom(4).hex())
