"""The SDK's own pool of ready sandboxes: it needs nothing but the lifecycle API."""

from datetime import timedelta

import pytest

from conftest import IMAGE, eventually, kill, out
from opensandbox import InMemoryPoolStateStore, PoolCreationSpec, SandboxPoolSync
from opensandbox.config import ConnectionConfigSync

proves = pytest.mark.proves


@proves("SandboxPool.start", "SandboxPool.acquire", "SandboxPool.snapshot", "SandboxPool.release_all_idle", "SandboxPool.shutdown")
def test_a_pool_gives_sandboxes_that_are_ready(tag, wire):
    pool = SandboxPoolSync(
        pool_name=tag, owner_id="suite", max_idle=2, state_store=InMemoryPoolStateStore(), connection_config=ConnectionConfigSync(),
        creation_spec=PoolCreationSpec(image=IMAGE, metadata={"run": tag}),
    )
    pool.start()
    try:
        eventually(lambda: pool.snapshot().idle_count >= 2)
        sbx = pool.acquire(sandbox_timeout=timedelta(minutes=20))
        assert out(sbx.commands.run("echo pooled")) == ["pooled"]
        kill(sbx)
    finally:
        pool.shutdown(graceful=False)
        pool.release_all_idle()
    eventually(lambda: wire.api("GET", f"/sandboxes?metadata=run%3D{tag}").json()["pagination"]["totalItems"] == 0)
