"""The code tool of an agent: Python in, what it printed out, each call a span."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import BaseTool, StructuredTool
from opentelemetry import trace
from opentelemetry.trace import Tracer

from cove.otel._snippet import ExecResult
from cove.otel._tracing import atraced_run, traced_run

_DESCRIPTION = """Runs a Python program in a sandbox; the answer is what it printed.

code is the whole program: no variable of an earlier call is there, and only what is printed comes back."""

_STDERR = 400  # characters of a failure that a model reads

# Of whatever provider the process has, now or later; without one its spans are nothing.
_tracer: Tracer = trace.get_tracer("cove.otel")


def set_tracer(tracer: Tracer) -> None:
    """Has run_python, and every tool of make_run_python without a tracer of its own, make its spans with this tracer."""
    global _tracer
    _tracer = tracer


def _told(result: ExecResult, timeout: float) -> str:
    """What a model reads of a result."""
    match result:
        case ExecResult(timed_out=True):
            return f"ERROR: execution timed out after {timeout:g} seconds"
        case ExecResult(exit_code=0, stdout=printed):
            return printed or "(no output)"
    return f"ERROR (exit {result.exit_code}): {result.stderr[:_STDERR]}"


def make_run_python(
    *,
    name: str = "run_python",
    description: str = _DESCRIPTION,
    tracer: Tracer | None = None,
    timeout: float = 10.0,
    cpu_seconds: int = 8,
    mem_mb: int = 128,
    **options: Any,
) -> BaseTool:
    """A tool with limits and rules of its own: options are run_snippet's (network, sandbox, allowed_env_keys) and traced_run's."""
    limits: dict[str, Any] = {"timeout": timeout, "cpu_seconds": cpu_seconds, "mem_mb": mem_mb, **options}

    def run(code: str) -> str:
        return _told(traced_run(tracer or _tracer, code, **limits), timeout)

    async def arun(code: str) -> str:
        return _told(await atraced_run(tracer or _tracer, code, **limits), timeout)

    return StructuredTool.from_function(func=run, coroutine=arun, name=name, description=description)


run_python = make_run_python()
