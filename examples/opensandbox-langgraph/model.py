"""Who writes the summary: Claude where there is a key, else a script."""

import os
import re
import sys

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult

DEFAULT_MODEL = "claude-sonnet-4-5"


class ScriptedModel(BaseChatModel):
    """Answers every prompt with one sentence made of the prompt itself, and remembers what it was asked."""

    asked: list[str] = []

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs) -> ChatResult:
        prompt = str(messages[-1].content)
        self.asked.append(prompt)
        facts = re.findall(r"<(\w+)>\s*(.*?)\s*</\1>", prompt, re.S)
        told = " and ".join(f"the {name} says {' '.join(text.split())!r}" for name, text in facts)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content=f"In short, {told or 'nothing was told'}."))])


def choose_credential() -> str:
    """Leaves exactly one of the two variables that Anthropic's client reads, and says which: the token wins."""
    if os.environ.get("ANTHROPIC_AUTH_TOKEN"):
        os.environ.pop("ANTHROPIC_API_KEY", None)
        return "ANTHROPIC_AUTH_TOKEN"
    if os.environ.get("ANTHROPIC_API_KEY"):
        os.environ.pop("ANTHROPIC_AUTH_TOKEN", None)
        return "ANTHROPIC_API_KEY"
    raise RuntimeError("set ANTHROPIC_API_KEY or ANTHROPIC_AUTH_TOKEN, or run with --scripted, which needs neither")


def claude() -> BaseChatModel:
    choose_credential()
    from langchain_anthropic import ChatAnthropic  # only who has a key needs the package

    return ChatAnthropic(model=os.environ.get("ANTHROPIC_MODEL") or DEFAULT_MODEL, anthropic_api_url=os.environ.get("ANTHROPIC_BASE_URL") or None)


def choose(argv: list[str]) -> BaseChatModel:
    """Claude where there is a key and nobody asked for the script."""
    if "--scripted" in argv:
        return ScriptedModel()
    if os.environ.get("ANTHROPIC_API_KEY") or os.environ.get("ANTHROPIC_AUTH_TOKEN"):
        return claude()
    print("A script answers, as with --scripted: for Claude set ANTHROPIC_API_KEY or ANTHROPIC_AUTH_TOKEN.", file=sys.stderr)
    return ScriptedModel()
