"""A LangGraph agent whose one tool runs Python in sandboxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from typing_extensions import TypedDict

from cove.otel._tool import run_python

TOOLS: list[BaseTool] = [run_python]


class AgentState(TypedDict):
    messages: Annotated[Sequence[BaseMessage], add_messages]


def build_graph(model: BaseChatModel, tools: Sequence[BaseTool] | None = None) -> Any:
    """The compiled graph: `model` until it calls no more tools, `tools` in between, several calls at once side by side.

    The model is bound to the same list of tools (TOOLS when None) that the node runs, so that they cannot differ. A model that
    cannot be bound to tools, as the stubs of tests are, is used as it is.
    """
    chosen = list(TOOLS if tools is None else tools)
    try:
        bound: Any = model.bind_tools(chosen)
    except NotImplementedError:
        bound = model

    def ask(state: AgentState) -> dict[str, Any]:
        return {"messages": [bound.invoke(state["messages"])]}

    async def aask(state: AgentState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(AgentState)
    graph.add_node("model", RunnableLambda(ask, afunc=aask))
    graph.add_node("tools", ToolNode(chosen))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", _after_model, ["tools", END])
    graph.add_edge("tools", "model")
    return graph.compile()


def _after_model(state: AgentState) -> str:
    answer = state["messages"][-1]
    return "tools" if isinstance(answer, AIMessage) and answer.tool_calls else END
