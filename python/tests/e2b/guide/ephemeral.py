"""A sandbox for one cell."""

from cove.e2b import CodeInterpreter

with CodeInterpreter() as sandbox:
    greeting = sandbox.notebook.exec_cell("print('good morning')").logs.stdout
