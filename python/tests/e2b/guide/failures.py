"""A graph that tries a cell up to three times in a sandbox that somebody hands to it as `desk`."""

from operator import add
from typing import Annotated, TypedDict

from langgraph.graph import END, StateGraph

LIMIT = 3


class Try(TypedDict, total=False):
    cell: str
    printed: Annotated[list, add]
    error: str | None
    retry_count: int
    reached: str


def execute(state: Try):
    try:
        ran = desk.notebook.exec_cell(state["cell"])  # noqa: F821
        problem = ran.error and ran.error.value
    except Exception as lost:
        problem = f"no sandbox: {lost}"
    if problem is None:
        return {"printed": [ran.logs.stdout], "error": None}
    return {"error": problem, "retry_count": 1 + state.get("retry_count", 0)}


def way(state: Try):
    match state.get("error"), state.get("retry_count", 0):
        case None, _:
            return "continue"
        case _, count if count >= LIMIT:
            return "fail"
    return "retry"


plan = StateGraph(Try)
plan.add_node("execute", execute)
for last in ("next_step", "handle_error"):
    plan.add_node(last, lambda _, last=last: {"reached": last})
    plan.add_edge(last, END)
plan.add_conditional_edges("execute", way, {"continue": "next_step", "fail": "handle_error", "retry": "execute"})
plan.set_entry_point("execute")
app = plan.compile()
