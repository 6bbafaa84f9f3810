"""The same question to a sandbox that knows nothing, and to one that remembers; `code_for` is handed in by somebody."""

from cove.e2b import CodeInterpreter


def printed(sandbox, question):
    return sandbox.notebook.exec_cell(code_for(question)).logs.stdout  # noqa: F821


def ask_afresh(question):
    with CodeInterpreter() as sandbox:
        return printed(sandbox, question)


memory = CodeInterpreter()


def ask_on(question):
    return printed(memory, question)
