"""python main.py backend | tool [--scripted]"""

import base64
import contextlib
import contextvars
import os
import sys
from typing import Annotated

from deepagents import create_deep_agent
from k8s_agent_sandbox import SandboxClient
from k8s_agent_sandbox.models import SandboxDirectConnectionConfig, SandboxLocalTunnelConnectionConfig
from langchain_core.tools import tool
from langchain_kubernetes_agent_sandbox import KubernetesAgentSandbox
from langgraph.prebuilt import InjectedState

from model import call, model

TEMPLATE = os.environ.get("SANDBOX_TEMPLATE", "python-3.12")
NAMESPACE = os.environ.get("SANDBOX_NAMESPACE", "agent-sandboxes")

PRIMES = """found, n = [], 2
while len(found) < 10:
    if all(n % p for p in found):
        found.append(n)
    n += 1
print(*found)
"""


def connection():
    """Through kubectl, or straight to the URL that `cove kubeconfig --router-url` prints."""
    if url := os.environ.get("SANDBOX_ROUTER_URL"):
        return SandboxDirectConnectionConfig(api_url=url)
    return SandboxLocalTunnelConnectionConfig()


def new_sandbox():
    # The first argument is a template to clients before 0.5 and a warm pool since; here both have the same name.
    return KubernetesAgentSandbox(sandbox=SandboxClient(connection_config=connection()).create_sandbox(TEMPLATE, namespace=NAMESPACE))


def ask(agent, question, **state):
    return agent.invoke({"messages": [{"role": "user", "content": question}], **state})["messages"][-1].text


def backend(scripted):
    """The sandbox is the agent's computer for a whole conversation."""
    sandbox = new_sandbox()
    try:
        sandbox.upload_files([("/app/hint.txt", b"trial division is enough")])
        speaks = model(scripted, call("read_file", file_path="/app/hint.txt"), call("write_file", file_path="/app/primes.py", content=PRIMES),
                       call("execute", command="python3 /app/primes.py"))
        agent = create_deep_agent(model=speaks, backend=sandbox)
        print(ask(agent, "Write a Python script that prints the first 10 primes and run it. There is a hint in /app/hint.txt."))
        speaks = model(scripted, call("execute", command="ls /app"))
        print(ask(create_deep_agent(model=speaks, backend=sandbox), "Which files are in /app now?"))
    finally:
        sandbox.sandbox.terminate()


PROMPT = (
    "\n\nYou have a tool `execute_python(code)` that runs Python 3 in a sandbox. Each call is a program of its own: variables do not "
    "stay, files do until you have answered. The files that you keep are in /app/ of the sandbox before each call, so use the "
    "paths /app/<name>."
)

_run = contextvars.ContextVar("run")  # the sandbox of one run: runs at the same time have one each


@contextlib.contextmanager
def run():
    """What is called within has one sandbox, from the first call of the tool to the end."""
    own = {}
    token = _run.set(own)
    try:
        yield own
    finally:
        _run.reset(token)
        if "sandbox" in own:
            with contextlib.suppress(Exception):
                own["sandbox"].sandbox.terminate()


def seeded(files):
    """The run's sandbox, with the agent's files as they are now."""
    own = _run.get()
    if "sandbox" not in own or not own["sandbox"].sandbox.is_active:
        own["sandbox"] = new_sandbox()
    payload = []
    for path, data in files.items():
        content = data["content"]
        raw = base64.b64decode(content) if data.get("encoding") == "base64" else content.encode()
        payload.append((path if path.startswith("/") else f"/app/{path}", raw))
    if payload:
        own["sandbox"].upload_files(payload)
    return own["sandbox"]


@tool
def execute_python(code: str, state: Annotated[dict, InjectedState]) -> str:
    """Runs Python 3 code in a sandbox, with the agent's files in /app/. Returns the exit code and what the code printed."""
    packed = base64.b64encode(code.encode()).decode()
    got = seeded(state.get("files") or {}).execute(
        f"python3 -c 'import base64;exec(compile(base64.b64decode(\"{packed}\").decode(),\"<agent>\",\"exec\"))'"
    )
    return f"exit={got.exit_code}\n{got.output}"


def as_tool(scripted):
    """The agent keeps its files in its state, and a sandbox is there only while it answers one question."""
    code = "import csv; print(sum(int(row['n']) for row in csv.DictReader(open('/app/numbers.csv'))), 'is \"the\" sum')"
    agent = create_deep_agent(model=model(scripted, call("execute_python", code=code)), tools=[execute_python], system_prompt="Answer in one line." + PROMPT)
    with run() as own:
        print("sandbox" if own else "no sandbox yet")
        print(ask(agent, "What is the sum of column n of numbers.csv?", files={"/app/numbers.csv": {"content": "n\n1\n2\n39\n", "encoding": "utf-8"}}))
    print("terminated" if not own["sandbox"].sandbox.is_active else "still there")


PROGRAMS = {"backend": backend, "tool": as_tool}

if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--scripted"]
    if len(words) != 1 or words[0] not in PROGRAMS:
        sys.exit("usage: python main.py backend | tool [--scripted]")
    PROGRAMS[words[0]]("--scripted" in sys.argv)
