"""What the examples share: an agent with tools, and a conversation with it, by a script or by a person."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Sequence
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import BaseTool
from langgraph.checkpoint.memory import InMemorySaver

from ...chat import BYE, choose_model
from ...testing import ScriptedModel
from .. import SessionManager


def arguments(about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--model", help="such as anthropic:claude-sonnet-4-5; default: the one whose key is set, else a script")
    parser.add_argument("--chat", action="store_true", help="ask questions yourself; /bye quits")
    return parser.parse_args()


def new_key() -> str:
    """A session key for one conversation; it is the thread's id too."""
    return f"example-{uuid.uuid4().hex[:8]}"


def converse(manager: SessionManager, key: str, tools: Sequence[BaseTool], prompt: str, questions: Sequence[str], script: Sequence[Any],
             args: argparse.Namespace) -> None:
    """Ask an agent the questions, or those that a person types, and stop the session at the end."""
    name = choose_model(args.model)
    model = ScriptedModel(script=list(script)) if name == "fake" else _real(name)
    agent = create_agent(model, list(tools), system_prompt=prompt, checkpointer=InMemorySaver())
    seen = 0
    try:
        for question in _typed() if args.chat else questions:
            print(f"You: {question}")
            answer = agent.invoke({"messages": [HumanMessage(question)]}, {"configurable": {"thread_id": key}})
            new, seen = answer["messages"][seen:], len(answer["messages"])
            for message in new:
                for artifact in (message.artifact or []) if message.type == "tool" and isinstance(message.artifact, list) else []:
                    print(f"  file: {artifact['name']} ({artifact['size']} bytes) {artifact.get('url', '')}")
            print(f"Agent: {answer['messages'][-1].text}")
    finally:
        manager.stop(key)


def _real(name: str) -> Any:
    from langchain.chat_models import init_chat_model

    return init_chat_model(name)


def _typed() -> Any:
    while BYE not in (line := input("Your question: ")):
        yield line
