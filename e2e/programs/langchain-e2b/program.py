"""langchain-e2b: its backends for deepagents, the synchronous and the asynchronous one."""

import asyncio

import e2b
from langchain_e2b import AsyncE2BSandbox, E2BSandbox

from steps import Steps, holds, same

step = Steps("langchain-e2b")
sandbox = e2b.Sandbox.create(timeout=120)
backend = E2BSandbox(sandbox=sandbox)
try:
    with step("execute"):
        got = backend.execute("echo out; echo err >&2; exit 3")
        same(got.exit_code, 3)
        holds(got.output, "out")
        holds(got.output, "err")
    with step("upload_files, download_files"):
        data = bytes(range(256)) * 1000
        same(backend.upload_files([("/home/user/up/data", data)])[0].error, None)
        same(backend.download_files(["/home/user/up/data"])[0].content == data, True)
        same(backend.download_files(["/home/user/missing"])[0].error, "file_not_found")
    with step("write, read, edit"):
        same(backend.write("/home/user/work/a.txt", "one\ntwo\n").error, None)
        holds(str(backend.read("/home/user/work/a.txt")), "two")
        same(backend.edit("/home/user/work/a.txt", "two", "three").error, None)
        holds(str(backend.read("/home/user/work/a.txt")), "three")
    with step("ls, glob, grep"):
        backend.write("/home/user/work/b.txt", "one\n")
        same(sorted(e["path"] for e in backend.ls("/home/user/work").entries), ["/home/user/work/a.txt", "/home/user/work/b.txt"])
        same(len(backend.glob("*.txt", "/home/user/work").matches), 2)
        same(len(backend.grep("one", "/home/user/work").matches), 2)
    with step("the asynchronous half"):
        async def again():
            other = AsyncE2BSandbox(sandbox=await e2b.AsyncSandbox.connect(backend.id))
            got = await other.als("/home/user/work")
            return len(got.entries), (await other.aexecute("echo out")).output.strip()
        same(asyncio.run(again()), (2, "out"))
finally:
    with step("the sandbox ends"):
        same(sandbox.kill(), True)
