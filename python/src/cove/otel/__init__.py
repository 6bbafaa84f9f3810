"""Python snippets in sandboxes, each one a span: a code tool for LangGraph that an operator can follow.

    from cove.otel import build_graph, configure_tracing, set_tracer

    set_tracer(configure_tracing("my-agent"))
    graph = build_graph(model)

`run_snippet` needs nothing but a server (`COVE_URL`, `COVE_API_KEY`); `traced_run` needs opentelemetry-api, `configure_tracing`
also opentelemetry-sdk, and the tool and the graph need langchain-core and langgraph.
"""

from typing import TYPE_CHECKING, Any

from cove.otel._snippet import DEFAULT_ENV_KEYS, ExecResult, arun_snippet, run_snippet

if TYPE_CHECKING:
    from cove.otel._graph import TOOLS, AgentState, build_graph
    from cove.otel._tool import make_run_python, run_python, set_tracer
    from cove.otel._tracing import atraced_run, configure_tracing, force_flush, traced_run

__all__ = [
    "AgentState",
    "DEFAULT_ENV_KEYS",
    "ExecResult",
    "TOOLS",
    "arun_snippet",
    "atraced_run",
    "build_graph",
    "configure_tracing",
    "force_flush",
    "make_run_python",
    "run_python",
    "run_snippet",
    "set_tracer",
    "traced_run",
]

# What needs a package that not everybody has is imported when it is first asked for.
_WHERE = {
    **dict.fromkeys(("atraced_run", "configure_tracing", "force_flush", "traced_run"), "cove.otel._tracing"),
    **dict.fromkeys(("make_run_python", "run_python", "set_tracer"), "cove.otel._tool"),
    **dict.fromkeys(("AgentState", "TOOLS", "build_graph"), "cove.otel._graph"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'cove.otel' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)
