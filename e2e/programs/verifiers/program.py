"""verifiers: its E2B runtime, from the template that it builds of an image to the end of the sandbox."""

import asyncio
import os

from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes.e2b import E2BConfig, E2BRuntime

from steps import Steps, holds, same

step = Steps("verifiers")


async def main():
    runtime = E2BRuntime(E2BConfig(image=os.environ["PROGRAM_REGISTRY"] + "/bash:1"))
    with step("start: builds a template of an image"):
        await runtime.start()
    with step("run"):
        got = await runtime.run(["sh", "-c", "echo out; echo err >&2; echo $GIVEN; pwd; exit 3"], {"GIVEN": "yes"})
        same((got.exit_code, got.stdout, got.stderr), (3, "out\nyes\n/app\n", "err\n"))
    with step("run_program"):
        got = await runtime.run_program(["sh", "-c", "sleep 1; echo done"], {})
        same((got.exit_code, got.stdout), (0, "done\n"))
    with step("write, read"):
        data = bytes(range(256)) * 1000
        await runtime.write("deep/data", data)
        same(await runtime.read("deep/data") == data, True)
        same((await runtime.read("deep/data", max_bytes=256000)) == data, True)
    with step("open_process: exact bytes both ways"):
        process = await runtime.open_process(["cat"], {})
        data = bytes(range(256))
        await process.write(data)
        back = b""
        async for chunk in process.stdout:
            back += chunk
            if len(back) >= len(data):
                break
        same(back, data)
        await process.kill()
        await process.wait()
    with step("prepare_execution: no network"):
        runtime.config = runtime.config.model_copy(update={"allow": [], "block": ["*"]})
        await runtime.prepare_execution([])
    with step("prepare_execution: names of hosts are refused by Cove"):
        runtime.config = runtime.config.model_copy(update={"allow": ["example.com"], "block": []})
        try:
            await runtime.prepare_execution([])
        except SandboxError as error:
            holds(str(error), "example.com")
        else:
            raise AssertionError("no error")
    with step("stop"):
        sandbox = runtime._sandbox
        await runtime.stop()
        same(await sandbox.is_running(), False)


asyncio.run(main())
