"""Cove for deepagents: a sandbox as an agent's backend, one per thread, or as its Python tool."""

from .._threads import session_key
from .provider import CoveProvider
from .sandbox import DEFAULT_TIMEOUT, CoveSandbox, Handle
from .thread import CoveThreadBackend, thread_key
from .tool import EXECUTE_PYTHON_PROMPT, ExecutePython, make_execute_python_tool

__all__ = [
    "DEFAULT_TIMEOUT", "EXECUTE_PYTHON_PROMPT", "CoveProvider", "CoveSandbox", "CoveThreadBackend", "ExecutePython", "Handle",
    "make_execute_python_tool", "session_key", "thread_key",
]
