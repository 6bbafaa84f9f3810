"""opensandbox-mcp: its tools, by a client of MCP over stdin and stdout."""

import asyncio
import json
import os
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from steps import Steps, holds, same

step = Steps("opensandbox-mcp")


async def main():
    server = StdioServerParameters(command=os.path.join(os.path.dirname(sys.executable), "opensandbox-mcp"), env=dict(os.environ))
    async with stdio_client(server) as (read, write), ClientSession(read, write) as client:

        async def call(tool, **arguments):
            got = await client.call_tool(tool, arguments)
            text = "".join(part.text for part in got.content)
            if got.is_error:
                raise AssertionError(f"{tool}: {text}")
            return json.loads(text)

        with step("it starts"):
            await client.initialize()
        with step("sandbox_create"):
            made = (await call("sandbox_create", image="python:3.11", env={"GIVEN": "yes"}))["sandbox_id"]
        with step("sandbox_list, sandbox_get_info, sandbox_healthcheck, sandbox_get_metrics, sandbox_renew"):
            holds(json.dumps(await call("sandbox_list")), made)
            holds(json.dumps(await call("sandbox_get_info", sandbox_id=made)), made)
            same((await call("sandbox_healthcheck", sandbox_id=made))["healthy"], True)
            await call("sandbox_get_metrics", sandbox_id=made)
            await call("sandbox_renew", sandbox_id=made, timeout_seconds=300)
        with step("command_run"):
            got = await call("command_run", sandbox_id=made, command="echo $GIVEN; exit 3")
            same((got["logs"]["stdout"][0]["text"].strip(), got["exit_code"]), ("yes", 3))
        with step("file_create_directories, file_write, file_read, file_replace_contents"):
            await call("file_create_directories", sandbox_id=made, entries=[{"path": "/tmp/work", "mode": 755}])
            await call("file_write", sandbox_id=made, path="/tmp/work/a.txt", content="one two")
            same((await call("file_read", sandbox_id=made, path="/tmp/work/a.txt"))["content"], "one two")
            await call("file_replace_contents", sandbox_id=made, entries=[{"path": "/tmp/work/a.txt", "old_content": "two", "new_content": "three"}])
            same((await call("file_read", sandbox_id=made, path="/tmp/work/a.txt"))["content"], "one three")
        with step("file_search, file_move, file_delete"):
            await call("file_move", sandbox_id=made, entries=[{"src": "/tmp/work/a.txt", "dest": "/tmp/work/b.txt"}])
            holds(json.dumps(await call("file_search", sandbox_id=made, path="/tmp/work", pattern="*.txt")), "/tmp/work/b.txt")
            await call("file_delete", sandbox_id=made, paths=["/tmp/work/b.txt"])
        with step("sandbox_get_endpoint"):
            holds(json.dumps(await call("sandbox_get_endpoint", sandbox_id=made, port=8000)), "8000")
        with step("sandbox_kill"):
            await call("sandbox_kill", sandbox_id=made)


asyncio.run(main())
