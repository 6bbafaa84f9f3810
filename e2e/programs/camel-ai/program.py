"""camel-ai: E2BInterpreter, what its CodeExecutionToolkit calls for sandbox="e2b"."""

from camel.interpreters import E2BInterpreter, InterpreterError
from camel.toolkits import CodeExecutionToolkit

from steps import Steps, holds, same

step = Steps("camel-ai")
interpreter = E2BInterpreter(require_confirm=False)
try:
    with step("a cell's value"):
        holds(interpreter.run("6 * 7"), "42")
    with step("a cell's output"):
        holds(interpreter.run("print('hello')"), "hello")
    with step("variables stay"):
        interpreter.run("x = 20")
        holds(interpreter.run("x + 1"), "21")
    with step("bash"):
        holds(interpreter.run("echo from $0", "bash"), "from ")
    with step("an error names its cause"):
        holds(interpreter.run("1 / 0"), "ZeroDivisionError")
    with step("an image"):
        holds(interpreter.run("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"), "data:image/png;base64,")
    with step("a language that it does not know"):
        try:
            interpreter.run("1", "cobol")
        except InterpreterError:
            pass
        else:
            raise AssertionError("no error")
finally:
    with step("the sandbox ends"):
        sandbox = interpreter._sandbox
        interpreter.__del__()  # what ends it when an agent lets go of it
        same(sandbox.is_running(), False)
with step("the toolkit for agents"):
    toolkit = CodeExecutionToolkit(sandbox="e2b")
    holds(toolkit.execute_code("print(6 * 7)"), "42")
    toolkit.interpreter._sandbox.kill()
