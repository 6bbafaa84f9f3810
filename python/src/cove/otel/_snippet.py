"""Python code in a fresh process of a fresh sandbox, with limits of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from cove import AsyncCove, Cove, SnippetResult, _default

# What a snippet may know of its caller's environment unless told otherwise. PATH and HOME are the caller's words: inside they
# name directories of the sandbox, if it has them.
DEFAULT_ENV_KEYS = ("PATH", "HOME", "LANG", "LC_ALL")


@dataclass
class ExecResult:
    """How a snippet ended; exit_code is -1 when the time was over and minus the signal's number when a signal ended it."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool


def _forwarded(keys: Iterable[str] | None) -> dict[str, str]:
    """The variables of this process that are named; those it does not have are not made up."""
    return {key: os.environ[key] for key in (DEFAULT_ENV_KEYS if keys is None else keys) if key in os.environ}


def _result(said: SnippetResult) -> ExecResult:
    stderr = said.stderr
    if not stderr and said.exit_code < 0 and not said.timed_out:
        stderr = said.message  # whoever was killed had no time to say why; whoever left said what there was to say
    return ExecResult(exit_code=said.exit_code, stdout=said.stdout, stderr=stderr, timed_out=said.timed_out)


def run_snippet(
    code: str,
    timeout: float = 10.0,
    cpu_seconds: int = 8,
    mem_mb: int = 128,
    allowed_env_keys: list[str] | None = None,
    *,
    network: bool = False,
    sandbox: str | None = None,
    client: Cove | None = None,
) -> ExecResult:
    """Run Python code in a fresh process of a fresh sandbox that ends with it.

    timeout is wall time, after which everything the code started is killed; cpu_seconds, mem_mb and 32 open files are limits of the
    process. Of this process's environment only allowed_env_keys are forwarded (PATH, HOME, LANG and LC_ALL when None). The
    internet is out of reach unless network. With sandbox, the code runs in that living sandbox, by that sandbox's network rules.
    """
    said = (client or _default.client()).snippet(
        code, timeout=timeout, cpu_seconds=cpu_seconds, memory_mb=mem_mb, env=_forwarded(allowed_env_keys), network=network, sandbox=sandbox
    )
    return _result(said)


async def arun_snippet(
    code: str,
    timeout: float = 10.0,
    cpu_seconds: int = 8,
    mem_mb: int = 128,
    allowed_env_keys: list[str] | None = None,
    *,
    network: bool = False,
    sandbox: str | None = None,
    client: AsyncCove | None = None,
) -> ExecResult:
    """run_snippet for coroutines."""
    if client is None:
        async with AsyncCove() as own:
            return await arun_snippet(code, timeout, cpu_seconds, mem_mb, allowed_env_keys, network=network, sandbox=sandbox, client=own)
    said = await client.snippet(
        code, timeout=timeout, cpu_seconds=cpu_seconds, memory_mb=mem_mb, env=_forwarded(allowed_env_keys), network=network, sandbox=sandbox
    )
    return _result(said)
