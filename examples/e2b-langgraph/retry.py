"""A step that may fail: told, counted, tried again, and given up after three tries."""

from typing import TypedDict

from langgraph.graph import END, StateGraph

from cove.e2b import CodeInterpreter

TRIES = 3
FAILS_TWICE = "tries = globals().get('tries', 0) + 1\nassert tries > 2, f'try {tries} is too early'\nprint(f'worked at try {tries}')"
FAILS_ALWAYS = "raise RuntimeError('there is no way')"


class State(TypedDict, total=False):
    code: str
    output: str
    error: str | None
    retry_count: int
    ended: str


def build(sandbox: CodeInterpreter):
    def execute(state: State) -> State:
        failed = {"retry_count": state.get("retry_count", 0) + 1}
        try:
            cell = sandbox.notebook.exec_cell(state["code"])
        except Exception as e:  # the sandbox itself: as good a reason to try again as a failure of the code
            return {**failed, "error": f"the sandbox: {e}"}
        return {**failed, "error": cell.error.value} if cell.error else {"output": str(cell.logs.stdout), "error": None}

    def route(state: State) -> str:
        if not state.get("error"):
            return "continue"
        return "retry" if state.get("retry_count", 0) < TRIES else "fail"

    graph = StateGraph(State)
    graph.add_node("execute", execute)
    graph.add_node("next_step", lambda state: {"ended": "next_step"})
    graph.add_node("handle_error", lambda state: {"ended": "handle_error"})
    graph.set_entry_point("execute")
    graph.add_conditional_edges("execute", route, {"continue": "next_step", "retry": "execute", "fail": "handle_error"})
    graph.add_edge("next_step", END)
    graph.add_edge("handle_error", END)
    return graph.compile()


def main() -> list[State]:
    states = []
    for code in (FAILS_TWICE, FAILS_ALWAYS):
        with CodeInterpreter() as sandbox:
            states.append(build(sandbox).invoke({"code": code}))
        last = states[-1]
        print(f"{last['ended']} after {last['retry_count']} failures: {last['error'] or last['output'].strip()}")
    return states
