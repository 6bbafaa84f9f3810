"""google-adk: its two environments, for E2B and for OpenSandbox, with the same steps."""

import asyncio
import warnings

from google.adk.integrations.e2b import E2BEnvironment
from google.adk.integrations.opensandbox import OpenSandboxEnvironment

from steps import Steps, same

warnings.simplefilter("ignore")
step = Steps("google-adk")


JOINED = "its SDK (opensandbox below 0.2) gets a line without its end in each event, and google-adk joins them with nothing"


async def tried(kind, environment, home):
    joined = JOINED if kind == "OpenSandbox" else None
    with step(f"{kind}: initialize"):
        await environment.initialize()
    with step(f"{kind}: execute"):
        got = await environment.execute("printf $GIVEN; printf err >&2; exit 3")
        same((got.exit_code, got.stdout, got.stderr, got.timed_out), (3, "yes", "err", False))
    with step(f"{kind}: execute: lines, blank ones and one without its end", fault=joined):
        same((await environment.execute("printf 'a\\n\\nb\\nc'")).stdout, "a\n\nb\nc")
    with step(f"{kind}: execute: a timeout"):
        same((await environment.execute("sleep 60", timeout=1)).timed_out, True)
    with step(f"{kind}: write_file, read_file"):
        data = bytes(range(256)) * 1000
        await environment.write_file("deep/down/data", data)
        same(await environment.read_file("deep/down/data") == data, True)
        same((await environment.execute(f"wc -c < {home}/deep/down/data")).stdout.strip(), "256000")
    with step(f"{kind}: a file that is not there"):
        try:
            await environment.read_file("missing")
        except FileNotFoundError:
            pass
        else:
            raise AssertionError("no error")
    with step(f"{kind}: close"):
        await environment.close()


async def main():
    await tried("E2B", E2BEnvironment(env_vars={"GIVEN": "yes"}), "/home/user")
    await tried("OpenSandbox", OpenSandboxEnvironment(image="python:3.11", env_vars={"GIVEN": "yes"}), "/workspace")


asyncio.run(main())
