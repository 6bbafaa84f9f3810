"""LangChain's older executor around a tool that somebody hands to it as `execute_python`."""

from langchain_classic.agents import AgentExecutor, create_tool_calling_agent
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

rules = "Arithmetic is for the tool: never do it in your head."
turns = ChatPromptTemplate.from_messages([("system", rules), ("human", "{input}"), ("placeholder", "{agent_scratchpad}")])
kit = [execute_python]  # noqa: F821
reckoner = AgentExecutor(agent=create_tool_calling_agent(ChatOpenAI(model="gpt-4", temperature=0), kit, turns), tools=kit, verbose=True)

answer = reckoner.invoke({"input": "Square every whole number up to 100. What do the squares add up to?"})["output"]
print(answer)
