"""praisonai-sandbox: its sandbox for E2B, and its provider of machines for tools, for E2B too."""

import asyncio

from praisonai_sandbox.compute.e2b import E2BCompute
from praisonai_sandbox.e2b import E2BSandbox
from praisonaiagents.managed.protocols import ComputeConfig

from steps import Steps, same

step = Steps("praisonai-sandbox")


async def main():
    compute = E2BCompute()
    with step("compute: provision"):
        made = (await compute.provision(ComputeConfig(env={"GIVEN": "yes"}))).instance_id
    with step("compute: execute"):
        got = await compute.execute(made, "echo $GIVEN; echo err >&2")
        same((got["exit_code"], got["stdout"], got["stderr"]), (0, "yes\n", "err\n"))
    with step("compute: execute: a command that fails", fault="praisonai takes the SDK's exception for a command's exit as a failure of its own: -1"):
        same((await compute.execute(made, "exit 3"))["exit_code"], 3)
    with step("compute: upload_file, download_file"):
        with open("local.txt", "w") as f:
            f.write("from here")
        same(await compute.upload_file(made, "local.txt", "/home/user/local.txt"), True)
        same(await compute.download_file(made, "/home/user/local.txt", "back.txt"), True)
        same(open("back.txt").read(), "from here")
    with step("compute: list_instances, shutdown"):
        same([i.instance_id for i in await compute.list_instances()], [made])
        await compute.shutdown(made)
        same(await compute.list_instances(), [])
    with step("sandbox: start", fault="praisonai calls Sandbox(), which makes a sandbox only in versions 1.x of e2b-code-interpreter"):
        sandbox = E2BSandbox()
        await sandbox.start()
        await sandbox.stop()


asyncio.run(main())
