"""A year of a shop in three steps of a graph; the table of the first is still there for the other two."""

from operator import add
from typing import Annotated, TypedDict

from langgraph.graph import END, StateGraph

from cove.e2b import CodeInterpreter

CELLS = {
    "gather": """
import numpy as np, pandas as pd

shop = pd.DataFrame(np.random.randint(1_000, 9_000, (12, 2)), columns=["sold", "spent"])
shop.insert(0, "month", pd.date_range('2024-01', periods=12, freq='M'))
print(shop.tail(3))
""",
    "reckon": """
sold, spent = shop[["sold", "spent"]].sum()
print(f"sold {sold:,} spent {spent:,} kept {sold - spent:,} mean {shop.sold.mean():,.2f}")
""",
    "draw": """
from matplotlib import pyplot

figure, axes = pyplot.subplots()
axes.bar(shop.month, shop.sold - shop.spent, width=20)
axes.set_ylabel("kept")
figure.autofmt_xdate()
print("the bars are drawn")
""",
}


class Year(TypedDict):
    ready: bool
    notes: Annotated[list[str], add]
    sandbox_id: str


desk = CodeInterpreter()


def step(name):
    def run(year: Year):
        printed = desk.notebook.exec_cell(CELLS[name]).logs.stdout or "nothing was printed"
        return {"ready": True, "notes": [f"{name}: {printed}"], "sandbox_id": desk.id}

    return run


plan = StateGraph(Year)
for name in CELLS:
    plan.add_node(name, step(name))
for before, after in zip(CELLS, [*list(CELLS)[1:], END], strict=True):
    plan.add_edge(before, after)
plan.set_entry_point("gather")

year = plan.compile().invoke({"ready": False, "notes": [], "sandbox_id": ""})
print("\n".join(year["notes"]))
desk.close()
