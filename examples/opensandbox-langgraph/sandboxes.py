"""The sandboxes of a workflow, by their ids: a state that can be saved holds an id, never an open connection."""

import os
from datetime import timedelta

from opensandbox import Sandbox, SandboxManager
from opensandbox.config import ConnectionConfig
from opensandbox.models.sandboxes import SandboxFilter

DEFAULT_IMAGE = "opensandbox/code-interpreter:v1.1.0"
LABEL = "workflow"


def connection() -> ConnectionConfig:
    """Where the server is. Creating may pull an image, so a request may take its time."""
    return ConnectionConfig(
        domain=os.environ.get("SANDBOX_DOMAIN") or "localhost:8080",
        api_key=os.environ.get("SANDBOX_API_KEY") or None,
        request_timeout=timedelta(seconds=120),
    )


class Sandboxes:
    """Opens sandboxes once and finds them again after a restart."""

    def __init__(self) -> None:
        self._open: dict[str, Sandbox] = {}

    async def create(self, run_id: str) -> Sandbox:
        """The sandbox of a run. A node that is tried again gets the one that its first try made."""
        for info in await self._made_for(run_id):
            return await self.get(info.id)
        image = os.environ.get("SANDBOX_IMAGE") or DEFAULT_IMAGE
        sandbox = await Sandbox.create(image, metadata={LABEL: run_id}, connection_config=connection())
        self._open[sandbox.id] = sandbox
        return sandbox

    async def _made_for(self, run_id: str):
        manager = await SandboxManager.create(connection())
        try:
            return (await manager.list_sandbox_infos(SandboxFilter(states=["Running"], metadata={LABEL: run_id}))).sandbox_infos
        finally:
            await manager.close()

    async def get(self, sandbox_id: str | None) -> Sandbox:
        """A sandbox by its id, connected to when this process has not yet spoken to it."""
        if not sandbox_id:
            raise RuntimeError("there is no sandbox yet: the node `create` has not run")
        if sandbox_id not in self._open:
            self._open[sandbox_id] = await Sandbox.connect(sandbox_id, connection_config=connection())
        return self._open[sandbox_id]

    async def end(self, sandbox_id: str) -> None:
        """Kills the sandbox and closes the connection to it."""
        sandbox = await self.get(sandbox_id)
        try:
            await sandbox.kill()
        finally:
            del self._open[sandbox_id]
            await sandbox.close()

    async def end_run(self, run_id: str) -> None:
        """Ends whatever a run has left, also when it failed before its state knew of the sandbox."""
        for info in await self._made_for(run_id):
            await self.end(info.id)
