"""Programs that were written for the first E2B code interpreter, on Cove: the old names over the official SDK of today.

    from cove.e2b import CodeInterpreter

    with CodeInterpreter() as sandbox:
        print(sandbox.notebook.exec_cell("6 * 7").results[0].text)

Everything else of the SDK's `Sandbox` (`run_code`, `files`, `commands`, `connect` …) is there unchanged. The server is where
`E2B_API_URL`, `E2B_SANDBOX_URL` and `E2B_API_KEY` say; without them, where `COVE_URL` and `COVE_API_KEY` say.
"""

from cove.e2b._interpreter import AsyncCodeInterpreter, AsyncNotebook, CellError, CodeInterpreter, Notebook
from cove.e2b._manager import SandboxManager
from cove.e2b._runs import execute_with_logging, safe_execute
from cove.e2b._text import Lines

__all__ = [
    "AsyncCodeInterpreter",
    "AsyncNotebook",
    "CellError",
    "CodeInterpreter",
    "Lines",
    "Notebook",
    "SandboxManager",
    "execute_with_logging",
    "safe_execute",
]
