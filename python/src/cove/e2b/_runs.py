"""Code that runs once, in a sandbox of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from e2b_code_interpreter import Execution  # type: ignore[import-untyped]

from cove.e2b._interpreter import CodeInterpreter

logger = logging.getLogger("cove.e2b")


def safe_execute(code: str, retries: int = 3, *, create: Callable[[], Any] = CodeInterpreter) -> Any:
    """Runs code, each attempt in a fresh sandbox, and returns what it printed.

    When the code itself fails in every attempt, the answer is None. When a sandbox cannot be made or reached in the last attempt,
    that error is raised.
    """
    if retries < 1:
        raise ValueError(f"retries must be at least 1, not {retries}")
    for attempt in range(1, retries + 1):
        try:
            with create() as sandbox:
                execution = sandbox.notebook.exec_cell(code)
                if not execution.error:
                    return execution.logs.stdout
                logger.warning("attempt %d of %d: the code failed: %s", attempt, retries, execution.error)
        except Exception as e:
            logger.warning("attempt %d of %d: the sandbox failed: %s", attempt, retries, e)
            if attempt == retries:
                raise
    return None


def execute_with_logging(code: str, context: Mapping[str, Any], *, create: Callable[..., Any] = CodeInterpreter) -> Execution:
    """Runs code in a fresh sandbox and logs what for, where, how long and how it ended.

    The context is also the sandbox's metadata, by which lists can be filtered. The code is not logged.
    """
    metadata = {str(name): str(value) for name, value in context.items()}
    logger.info("a run wants a sandbox: %s", metadata)
    with create(metadata=metadata) as sandbox:
        logger.info("the run has sandbox %s", sandbox.id)
        begun = time.monotonic()
        execution: Execution = sandbox.notebook.exec_cell(code)
        logger.info("the run took %.3f seconds", time.monotonic() - begun)
        if execution.error:
            logger.error("the run failed: %s", execution.error)
        return execution
