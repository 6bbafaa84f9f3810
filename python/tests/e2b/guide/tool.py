"""A code tool that glues its answer together from texts, though the logs are lists by now."""

from langchain_core.tools import tool

from cove.e2b import CodeInterpreter


@tool
def execute_python(code: str) -> str:
    """Python for one question: it starts from nothing and leaves nothing."""
    with CodeInterpreter() as sandbox:
        cell = sandbox.notebook.exec_cell(code)
    if cell.error:
        return f"Error: {cell.error}"
    told = ""
    for printed in (cell.logs.stdout, cell.logs.stderr):
        told += printed
    for value in cell.results:
        told += f"=> {value.text}"
    return told or "it ran and said nothing"
