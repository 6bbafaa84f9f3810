"""Who decides what the agent does: Claude, or a script that needs no key."""

import itertools
import os

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

DEFAULT_MODEL = "claude-sonnet-4-5"

_ids = itertools.count(1)


def call(name, **args):
    """A message that calls a tool."""
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": f"call_{next(_ids)}"}])


def told(messages):
    """What the last tool said, without what deepagents adds to it."""
    last = next(m for m in reversed(messages) if isinstance(m, ToolMessage))
    return str(last.text).split("\n[Command")[0].strip()


class ScriptedModel(BaseChatModel):
    """Takes one step of its script after the other, and in the end repeats what the last tool said."""

    script: list[AIMessage]
    turn: int = 0

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools, **kwargs):
        return self

    def _generate(self, messages, stop=None, run_manager=None, **kwargs) -> ChatResult:
        step = self.script[self.turn] if self.turn < len(self.script) else AIMessage(told(messages))
        self.turn += 1
        return ChatResult(generations=[ChatGeneration(message=step)])


def model(scripted, *script):
    if scripted or not os.environ.get("ANTHROPIC_API_KEY"):
        return ScriptedModel(script=list(script))
    from langchain_anthropic import ChatAnthropic  # only who has a key needs it

    return ChatAnthropic(model=os.environ.get("ANTHROPIC_MODEL") or DEFAULT_MODEL)
