"""A job in a sandbox as a graph: create, prepare, run, inspect, clean up. Trying again is an edge, not a loop in a node."""

import uuid
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph

from sandboxes import Sandboxes


class State(TypedDict):
    run_id: str
    sandbox_id: str | None
    files: dict[str, str]
    prepared: bool  # the files are in the sandbox
    notes: str  # the file that the summary is told about
    command: str
    fallback_command: str
    attempt: int
    max_attempts: int
    run_output: str
    last_error: str
    summary: str
    cleaned: bool


def new_state(files: dict[str, str], notes: str, command: str, fallback: str, max_attempts: int = 2) -> State:
    return State(
        run_id=uuid.uuid4().hex, sandbox_id=None, files=files, prepared=False, notes=notes, command=command, fallback_command=fallback,
        attempt=0, max_attempts=max_attempts, run_output="", last_error="", summary="", cleaned=False,
    )


def describe(execution) -> str:
    """What a command said, as a person would read it in a terminal, with its failure at the end."""
    stdout = "\n".join(m.text.rstrip("\n") for m in execution.logs.stdout).strip()
    problems = ["\n".join(m.text.rstrip("\n") for m in execution.logs.stderr).strip()]
    if execution.error:
        problems.append(f"[error] {execution.error.name}: {execution.error.value}")
    problem = "\n".join(filter(None, problems))
    return "\n".join(filter(None, [stdout, problem and f"[stderr]\n{problem}"])) or "(no output)"


class Nodes:
    """What the nodes of the graph do. Each returns only what it changes."""

    def __init__(self, sandboxes: Sandboxes, model: Any) -> None:
        self.sandboxes, self.model = sandboxes, model

    async def create(self, state: State) -> dict:
        print("[create] asking for a sandbox")
        sandbox = await self.sandboxes.create(state["run_id"])
        print(f"[create] ready: {sandbox.id}")
        return {"sandbox_id": sandbox.id}

    async def prepare(self, state: State) -> dict:
        print(f"[prepare] writing {len(state['files'])} files")
        sandbox = await self.sandboxes.get(state["sandbox_id"])
        for path, text in state["files"].items():
            await sandbox.files.write_file(path, text)
        return {"prepared": True}

    async def run(self, state: State) -> dict:
        attempt, most, command = state["attempt"] + 1, state["max_attempts"], state["command"]
        print(f"[run] attempt {attempt}/{most}: {command}")
        sandbox = await self.sandboxes.get(state["sandbox_id"])
        execution = await sandbox.commands.run(command)
        output = describe(execution)
        print(f"[run] {output}")
        if not execution.error:
            return {"attempt": attempt, "run_output": output, "last_error": ""}
        following = state["fallback_command"] if attempt < most else command
        return {"attempt": attempt, "run_output": output, "command": following, "last_error": f"{execution.error.name}: {execution.error.value}"}

    async def inspect(self, state: State) -> dict:
        print("[inspect] reading the notes and asking for a summary")
        sandbox = await self.sandboxes.get(state["sandbox_id"])
        notes = await sandbox.files.read_file(state["notes"])
        answer = await self.model.ainvoke(
            "Say in one sentence what this job did and what its notes say.\n"
            f"<output>\n{state['run_output']}\n</output>\n<notes>\n{notes.strip()}\n</notes>"
        )
        print(f"[inspect] {answer.content}")
        return {"summary": answer.content}

    async def cleanup(self, state: State) -> dict:
        print("[cleanup] ending the sandbox")
        if state["sandbox_id"]:
            await self.sandboxes.end(state["sandbox_id"])
        print("[cleanup] done")
        return {"sandbox_id": None, "cleaned": True}


def decide(state: State) -> str:
    if state["last_error"] and state["attempt"] < state["max_attempts"]:
        print("[decide] once more, the other way")
        return "run"
    print("[decide] on to the inspection")
    return "inspect"


def build(nodes: Nodes, checkpointer=None, **policies):
    """The graph. What it is given as policies (a retry, a timeout) holds for every node."""
    graph = StateGraph(State)
    for name in ("create", "prepare", "run", "inspect", "cleanup"):
        graph.add_node(name, getattr(nodes, name), **policies)
    graph.add_edge(START, "create")
    graph.add_edge("create", "prepare")
    graph.add_edge("prepare", "run")
    graph.add_conditional_edges("run", decide, {"run": "run", "inspect": "inspect"})
    graph.add_edge("inspect", "cleanup")
    graph.add_edge("cleanup", END)
    return graph.compile(checkpointer=checkpointer)


async def follow(app, sandboxes: Sandboxes, state: State, config: dict | None = None) -> State:
    """Runs the graph to its end and returns the last state. Whatever fails on the way, no sandbox is left."""
    begun = state
    try:
        async for state in app.astream(begun, config, stream_mode="values"):
            pass
    finally:
        if not state["cleaned"]:
            await sandboxes.end_run(begun["run_id"])
    return state
