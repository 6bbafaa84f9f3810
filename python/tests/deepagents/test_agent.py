"""Deep agents whose files and shell are a sandbox, driven by a model that follows a script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from deepagents import create_deep_agent
from langchain_core.messages import ToolMessage
from langgraph.checkpoint.memory import InMemorySaver

import cove as package
from cove import Cove
from cove.deepagents import CoveSandbox, CoveThreadBackend, session_key
from cove.deepagents._files import OVERWRITES
from cove.testing import ScriptedModel as Scripted, tool_call as call

PRIMES = """found = []
n = 2
while len(found) < 10:
    if all(n % p for p in found):
        found.append(n)
    n += 1
print(*found)
"""


def told(result: dict, tool: str) -> list[str]:
    """What a tool answered."""
    return [m.text if isinstance(m.text, str) else m.text() for m in result["messages"] if isinstance(m, ToolMessage) and m.name == tool]


def ask(agent, text: str = "go", thread: str | None = None) -> dict:
    config = {"configurable": {"thread_id": thread}} if thread else None
    return agent.invoke({"messages": [{"role": "user", "content": text}]}, config)


def test_S1_7_S1_9_a_script_is_written_and_run_in_the_sandbox(own: CoveSandbox) -> None:
    model = Scripted(script=[call("write_file", file_path="/tmp/primes.py", content=PRIMES), call("execute", command="python3 /tmp/primes.py"),
                             "Here they are."])
    result = ask(create_deep_agent(model, backend=own), "Put a program for the primes below 30 into a file and show me what it prints.")
    assert "2 3 5 7 11 13 17 19 23 29" in told(result, "execute")[0]
    assert own.download_files(["/tmp/primes.py"])[0].content == PRIMES.encode()


def test_S1_8_every_file_and_shell_tool_acts_on_the_sandbox(own: CoveSandbox) -> None:
    script = [
        call("write_file", file_path="/tmp/w/a.txt", content="alpha\nbeta\n"), call("read_file", file_path="/tmp/w/a.txt"),
        call("edit_file", file_path="/tmp/w/a.txt", old_string="beta", new_string="gamma"), call("ls", path="/tmp/w"),
        call("glob", pattern="*.txt", path="/tmp/w"), call("grep", pattern="gamma", path="/tmp/w", output_mode="content"),
        call("execute", command="cat /tmp/w/a.txt; exit 3"),
    ]
    if OVERWRITES:
        script.append(call("delete", file_path="/tmp/w/a.txt"))
    result = ask(create_deep_agent(Scripted(script=[*script, "done"]), backend=own))
    assert "alpha" in told(result, "read_file")[0] and "beta" in told(result, "read_file")[0]
    assert "/tmp/w/a.txt" in told(result, "ls")[0]
    assert "a.txt" in told(result, "glob")[0]
    assert "gamma" in told(result, "grep")[0]
    assert "alpha\ngamma" in told(result, "execute")[0] and "exit code 3" in told(result, "execute")[0]
    assert own.execute("test -e /tmp/w/a.txt").exit_code == (1 if OVERWRITES else 0)


def test_S1_10_S1_13_S1_15_files_are_there_in_the_next_turn(own: CoveSandbox) -> None:
    own.upload_files([("/tmp/brief.txt", b"from the user\n")])
    model = Scripted(script=[call("execute", command="echo first >/tmp/turn.txt"), "one",
                             call("read_file", file_path="/tmp/turn.txt"), call("read_file", file_path="/tmp/brief.txt"), "two"])
    agent = create_deep_agent(model, backend=own)
    ask(agent)
    result = ask(agent)
    assert "first" in told(result, "read_file")[0] and "from the user" in told(result, "read_file")[1]
    assert own.sandbox.is_active


def test_a_large_answer_is_kept_in_the_sandbox_and_shown_in_part(own: CoveSandbox) -> None:
    model = Scripted(script=[call("execute", command="seq 1 60000"), "done"])
    result = ask(create_deep_agent(model, backend=own))
    answer = told(result, "execute")[0]
    assert len(answer) < 20_000 and "large_tool_results" in answer


@pytest.fixture
def threads(cove: Cove) -> Iterator[CoveThreadBackend]:
    backend = CoveThreadBackend(cove)
    yield backend
    for info in list(cove.sessions()):
        if info.key.startswith("da-"):
            cove.get_session(info.key).remove()


def test_each_thread_has_a_sandbox_of_its_own(threads: CoveThreadBackend, cove: Cove) -> None:
    def agent(*script):
        return create_deep_agent(Scripted(script=list(script)), backend=threads, checkpointer=InMemorySaver())

    ask(agent(call("execute", command="echo mine >/tmp/whose"), "ok"), thread="da-one")
    other = ask(agent(call("execute", command="cat /tmp/whose"), "ok"), thread="da-two")
    again = ask(agent(call("execute", command="cat /tmp/whose"), "ok"), thread="da-one")
    assert "No such file" in told(other, "execute")[0]
    assert "mine" in told(again, "execute")[0]
    assert cove.get_session("da-one").info.sandbox != cove.get_session("da-two").info.sandbox


async def test_a_thread_has_one_sandbox_however_many_calls_begin_at_once(threads: CoveThreadBackend, cove: Cove) -> None:
    def agent():
        return create_deep_agent(Scripted(script=[call("execute", command="hostname; echo $$"), "ok"]), backend=threads)

    config = {"configurable": {"thread_id": "da-many"}}
    results = await asyncio.gather(*(agent().ainvoke({"messages": [{"role": "user", "content": "go"}]}, config) for _ in range(8)))
    assert len(results) == 8
    assert [s.key for s in cove.sessions() if s.key == "da-many"] == ["da-many"]
    assert cove.get_session("da-many").info.generation == 1


def test_a_lost_sandbox_is_told_and_replaced_only_when_asked(threads: CoveThreadBackend, cove: Cove) -> None:
    def agent(*script):
        return create_deep_agent(Scripted(script=list(script)), backend=threads)

    ask(agent(call("execute", command="echo work >/tmp/work"), "ok"), thread="da-lost")
    cove.get_session("da-lost").sandbox.kill()
    for _ in range(2):
        with pytest.raises(package.Gone, match="recreate"):
            ask(agent(call("execute", command="cat /tmp/work"), "ok"), thread="da-lost")
    threads.recreate("da-lost")
    result = ask(agent(call("execute", command="cat /tmp/work"), "ok"), thread="da-lost")
    assert "No such file" in told(result, "execute")[0]


def test_a_sandbox_that_somebody_else_replaced_is_found_again(threads: CoveThreadBackend, cove: Cove) -> None:
    def agent(*script):
        return create_deep_agent(Scripted(script=list(script)), backend=threads)

    ask(agent(call("execute", command="echo 1 >/tmp/gen"), "ok"), thread="da-swap")
    session = cove.get_session("da-swap")
    session.stop()
    cove.session("da-swap", storage="disk")
    result = ask(agent(call("execute", command="cat /tmp/gen || echo fresh"), "ok"), thread="da-swap")
    assert "fresh" in told(result, "execute")[0]


def test_outside_of_a_thread_the_backend_says_what_is_missing(threads: CoveThreadBackend) -> None:
    with pytest.raises(package.Invalid, match="thread_id"):
        threads.execute("true")


def test_any_thread_id_makes_a_key() -> None:
    assert session_key("user@example.com:42") == "user@example.com:42"
    odd = ["../../etc", "a b", "", "é", "x" * 300, "a/b"]
    keys = [session_key(o) for o in odd]
    assert len(set(keys)) == len(odd) and all(k.startswith("thread-") and len(k) == 39 for k in keys)


def test_sync_threads_do_not_mix(threads: CoveThreadBackend) -> None:
    seen: dict[str, str] = {}

    def work(name: str) -> None:
        agent = create_deep_agent(Scripted(script=[call("execute", command=f"echo {name} >>/tmp/names; cat /tmp/names"), "ok"]), backend=threads)
        seen[name] = told(ask(agent, thread=f"da-mix-{name}"), "execute")[0].split("\n")[0]

    running = [threading.Thread(target=work, args=(f"n{i}",)) for i in range(4)]
    [t.start() for t in running]
    [t.join() for t in running]
    assert seen == {f"n{i}": f"n{i}" for i in range(4)}
