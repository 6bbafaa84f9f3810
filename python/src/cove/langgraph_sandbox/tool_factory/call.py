"""One call of a tool: whose session it is for, how it can be told apart from its repetition, and where its output is streamed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import langgraph.runtime
from langchain_core.messages import ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.types import Command

from ..._wire import Event
from .._steps import Ask, Work
from ..sandbox import SessionManager, check_key, key_for_thread

try:
    from opentelemetry import trace
except ImportError:  # nobody traces
    trace = None  # type: ignore[assignment]

DEFAULT_KEY = "conv"


@functools.lru_cache(maxsize=256)
def _wanted(function: Callable[..., Any]) -> str:
    """What a function of the user's takes: nothing, the config, or the runtime."""
    wanted = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not wanted:
        return ""
    kind = wanted[0].annotation
    by_runtime = wanted[0].name == "runtime" or "ToolRuntime" in (kind if isinstance(kind, str) else getattr(kind, "__name__", ""))
    return "runtime" if by_runtime else "config"


@dataclass(frozen=True)
class ToolCall:
    """What a graph tells of the call."""

    name: str
    id: str
    config: RunnableConfig
    runtime: Any = None

    @property
    def _configurable(self) -> Mapping[str, Any]:
        return self.config.get("configurable") or {}

    def session_key(self, manager: SessionManager, key_fn: Callable[..., Any] | None) -> Work[str]:
        """The key of the session: of the tool's function, else of the function another tool of the manager has, else of the
        thread, else a constant."""
        function = key_fn or manager.session_key_fn
        if function is not None:
            return check_key((yield Ask(function, self._arguments(function))))
        thread = self._configurable.get("thread_id")
        return DEFAULT_KEY if thread is None else key_for_thread(thread)

    def _arguments(self, function: Callable[..., Any]) -> tuple[Any, ...]:
        """Nothing, the config, or the runtime, as the function wants it."""
        return {"": (), "config": (self.config,), "runtime": (self.runtime,)}[_wanted(function)]

    def idempotency_key(self) -> str | None:
        """The same for a node that LangGraph runs again from its start, such as after an interrupt; without a checkpointer none does."""
        task = self._configurable.get("__pregel_task_id") or getattr(getattr(self.runtime, "execution_info", None), "task_id", None)
        thread, checkpoint = self._configurable.get("thread_id"), self._configurable.get("checkpoint_ns", "")
        if not thread or not task:
            return None
        return hashlib.sha256("\0".join(map(str, (thread, checkpoint, task, self.id))).encode()).hexdigest()

    def teller(self) -> Callable[[Event], None] | None:
        """What passes output on while the code runs; None where nobody listens, and the answer may come as a whole."""
        return self.tell if _listened(self._writer()) else None

    def tell(self, event: Event) -> None:
        """Pass output on while the code runs: to stream_mode custom and to stream_mode tools."""
        if event.type not in ("stdout", "stderr"):
            return
        text = event.data.decode("utf-8", "replace")
        if emit := getattr(self.runtime, "emit_output_delta", None):
            emit(text)
        if write := self._writer():
            write({"type": "code_output", "tool": self.name, "tool_call_id": self.id, "stream": event.type, "text": text})

    def _writer(self) -> Callable[[Any], object] | None:
        if writer := getattr(self.runtime, "stream_writer", None):
            return writer  # type: ignore[no-any-return]
        from langgraph.config import get_stream_writer

        with contextlib.suppress(RuntimeError, KeyError, AttributeError):  # called outside a graph
            return get_stream_writer()
        return None

    @contextlib.contextmanager
    def span(self) -> Iterator[None]:
        """The call as a span; what the server does is below it."""
        if trace is None:
            yield
            return
        attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": self.name, "gen_ai.tool.call.id": self.id, "gen_ai.tool.type": "function"}
        with trace.get_tracer("cove.langgraph_sandbox").start_as_current_span(f"execute_tool {self.name}", attributes=attributes):
            yield

    def answer(self, content: str | list[Any], artifact: Any = None, ok: bool = True) -> Command[Any]:
        """The graph's update: one message that answers the call."""
        message = ToolMessage(content, tool_call_id=self.id, name=self.name, artifact=artifact, status="success" if ok else "error")
        return Command(update={"messages": [message]})


def _listened(writer: Callable[[Any], object] | None) -> bool:
    """Whether output may reach anybody. LangGraph has no public word for it: where its own marks are not found, somebody listens."""
    nobody = getattr(langgraph.runtime, "_no_op_stream_writer", None)
    try:
        from langgraph.pregel._tools import _tool_call_writer

        deltas = _tool_call_writer.get() is not None
    except (ImportError, LookupError):
        deltas = True
    return deltas or nobody is None or writer not in (None, nobody)
