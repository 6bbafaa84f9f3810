"""Who decides what to run: a model whose key is set, or a script."""

import os

from cove.testing import ScriptedModel, last_tool_text, tool_call

SQUARES = "print(sum(n * n for n in range(1, 101)))"


def scripted(tool: str) -> ScriptedModel:
    """Calls the tool once and repeats what it said."""
    return ScriptedModel(script=[tool_call(tool, code=SQUARES), lambda messages: f"The sum is {last_tool_text(messages).strip()}."])


def choose(tool: str, argv: list[str]):
    if "--scripted" not in argv and os.environ.get("ANTHROPIC_API_KEY"):
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model=os.environ.get("ANTHROPIC_MODEL") or "claude-sonnet-4-5", temperature=0)
    if "--scripted" not in argv and os.environ.get("OPENAI_API_KEY"):
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(model=os.environ.get("OPENAI_MODEL") or "gpt-4o-mini", temperature=0)
    return scripted(tool)
