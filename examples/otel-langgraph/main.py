"""Asks an agent for Fibonacci numbers; every snippet it runs is a span.

python main.py [--parallel] [--scripted]
"""

import os
import sys

from langchain_core.messages import HumanMessage

from cove.otel import build_graph, configure_tracing, force_flush, set_tracer
from cove.testing import ScriptedModel, last_tool_text, tool_call, tool_calls

QUESTION = "Which are the ten smallest Fibonacci numbers, 0 included? Work them out in Python and answer with the numbers and commas alone."
FIBONACCI = """
a, b, numbers = 0, 1, []
for _ in range(10):
    numbers.append(str(a))
    a, b = b, a + b
print(", ".join(numbers))
"""


def scripted(parallel: bool) -> ScriptedModel:
    if parallel:
        squares = tool_calls(*[("run_python", {"code": f"print({n} ** 2)"}) for n in (11, 12, 13)])
        return ScriptedModel(script=[squares, lambda messages: ", ".join(str(m.content).strip() for m in messages[-3:])])
    return ScriptedModel(script=[tool_call("run_python", code=FIBONACCI), lambda messages: last_tool_text(messages).strip()])


def choose(argv: list[str]):
    if "--scripted" in argv or not os.environ.get("ANTHROPIC_API_KEY"):
        return scripted("--parallel" in argv)
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model=os.environ.get("ANTHROPIC_MODEL") or "claude-sonnet-4-5", temperature=0)


def main(argv: list[str]) -> str:
    tracer = configure_tracing("langgraph-sandbox-agent")
    set_tracer(tracer)
    with tracer.start_as_current_span("agent"):
        end = build_graph(choose(argv)).invoke({"messages": [HumanMessage(QUESTION)]})
    force_flush()
    answer = end["messages"][-1].text
    print("Answer:", answer)
    return answer


if __name__ == "__main__":
    main(sys.argv[1:])
