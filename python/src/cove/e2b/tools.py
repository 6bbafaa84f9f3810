"""LangChain tools over cove.e2b: one that uses a sandbox for each call, and one that keeps a sandbox."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import BaseTool, tool

from cove.e2b._interpreter import CodeInterpreter


def output_of(execution: Any) -> str:
    """What a model should read of an execution."""
    if execution.error:
        return f"Error: {execution.error}"
    parts = [str(execution.logs.stdout)]
    if execution.logs.stderr:
        parts.append(f"Printed to stderr:\n{execution.logs.stderr}")
    parts += [f"Value: {result.text}" for result in execution.results[:1] if result.text is not None]
    # A part begins on a line of its own, whether or not the one before ended its last line.
    told = "".join(part if part.endswith("\n") else f"{part}\n" for part in parts[:-1] if part) + parts[-1]
    return told or "The code ran and printed nothing."


@tool
def execute_python(code: str) -> str:
    """Runs Python in a new sandbox that ends with the call. You get what it printed and the value of its last line.

    No variable, file or package of an earlier call is there.
    """
    with CodeInterpreter() as sandbox:
        return output_of(sandbox.notebook.exec_cell(code))


def make_persistent_tool(sandbox: Any, *, name: str = "execute_python_persistent") -> BaseTool:
    """A tool that runs code in this sandbox: variables, files and packages stay from call to call. The caller ends the sandbox."""

    @tool(name)
    def execute_python_persistent(code: str) -> str:
        """Runs Python in a sandbox that stays. You get what it printed and the value of its last line.

        Variables, files and packages of earlier calls are still there.
        """
        return output_of(sandbox.notebook.exec_cell(code))

    return execute_python_persistent
