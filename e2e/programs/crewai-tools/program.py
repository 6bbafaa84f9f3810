"""crewai-tools: the three tools for E2B, called as an agent calls them."""

import os

os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["OTEL_SDK_DISABLED"] = "true"

from crewai_tools import E2BExecTool, E2BFileTool, E2BPythonTool  # noqa: E402

from steps import Steps, holds, same  # noqa: E402

step = Steps("crewai-tools")
with step("python: a sandbox for each call"):
    got = E2BPythonTool().run(code="print('hello')\n6 * 7")
    same((got["text"], got["stdout"], got["error"]), ("42", ["hello\n"], None))
with step("python: an error names its cause"):
    same(E2BPythonTool().run(code="1 / 0")["error"]["name"], "ZeroDivisionError")
python = E2BPythonTool(persistent=True)
with step("python: variables stay"):
    python.run(code="x = 20")
    same(python.run(code="x + 1")["text"], "21")
python.close()
with step("exec"):
    got = E2BExecTool(envs={"A": "1"}).run(command="echo $A $B; pwd; echo no >&2", cwd="/tmp", envs={"B": "2"})
    same((got["exit_code"], got["stdout"], got["stderr"]), (0, "1 2\n/tmp\n", "no\n"))
with step("exec: a command that fails"):
    try:
        E2BExecTool().run(command="echo no >&2; exit 3")
    except Exception as error:
        holds(str(error), "exited with code 3")
    else:
        raise AssertionError("no error")
files = E2BFileTool(persistent=True)
try:
    with step("files: write, read, list, info, exists, mkdir, delete"):
        same(files.run(action="write", path="/home/user/a/note.txt", content="hello")["bytes"], 5)
        same(files.run(action="read", path="/home/user/a/note.txt")["content"], "hello")
        same([e["name"] for e in files.run(action="list", path="/home/user/a")["entries"]], ["note.txt"])
        same(files.run(action="info", path="/home/user/a/note.txt")["size"], 5)
        same(files.run(action="mkdir", path="/home/user/b")["created"], True)
        files.run(action="delete", path="/home/user/b")
        same(files.run(action="exists", path="/home/user/b")["exists"], False)
    with step("files: bytes"):
        files.run(action="write", path="/home/user/bytes", content="AP8=", binary=True)
        same(files.run(action="read", path="/home/user/bytes", binary=True)["content"], "AP8=")
    with step("files: append", fault="crewai adds to the bytearray that the SDK gave it, and the SDK writes no bytearray"):
        files.run(action="append", path="/home/user/a/note.txt", content=" more")
        same(files.run(action="read", path="/home/user/a/note.txt")["content"], "hello more")
    with step("a sandbox of the caller's"):
        files.run(action="write", path="/home/user/shared", content="x")
        same(E2BExecTool(sandbox_id=files._persistent_sandbox.sandbox_id).run(command="cat shared")["stdout"], "x")
finally:
    files.close()
