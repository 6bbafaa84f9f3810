"""e2b-mcp-server: its one tool, by a client of MCP over stdin and stdout."""

import asyncio
import os
import shutil
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from steps import Steps, same

step = Steps("e2b-mcp-server")


async def main():
    with step("the command that its README starts", fault="the package has no entry point, so `uvx e2b-mcp-server` finds no command"):
        same(shutil.which("e2b-mcp-server", path=os.path.dirname(sys.executable)) is not None, True)
    start = "import e2b_mcp_server; e2b_mcp_server.main()"
    server = StdioServerParameters(command=sys.executable, args=["-c", start], env=dict(os.environ))
    async with stdio_client(server) as (read, write), ClientSession(read, write) as client:
        with step("it starts"):
            await client.initialize()
        with step("its tools"):
            same([tool.name for tool in (await client.list_tools()).tools], ["run_code"])
        with step("run_code"):
            got = await client.call_tool("run_code", {"code": "print(6 * 7)"})
            same((got.isError, "".join(got.content[0].text.split())), (False, '{"stdout":["42\\n"],"stderr":[]}'))


asyncio.run(main())
