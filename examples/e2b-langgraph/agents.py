"""An agent with a code tool: one that makes a sandbox for each call, and one that keeps its sandbox."""

from langchain.agents import create_agent
from langchain_classic.agents import AgentExecutor, create_tool_calling_agent
from langchain_core.prompts import ChatPromptTemplate
from model import choose

from cove.e2b import CodeInterpreter
from cove.e2b.tools import execute_python, make_persistent_tool

QUESTION = "What is the sum of the squares of the numbers from 1 to 100?"
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "You have a Python sandbox: run code rather than guess."), ("human", "{input}"), ("placeholder", "{agent_scratchpad}")]
)


def ephemeral(argv: list[str]) -> str:
    """LangChain's older executor, a sandbox for each call."""
    agent = create_tool_calling_agent(choose("execute_python", argv), [execute_python], PROMPT)
    return AgentExecutor(agent=agent, tools=[execute_python]).invoke({"input": QUESTION})["output"]


def persistent(argv: list[str]) -> str:
    """LangChain's agent of today, one sandbox for all calls."""
    with CodeInterpreter() as sandbox:
        tool = make_persistent_tool(sandbox)
        said = create_agent(choose(tool.name, argv), [tool]).invoke({"messages": [("user", QUESTION)]})
    return said["messages"][-1].text


def main(argv: list[str]) -> list[str]:
    answers = [ephemeral(argv), persistent(argv)]
    for answer in answers:
        print(answer)
    return answers
