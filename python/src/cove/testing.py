"""A chat model that says what a script tells it: agents run in tests and examples without a key."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import Field, PrivateAttr

Step = AIMessage | str | Callable[[list[BaseMessage]], AIMessage | str]


class ScriptedModel(BaseChatModel):
    """Answers with its script, one step after the other: a message, a text, or a function of what it was asked."""

    script: list[Any] = Field(default_factory=list)
    asked: list[list[BaseMessage]] = Field(default_factory=list)
    tools: list[str] = Field(default_factory=list)
    loop: bool = False
    """Begin again at the script's end instead of failing."""

    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @property
    def _llm_type(self) -> str:
        return "cove-scripted"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> ScriptedModel:
        """The model itself: its script knows which tools it calls."""
        self.tools = [t.get("name", "") if isinstance(t, dict) else getattr(t, "name", getattr(t, "__name__", "")) for t in tools]
        return self

    def _generate(self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        with self._lock:
            turn = len(self.asked)
            self.asked.append(list(messages))
        if turn >= len(self.script) and not (self.loop and self.script):
            raise RuntimeError(f"the script has {len(self.script)} steps, and the model was asked for step {turn + 1}")
        step = self.script[turn % len(self.script)]
        said = step(messages) if callable(step) else step
        message = AIMessage(said) if isinstance(said, str) else said
        return ChatResult(generations=[ChatGeneration(message=message)])


_ids = itertools.count(1)


def tool_call(name: str, *, id: str | None = None, **args: Any) -> AIMessage:
    """A message that calls one tool."""
    return tool_calls((name, args), ids=[id] if id else None)


def tool_calls(*calls: tuple[str, dict[str, Any]], ids: Sequence[str] | None = None) -> AIMessage:
    """A message that calls several tools at once."""
    names = ids or [f"call_{next(_ids)}" for _ in calls]
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": id} for (name, args), id in zip(calls, names, strict=True)])


def last_tool_text(messages: Sequence[BaseMessage]) -> str:
    """What the last tool said, as text."""
    for message in reversed(messages):
        if isinstance(message, ToolMessage):
            return str(message.text)
    return ""
