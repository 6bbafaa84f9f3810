"""What a tool call costs: from the call that LangGraph's ToolNode gets to its answer, beside a fresh Python process for the same code.

ToolNode is timed inside of a running graph, where agents have it; a graph that is begun for that one call is another row. Both sides take turns in the same run, so that whatever else the machine does falls on both. `make bench-langgraph` runs it.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from cove.langgraph_sandbox import SessionManager, make_code_sandbox_tool
from cove.testing import tool_call

N = int(os.environ.get("COVE_LANGGRAPH_BENCH_N", "300"))
BAR = 0.5
SCENARIOS = {
    "a sum": ("print(sum(range(1000)))", "499500", N),
    "a data frame": ("import pandas as pd\nprint(pd.DataFrame({'a': range(10)}).a.sum())", "45", max(10, N // 15)),
}


def main(out: str) -> int:
    load = os.getloadavg()[0]
    manager = SessionManager(dataset_access="NONE", tmpfs_size=256)
    key = manager.start(f"bench-{os.getpid()}")
    try:
        rows = [row for name, (code, want, n) in SCENARIOS.items() for row in measure(manager, key, name, code, want, n)]
    finally:
        manager.cove.get_session(key).remove()
    ratios = {r["scenario"]: r["value"] for r in rows if r["unit"] == "x" and r["subject"].startswith("ToolNode /")}
    result = {"host": host(load), "bar": {"a sum": BAR}, "pass": ratios["a sum"] <= BAR, "rows": rows}
    Path(out).write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        spread = f"p50 {row['p50_ms']:8.2f} ms  p99 {row['p99_ms']:8.2f} ms" if "p50_ms" in row else f"{row['value']:.3f}x"
        print(f"{row['scenario']:14} {row['subject']:28} n={row['n']:<5} {spread}")
    return 0 if result["pass"] else 1


def measure(manager: SessionManager, key: str, scenario: str, code: str, want: str, n: int) -> list[dict[str, Any]]:
    """Rows of one scenario: each side in turns."""
    tool = make_code_sandbox_tool(session_manager=manager, session_key_fn=lambda: key)
    node = ToolNode([tool])
    inside: list[float] = []

    def sync(state: MessagesState, config: RunnableConfig) -> Any:
        began = time.perf_counter()
        answer = node.invoke(state, config)
        inside.append((time.perf_counter() - began) * 1000)
        return answer

    async def awaited(state: MessagesState, config: RunnableConfig) -> Any:
        began = time.perf_counter()
        answer = await node.ainvoke(state, config)
        inside.append((time.perf_counter() - began) * 1000)
        return answer

    graph = StateGraph(MessagesState).add_node("tools", RunnableLambda(sync, awaited)).add_edge(START, "tools").compile()
    loop = asyncio.new_event_loop()
    with tempfile.NamedTemporaryFile("w", suffix=".py") as f:
        f.write(code)
        f.flush()
        sides: dict[str, Callable[[], str]] = {
            "graph": lambda: graph.invoke(question(code))["messages"][-1].text,
            "graph, async": lambda: loop.run_until_complete(graph.ainvoke(question(code)))["messages"][-1].text,
            "Cove client": lambda: manager.cove.get_session(key).run(code).stdout,
            "subprocess": lambda: subprocess.run([sys.executable, f.name], capture_output=True, text=True, check=True).stdout,
        }
        times: dict[str, list[float]] = {name: [] for name in ["ToolNode", "ToolNode, async", *sides]}
        for i in range(n + 3):  # the first three are for caches
            for name, ask in sides.items():
                began = time.perf_counter()
                answer = ask()
                took = (time.perf_counter() - began) * 1000
                if want not in answer:
                    raise RuntimeError(f"{name} answered {answer!r}")
                if i >= 3:
                    times[name].append(took)
                    if inside:
                        times[name.replace("graph", "ToolNode")].append(inside[-1])
                inside.clear()
    loop.close()
    rows = [{"scenario": scenario, "subject": name, "n": n, "p50_ms": percentile(took, 50), "p99_ms": percentile(took, 99),
             "value": percentile(took, 50), "unit": "ms"} for name, took in times.items()]
    base = rows[-1]["value"]
    return rows + [{"scenario": scenario, "subject": f"{r['subject']} / subprocess", "n": n, "value": round(r["value"] / base, 3), "unit": "x"} for r in rows[:-1]]


def question(code: str) -> dict[str, Any]:
    return {"messages": [tool_call("code_sandbox", code=code)]}


def percentile(values: list[float], p: int) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 3)


def host(load: float) -> dict[str, Any]:
    model = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {"cpus": os.cpu_count(), "cpu": model, "kernel": platform.release(), "python": platform.python_version(), "load_before": round(load, 2)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
