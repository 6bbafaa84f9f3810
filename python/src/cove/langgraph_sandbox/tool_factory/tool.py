"""The tool that LangChain and LangGraph see."""

# Annotations are evaluated here, and not later from text: LangChain would compile that text again in every call.

import uuid
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.tools import StructuredTool


class SandboxTool(StructuredTool):
    """A tool that can be called by a graph, with a whole tool call, or with nothing but its arguments."""

    def run(self, tool_input: Any, *args: Any, tool_call_id: str | None = None, **kwargs: Any) -> Any:
        return super().run(tool_input, *args, tool_call_id=tool_call_id or _new_id(), **kwargs)

    async def arun(self, tool_input: Any, *args: Any, tool_call_id: str | None = None, **kwargs: Any) -> Any:
        return await super().arun(tool_input, *args, tool_call_id=tool_call_id or _new_id(), **kwargs)

    # Our functions all take the config by that name: there is no need to look at their signatures in every call.

    def _run(self, *args: Any, config: RunnableConfig, run_manager: Any = None, **kwargs: Any) -> Any:
        return self.func(*args, config=config, **kwargs)  # type: ignore[misc]

    async def _arun(self, *args: Any, config: RunnableConfig, run_manager: Any = None, **kwargs: Any) -> Any:
        return await self.coroutine(*args, config=config, **kwargs)  # type: ignore[misc]


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex}"
