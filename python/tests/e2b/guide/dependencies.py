"""Packages are installed once, and each of the `tables` that somebody hands in is read with them."""

from cove.e2b import CodeInterpreter

desk = CodeInterpreter()
cells = ["pip install scikit-learn pandas"]
cells += [f"import io, pandas, sklearn\nlen(pandas.read_csv(io.StringIO({table!r})))" for table in tables]  # noqa: F821
ran = [desk.notebook.exec_cell(cell) for cell in cells]
desk.close()
