"""python main.py backend | threads | tool | back [--scripted]"""

import os
import sys
import uuid

from cove.checkpoint import CoveCheckpointer
from cove.deepagents import EXECUTE_PYTHON_PROMPT, CoveSandbox, CoveThreadBackend, make_execute_python_tool
from cove.testing import ScriptedModel, last_tool_text, tool_call
from deepagents import create_deep_agent
from langgraph.checkpoint.memory import InMemorySaver

PRIMES = """found, n = [], 2
while len(found) < 10:
    if all(n % p for p in found):
        found.append(n)
    n += 1
print(*found)
"""


def told(messages):
    """What a tool said, without what deepagents adds to it."""
    return last_tool_text(messages).split("\n[Command")[0].strip()


def model(scripted, *script):
    """Claude where there is a key, else a script."""
    if scripted or not os.environ.get("ANTHROPIC_API_KEY"):
        return ScriptedModel(script=[*script, told])
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model=os.environ.get("ANTHROPIC_MODEL", "claude-sonnet-4-5"))


def ask(agent, question, config=None, **state):
    result = agent.invoke({"messages": [{"role": "user", "content": question}], **state}, config)
    return result["messages"][-1].text


def backend(scripted):
    """The sandbox is the agent's computer: what it writes in one turn is there in the next."""
    write = tool_call("write_file", file_path="/tmp/primes.py", content=PRIMES)
    speaks = model(scripted, write, tool_call("execute", command="python3 /tmp/primes.py"))
    with CoveSandbox.create() as sandbox:
        agent = create_deep_agent(speaks, backend=sandbox)
        print(ask(agent, "Which primes are below 30? Let a program in /tmp/primes.py find them."))
        print(len(sandbox.download_files(["/tmp/primes.py"])[0].content), "bytes in the sandbox")


def threads(scripted):
    """One backend for all conversations: each has its own sandbox, in whatever process it goes on."""
    own = CoveThreadBackend(idle_timeout_seconds=600)
    for name in ("ann", "bob", "ann"):
        speaks = model(scripted, tool_call("execute", command=f"echo {name} >>~/visits; wc -l <~/visits"))
        answer = ask(create_deep_agent(speaks, backend=own), f"Run `echo {name} >>~/visits; wc -l <~/visits` and tell the number.",
                     {"configurable": {"thread_id": f"{RUN}-{name}"}})
        print(name, answer)


def tool(scripted):
    """The agent keeps its files in its state, and a sandbox is there only while code runs."""
    code = "import csv; print(sum(int(row['n']) for row in csv.DictReader(open('/app/numbers.csv'))))"
    execute_python = make_execute_python_tool()
    agent = create_deep_agent(model(scripted, tool_call("execute_python", code=code)), tools=[execute_python],
                              system_prompt="Answer in one line." + EXECUTE_PYTHON_PROMPT)
    with execute_python.run_scope() as run:
        files = {"/app/numbers.csv": {"content": "n\n1\n2\n39\n", "encoding": "utf-8"}}
        print(ask(agent, "What is the sum of column n of numbers.csv?", files=files))
        print("sandbox", "made" if run.sandbox_id else "not needed")


def back(scripted):
    """From an older checkpoint of the graph the sandbox is as old as that."""
    write = [tool_call("execute", command=f"echo {n} >~/n; cat ~/n") for n in ("one", "two")]
    speaks = model(True, *write, told, tool_call("execute", command="cat ~/n"))  # a script: its steps are what is shown
    agent = create_deep_agent(speaks, backend=CoveThreadBackend(idle_timeout_seconds=600), checkpointer=CoveCheckpointer(InMemorySaver()))
    thread = {"configurable": {"thread_id": f"{RUN}-back"}}
    print("then", ask(agent, "Write one, then two.", thread))
    first = next(s for s in agent.get_state_history(thread) if s.next == ("model",) and told(s.values["messages"]) == "one")
    print("back", agent.invoke(None, first.config)["messages"][-1].text)


PROGRAMS = {"backend": backend, "threads": threads, "tool": tool, "back": back}
RUN = f"example-{uuid.uuid4().hex[:8]}"

if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--scripted"]
    if len(words) != 1 or words[0] not in PROGRAMS:
        sys.exit("usage: python main.py backend | threads | tool | back [--scripted]")
    PROGRAMS[words[0]]("--scripted" in sys.argv)
