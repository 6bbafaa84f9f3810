"""The client of coroutines."""

import asyncio
import os

import pytest

pytest.importorskip("kubernetes_asyncio")

from conftest import NAMESPACE, POOL, aeventually  # noqa: E402

from k8s_agent_sandbox import AsyncSandboxClient  # noqa: E402
from k8s_agent_sandbox.models import SandboxDirectConnectionConfig  # noqa: E402


@pytest.fixture
async def aclient():
    config = SandboxDirectConnectionConfig(api_url=os.environ["AGENT_SANDBOX_ROUTER_URL"])
    async with AsyncSandboxClient(connection_config=config) as client:
        yield client


async def test_commands_and_files(aclient):
    sandbox = await aclient.create_sandbox(POOL, namespace=NAMESPACE)
    got = await sandbox.commands.run("echo out; echo err >&2; exit 3")
    assert (got.stdout, got.stderr, got.exit_code) == ("out\n", "err\n", 3)
    for path in ("x", "/tmp/deep/ünï \"q\" \\ 100%20", "a/b"):
        await sandbox.files.write(path, b"\x00\xff")
        assert await sandbox.files.read(path) == b"\x00\xff"
        assert await sandbox.files.exists(path)
    assert "x" in {e.name for e in await sandbox.files.list("/app")}
    assert (await sandbox.commands.run("cat '/tmp/deep/ünï \"q\" \\ 100%20' | wc -c")).stdout.strip() == "2"


async def test_over_its_time_a_command_ends_with_124_and_ran_once(aclient):
    sandbox = await aclient.create_sandbox(POOL, namespace=NAMESPACE)
    got = await sandbox.commands.run("echo run >> counter; sleep 3600", timeout=20)
    assert got.exit_code == 124
    assert (await sandbox.commands.run("cat counter")).stdout == "run\n"


async def test_many_at_once(aclient):
    made = await asyncio.gather(*(aclient.create_sandbox(POOL, namespace=NAMESPACE) for _ in range(5)))
    got = await asyncio.gather(*(s.commands.run(f"sleep 0.2; echo {i}") for i, s in enumerate(made)))
    assert [g.stdout for g in got] == [f"{i}\n" for i in range(5)]
    same = await asyncio.gather(*(made[0].commands.run("echo run >> counter; sleep 0.5") for _ in range(3)))
    assert [g.exit_code for g in same] == [0, 0, 0]
    assert (await made[0].commands.run("cat counter")).stdout == "run\n" * 3, "three wanted it, three times it ran"
    names = {s.claim_name for s in made}
    assert names <= set(await aclient.list_all_sandboxes(namespace=NAMESPACE))
    await aclient.delete_all()

    async def gone():
        return not names & set(await aclient.list_all_sandboxes(namespace=NAMESPACE))

    await aeventually(gone)


async def test_attaching(aclient):
    sandbox = await aclient.create_sandbox(POOL, namespace=NAMESPACE)
    await sandbox.files.write("kept", b"kept")
    again = await aclient.get_sandbox(sandbox.claim_name, namespace=NAMESPACE)
    assert await again.files.read("kept") == b"kept"
    await sandbox.terminate()
