"""A code tool whose sandbox outlives its calls, until the program is done with it."""

from langchain_core.tools import tool

from cove.e2b import CodeInterpreter

desk = CodeInterpreter()


@tool
def work_on(code: str) -> str:
    """Goes on with the Python of the calls before."""
    cell = desk.notebook.exec_cell(code)
    if cell.error:
        return f"Error: {cell.error}"
    told = cell.logs.stdout or ""
    told += "".join(f"=> {value.text}" for value in cell.results[:1])
    return told or "done"


desk.close()
