"""langchain-opensandbox: the backend of deepagents, by its synchronous and its asynchronous half."""

import asyncio
import os

from langchain_opensandbox import OpenSandboxSandbox
from opensandbox.config import ConnectionConfigSync
from opensandbox.sync.sandbox import SandboxSync

from steps import Steps, holds, same

step = Steps("langchain-opensandbox")
sandbox = SandboxSync.create(
    "python:3.11-slim",
    connection_config=ConnectionConfigSync(domain=os.environ["OPEN_SANDBOX_DOMAIN"], api_key=os.environ["OPEN_SANDBOX_API_KEY"],
                                           use_server_proxy=True),
)
backend = OpenSandboxSandbox(sandbox=sandbox)
try:
    with step("execute"):
        got = backend.execute("echo out; exit 3")
        same((got.output.strip(), got.exit_code), ("out", 3))
    with step("execute: one line"):
        same(backend.execute("printf one").output, "one")
    with step("upload_files, download_files"):
        data = bytes(range(256)) * 1000
        same(backend.upload_files([("/tmp/up/data", data)])[0].error, None)
        same(backend.download_files(["/tmp/up/data"])[0].content == data, True)
        same(backend.download_files(["/tmp/missing"])[0].error, "file_not_found")
    with step("write, read, edit"):
        same(backend.write("/tmp/work/a.txt", "one\ntwo\n").error, None)
        holds(str(backend.read("/tmp/work/a.txt")), "two")
        same(backend.edit("/tmp/work/a.txt", "two", "three").error, None)
        holds(str(backend.read("/tmp/work/a.txt")), "three")
    with step("ls, glob, grep"):
        backend.write("/tmp/work/b.txt", "one\n")
        same(sorted(e["path"] for e in backend.ls("/tmp/work").entries), ["/tmp/work/a.txt", "/tmp/work/b.txt"])
        same(len(backend.glob("*.txt", "/tmp/work").matches), 2)
        same(sorted(m["path"] for m in backend.grep("one", "/tmp/work").matches), ["/tmp/work/a.txt", "/tmp/work/b.txt"])
    with step("the asynchronous half"):
        same(asyncio.run(backend.aexecute("echo out")).output.strip(), "out")
    with step("execute: several lines", fault="it joins chunks with a line end, and they have theirs already: blank lines appear"):
        same(backend.execute("echo a; echo b").output, "a\nb")
finally:
    with step("the sandbox ends"):
        sandbox.kill()
        backend.close()
