"""Cove as a sandbox provider of Deep Agents Code: `dcode --sandbox cove`."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from .. import _calls as calls
from ..client import Cove
from ..errors import Gone, NotFound
from .sandbox import DEFAULT_TIMEOUT, CoveSandbox

_Base: Any = object
if not TYPE_CHECKING:
    try:
        from deepagents_code.integrations.sandbox_provider import SandboxProvider as _Base
    except ImportError:  # somebody else's code drives the provider
        pass

# Names of Cove's settings may have dcode's prefix, which wins.
_PREFIX = "DEEPAGENTS_CODE_"
_WORKDIR = "/home/user"
_LIFETIME = 24 * 3600


class CoveProvider(_Base):  # type: ignore[misc]  # whose package may be absent
    """Makes, finds and ends sandboxes for dcode. Nothing is asked for, not even a key, before the first of them."""

    def __init__(self, url: str | None = None, api_key: str | None = None, *, template: str | None = None,
                 timeout: float = DEFAULT_TIMEOUT) -> None:
        self._url, self._api_key = url, api_key
        self._template, self._timeout = template, timeout
        self._made: Cove | None = None

    @property
    def metadata(self) -> Any:
        try:
            from deepagents_code.integrations.sandbox_provider import (  # type: ignore[import-not-found,unused-ignore]
                SandboxInstallHint, SandboxProviderMetadata,
            )
        except ImportError:
            return None
        return SandboxProviderMetadata(
            name="cove", working_dir=_WORKDIR, install=SandboxInstallHint("package", "cove-sandbox[deepagents]"),
            supports_sandbox_id=True, supports_snapshot_name=True, backend_module="cove.deepagents",
        )

    def get_or_create(self, *, sandbox_id: str | None = None, snapshot: str | None = None, snapshot_name: str | None = None,
                      template: str | None = None, timeout: float | None = None, **kwargs: Any) -> CoveSandbox:
        """The sandbox with this id, or a new one from a template or a snapshot. dcode passes its `--sandbox-snapshot-name` as
        `snapshot`; `snapshot_name` is the same by the name that its users know."""
        if kwargs:
            raise TypeError(f"unknown arguments: {', '.join(sorted(kwargs))}; known are sandbox_id, snapshot, snapshot_name, template and timeout")
        limit = self._timeout if timeout is None else timeout
        cove = self._cove()
        if sandbox_id is None:
            made = cove.create(snapshot or snapshot_name or template or self._template, timeout=_LIFETIME, metadata={"made-by": "dcode"})
            return CoveSandbox(made, timeout=limit)
        try:
            return CoveSandbox.from_id(sandbox_id, cove=cove, timeout=limit)
        except (NotFound, Gone) as err:
            raise _not_found()(sandbox_id) from err

    def delete(self, *, sandbox_id: str, **kwargs: Any) -> None:
        """End a sandbox; one that is not there is no error."""
        if kwargs:
            raise TypeError(f"unknown arguments: {', '.join(sorted(kwargs))}")
        cove = self._cove()
        try:
            cove._t.send(calls.kill(sandbox_id))
        except (NotFound, Gone):
            pass

    async def aget_or_create(self, *, sandbox_id: str | None = None, **kwargs: Any) -> CoveSandbox:
        return await asyncio.to_thread(self.get_or_create, sandbox_id=sandbox_id, **kwargs)

    async def adelete(self, *, sandbox_id: str, **kwargs: Any) -> None:
        await asyncio.to_thread(self.delete, sandbox_id=sandbox_id, **kwargs)

    def _cove(self) -> Cove:
        if self._made is None:
            env = os.environ
            self._made = Cove(self._url or env.get(_PREFIX + "COVE_URL"), self._api_key or env.get(_PREFIX + "COVE_API_KEY"))
        return self._made


def _not_found() -> type[Exception]:
    try:
        from deepagents_code.integrations import sandbox_provider  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return NotFound
    found: type[Exception] = sandbox_provider.SandboxNotFoundError
    return found
