"""The official SDK's sandboxes under the names that they had when the interpreter was called a notebook."""

from __future__ import annotations

import os
from typing import Any

try:
    from e2b_code_interpreter import AsyncSandbox, Execution, Sandbox  # type: ignore[import-untyped]
    from e2b_code_interpreter.models import ExecutionError  # type: ignore[import-untyped]
except ImportError as e:  # pragma: no cover - said once, at import
    raise ImportError("cove.e2b works over the official SDK: pip install 'cove-sandbox[e2b]'") from e

from cove.e2b._text import lines


class CellError(ExecutionError):  # type: ignore[misc]
    """An exception of a cell; as a text it is what Python would print."""

    def __str__(self) -> str:
        head = f"{self.name}: {self.value}"
        trace = str(self.traceback or "").strip()
        return head if not trace or trace == head else f"{head}\n{trace}"


def _legacy(execution: Execution) -> Execution:
    """The same execution with logs and an error that also work as texts."""
    execution.logs.stdout = lines(execution.logs.stdout)
    execution.logs.stderr = lines(execution.logs.stderr)
    if execution.error is not None:
        error = execution.error
        execution.error = CellError(error.name, error.value, error.traceback)
    return execution


def _address(opts: dict[str, Any]) -> dict[str, Any]:
    """The options with Cove's own address and key where neither they nor E2B's variables name any."""
    named = {name: value for name, value in opts.items() if value is not None}
    url = os.environ.get("COVE_URL")
    if url and not (named.keys() & {"domain", "api_url"} or os.environ.get("E2B_DOMAIN") or os.environ.get("E2B_API_URL")):
        named["api_url"] = url.rstrip("/")
        named.setdefault("sandbox_url", url.rstrip("/"))
    key = os.environ.get("COVE_API_KEY")
    if key and "api_key" not in named and not os.environ.get("E2B_API_KEY"):
        named["api_key"] = key
    return named


class _Constructed(type(Sandbox)):  # type: ignore[misc]
    """Makes the class itself the way to make a sandbox, as it was once; the SDK's own calls bring a connection with them."""

    def __call__(cls, *args: Any, **kw: Any) -> Any:
        if "connection_config" in kw:
            return super().__call__(**kw)
        sandbox_id = kw.pop("sandbox_id", None)
        return cls.create(*args, **kw) if sandbox_id is None else cls.connect(sandbox_id, *args, **kw)


class Notebook:
    """Runs cells in the default kernel of a sandbox."""

    def __init__(self, sandbox: CodeInterpreter) -> None:
        self._sandbox = sandbox

    def exec_cell(self, cell: str, **options: Any) -> Execution:
        """Runs a cell and waits for its end; options are those of run_code (on_stdout, on_stderr, on_result, timeout, envs …)."""
        return self._sandbox.run_code(cell, **options)


class CodeInterpreter(Sandbox, metaclass=_Constructed):  # type: ignore[misc]
    """A sandbox that is created by `CodeInterpreter()` and ended by `close()` or the end of a with block.

    `CodeInterpreter(timeout=300)` lives 300 seconds, which is also the default; `CodeInterpreter(sandbox_id=…)` finds one again.
    """

    @property
    def notebook(self) -> Notebook:
        return Notebook(self)

    @property
    def id(self) -> str:
        return str(self.sandbox_id)

    def close(self) -> bool:
        """Ends the sandbox; False when it had ended already."""
        return bool(self.kill())

    def run_code(self, *args: Any, **kw: Any) -> Execution:
        return _legacy(super().run_code(*args, **kw))

    @classmethod
    def _resolve_api_params(cls, **opts: Any) -> Any:
        # The one place that create, connect, list and kill of the SDK all pass.
        return super()._resolve_api_params(**_address(opts))


class AsyncNotebook:
    """Notebook for coroutines."""

    def __init__(self, sandbox: AsyncCodeInterpreter) -> None:
        self._sandbox = sandbox

    async def exec_cell(self, cell: str, **options: Any) -> Execution:
        return await self._sandbox.run_code(cell, **options)


class AsyncCodeInterpreter(AsyncSandbox):  # type: ignore[misc]
    """CodeInterpreter for coroutines: `await AsyncCodeInterpreter.create()`, since a constructor cannot wait."""

    @property
    def notebook(self) -> AsyncNotebook:
        return AsyncNotebook(self)

    @property
    def id(self) -> str:
        return str(self.sandbox_id)

    async def close(self) -> bool:
        return bool(await self.kill())

    async def run_code(self, *args: Any, **kw: Any) -> Execution:
        return _legacy(await super().run_code(*args, **kw))

    @classmethod
    def _resolve_api_params(cls, **opts: Any) -> Any:
        return super()._resolve_api_params(**_address(opts))
