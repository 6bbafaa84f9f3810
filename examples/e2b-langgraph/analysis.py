"""Load, analyze, plot: three nodes of a graph, one sandbox."""

import operator
from typing import Annotated, TypedDict

from langgraph.graph import END, StateGraph

from cove.e2b import CodeInterpreter

LOAD = """
import numpy, pandas

months = pandas.date_range("2024-01", periods=12, freq="M")
ferry = pandas.DataFrame(numpy.random.default_rng(7).poisson((840, 610), (12, 2)), index=months, columns=["tickets", "fuel"])
print(ferry.describe().loc[["min", "max"]])
"""

ANALYZE = """
tickets, fuel = (int(total) for total in ferry.sum())
print(f"{tickets:,} for tickets, {fuel:,} for fuel, {tickets - fuel:,} left; best month {(ferry.tickets - ferry.fuel).idxmax():%B}")
"""

PLOT = """
axes = ferry.plot.area(title="A year of the ferry", alpha=0.5, stacked=False)
print("plotted")
"""


class State(TypedDict):
    results: Annotated[list[str], operator.add]
    pictures: Annotated[list[str], operator.add]
    sandbox_id: str


def build(sandbox: CodeInterpreter):
    """The graph over a sandbox that its caller ends."""

    def step(heading: str, code: str):
        def run(state: State) -> dict:
            cell = sandbox.notebook.exec_cell(code)
            if cell.error:
                raise RuntimeError(f"{heading}: {cell.error}")
            pictures = [result.png for result in cell.results if result.png]
            return {"results": [f"{heading}:\n{cell.logs.stdout}"], "pictures": pictures, "sandbox_id": sandbox.id}

        return run

    graph = StateGraph(State)
    graph.add_node("load", step("Data", LOAD))
    graph.add_node("analyze", step("Analysis", ANALYZE))
    graph.add_node("plot", step("Plot", PLOT))
    graph.set_entry_point("load")
    graph.add_edge("load", "analyze")
    graph.add_edge("analyze", "plot")
    graph.add_edge("plot", END)
    return graph.compile()


def main() -> State:
    with CodeInterpreter() as sandbox:
        state = build(sandbox).invoke({"results": [], "pictures": [], "sandbox_id": ""})
    for result in state["results"]:
        print(result)
    print(f"{len(state['pictures'])} picture(s), all from sandbox {state['sandbox_id']}")
    return state
