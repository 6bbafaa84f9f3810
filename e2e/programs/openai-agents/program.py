"""openai-agents: its client for E2B sandboxes, each method of a session, with both kinds of sandboxes."""

import asyncio
import io
import os
from pathlib import Path

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"

from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions, E2BSandboxType  # noqa: E402

from steps import Steps, holds, same  # noqa: E402

step = Steps("openai-agents")


async def tried(kind):
    client = E2BSandboxClient()
    with step(f"{kind.value}: create, start"):
        session = await client.create(options=E2BSandboxClientOptions(sandbox_type=kind, timeout=300, envs={"GIVEN": "yes"}))
        await session.start()
        same(await session.running(), True)
    with step(f"{kind.value}: exec"):
        got = await session.exec("echo out; echo err >&2; echo $GIVEN; exit 3")
        same((got.exit_code, got.stdout, got.stderr), (3, b"out\nyes\n", b"err\n"))
    with step(f"{kind.value}: exec: a timeout"):
        try:
            await session.exec("sleep 60", timeout=1)
        except Exception as error:
            holds(type(error).__name__, "Timeout")
        else:
            raise AssertionError("no error")
    with step(f"{kind.value}: write, read, mkdir, ls, mv, rm"):
        data = bytes(range(256)) * 1000
        await session.mkdir(Path("deep"))
        await session.write(Path("deep/data"), io.BytesIO(data))
        same((await session.read(Path("deep/data"))).read() == data, True)
        await session.rm(Path("deep/data"))
        same(len(await session.ls(Path("deep"))), 0)
    with step(f"{kind.value}: a terminal"):
        got = await session.pty_exec_start("read line; echo got:$line", tty=True, yield_time_s=0.5)
        terminal, said = got.process_id, got.output
        for chars in ["hello\n", ""]:
            got = await session.pty_write_stdin(session_id=terminal, chars=chars, yield_time_s=5)
            said += got.output
        holds(said, b"got:hello")
    with step(f"{kind.value}: a terminal: its command's end", fault="it types the command into a shell, which waits for the next one"):
        same(got.exit_code, 0)
    with step(f"{kind.value}: a terminal: its shell's end"):
        for chars in ["exit 4\n"] + [""] * 10:
            if got.exit_code is None:
                got = await session.pty_write_stdin(session_id=terminal, chars=chars, yield_time_s=5)
        same(got.exit_code, 4)
    with step(f"{kind.value}: persist_workspace, hydrate_workspace"):
        await session.write(Path("kept.txt"), io.BytesIO(b"kept"))
        archive = await session.persist_workspace()
        await session.rm(Path("kept.txt"))
        await session.hydrate_workspace(archive)
        same((await session.read(Path("kept.txt"))).read(), b"kept")
    with step(f"{kind.value}: resume by its state"):
        state = client.deserialize_session_state(client.serialize_session_state(session.state))
        again = await client.resume(state)
        same(again.state.sandbox_id, session.state.sandbox_id)
        await again.start()
        same((await again.read(Path("kept.txt"))).read(), b"kept")
    with step(f"{kind.value}: shutdown, delete"):
        await session.shutdown()
        await client.delete(session)
        same(await session.running(), False)


async def main():
    await tried(E2BSandboxType.E2B)
    await tried(E2BSandboxType.CODE_INTERPRETER)


asyncio.run(main())
