"""cove-chat: talk to an agent that has a sandbox. Without a model's key a small scripted model answers."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from .errors import CoveError

_EXTRA = "cove-chat needs LangGraph: pip install 'PATH/OF/THE/CLONE/python[langgraph]'"
BYE = "/bye"
PROMPT = ("You have a Python sandbox. Use the code_sandbox tool for anything that has to be calculated or done; variables stay between calls. "
          "Save files for the user to /session/artifacts/.")
HELLO = """Sandbox {mode}, session {key}, model {model}. {bye} quits.
The scripted model runs what follows `run`, and does sums: try `run print(2**100)` or `factorial of 10`."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cove-chat", description="Talk to an agent that has a sandbox; /bye quits.")
    parser.add_argument("--model", help="fake, or a model such as anthropic:claude-sonnet-4-5 or openai:gpt-4.1 (COVE_CHAT_MODEL)")
    parser.add_argument("--env-file", help="settings to read; default is .env where there is one")
    parser.add_argument("--session", help="key of the session to go on with; default is a new one")
    args = parser.parse_args(argv)
    try:
        return chat(args.model, args.env_file, args.session)
    except ImportError as err:
        print(f"{_EXTRA} ({err})", file=sys.stderr)
    except (CoveError, ValueError, OSError) as err:
        print(f"cove-chat: {err}", file=sys.stderr)
    return 1


def chat(model: str | None, env_file: str | None, session: str | None) -> int:
    """Read a line, answer it, until /bye or the end of input."""
    from langchain.agents import create_agent
    from langgraph.checkpoint.memory import InMemorySaver

    from .langgraph_sandbox import Config, SessionManager, make_code_sandbox_tool, make_export_datasets_tool, make_list_datasets_tool
    from .langgraph_sandbox.config import read_env_file

    named = env_file is not None
    env_file = env_file or (".env" if os.path.exists(".env") else None)
    if env_file is not None:  # it has the key of a model too, which LangChain looks for in the environment
        for name, value in read_env_file(env_file).items():
            # A file that only lies there says nothing about where keys are sent, and no file says more than the environment.
            if value and not os.environ.get(name) and (named or name.endswith("_API_KEY") or name == "COVE_CHAT_MODEL"):
                os.environ[name] = value
    config = Config.from_env(env_file)
    name = choose_model(model)
    mind = _model(name)  # before there is a session that somebody would have to stop
    manager = SessionManager.from_config(config)
    key = manager.start(session or f"chat-{uuid.uuid4().hex[:8]}")
    tools = [make(session_manager=manager, session_key_fn=lambda: key)
             for make in (make_code_sandbox_tool, make_export_datasets_tool, make_list_datasets_tool)]
    agent = create_agent(mind, tools, system_prompt=PROMPT, checkpointer=InMemorySaver())
    print(HELLO.format(mode=config.mode_id(), key=key, model=name, bye=BYE))
    with asyncio.Runner() as loop:  # what it awaits can be interrupted, and the code in the sandbox with it
        try:
            while (line := _ask()) is not None:
                if line.strip():
                    _answer(loop, agent, line, key)
        finally:
            try:
                manager.stop(key)
            finally:
                loop.run(manager.aclose())
    print("Bye.")
    return 0


def _ask() -> str | None:
    try:
        line = input("\nYou: ")
    except (EOFError, KeyboardInterrupt):
        return None
    return None if BYE in line else line


def _answer(loop: asyncio.Runner, agent: Any, line: str, key: str) -> None:
    config = {"configurable": {"thread_id": key}, "recursion_limit": 25}
    try:
        print(f"Agent: {loop.run(_told(agent, line, config))}")
        return
    except KeyboardInterrupt:
        print("\nInterrupted.")
    except Exception as err:  # a model or a server that fails is told, and the conversation goes on
        print(f"Something went wrong: {err}")
    loop.run(_settle(agent, config))


async def _told(agent: Any, line: str, config: dict[str, Any]) -> str:
    """What the agent says in the end; what code prints is shown while it comes."""
    said = ""
    async for kind, told in agent.astream({"messages": [("user", line)]}, config, stream_mode=["custom", "values"]):
        if kind == "custom":
            print(told["text"], end="", flush=True)
        else:
            said = told["messages"][-1].text
    return said


async def _settle(agent: Any, config: dict[str, Any]) -> None:
    """Answer calls of tools that came to nothing: models refuse a conversation in which one has no answer."""
    from langchain_core.messages import ToolMessage

    messages = (await agent.aget_state(config)).values.get("messages", [])
    if messages and (calls := getattr(messages[-1], "tool_calls", None)):
        answers = [ToolMessage("This call was cut off.", tool_call_id=call["id"], name=call["name"], status="error") for call in calls]
        await agent.aupdate_state(config, {"messages": answers}, as_node="tools")


def choose_model(asked: str | None) -> str:
    """The model that was asked for, or the one whose key is set, or the scripted one."""
    asked = asked or os.environ.get("COVE_CHAT_MODEL")
    if asked:
        return asked
    if os.environ.get("ANTHROPIC_API_KEY"):
        return "anthropic:claude-sonnet-4-5"
    return "openai:gpt-4.1" if os.environ.get("OPENAI_API_KEY") else "fake"


def _model(name: str) -> Any:
    if name == "fake":
        from .testing import ScriptedModel

        return ScriptedModel(script=[_fake], loop=True)
    from langchain.chat_models import init_chat_model

    try:
        return init_chat_model(name)
    except ImportError as err:  # the package of the model's maker
        raise ValueError(f"model {name}: {err}") from None


def _fake(messages: Sequence[Any]) -> Any:
    """The scripted model's whole mind."""
    from .testing import tool_call

    last = messages[-1]
    if last.type == "tool":
        return f"The sandbox says:\n{last.text}"
    text = str(last.text).strip()
    if run := re.match(r"(?is)run\s+(.+)", text):
        return tool_call("code_sandbox", code=run[1])
    if number := re.search(r"(?i)factorial\D*(\d+)", text):
        return tool_call("code_sandbox", code=f"import math\nprint(math.factorial({number[1]}))")
    if re.fullmatch(r"[\d\s.+*/()%-]+", text):
        return tool_call("code_sandbox", code=f"print({text})")
    return "I am a script: say `run CODE`, a sum, or `factorial of N`."


if __name__ == "__main__":
    sys.exit(main())
