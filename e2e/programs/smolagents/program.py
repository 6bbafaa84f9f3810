"""smolagents: CodeAgent's executor for E2B, called as the agent calls it."""

from smolagents import LogLevel, AgentLogger, tool
from smolagents.remote_executors import E2BExecutor

from steps import Steps, holds, same

step = Steps("smolagents")


@tool
def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: what to double
    """
    return 2 * number


executor = E2BExecutor([], AgentLogger(level=LogLevel.OFF))
try:
    with step("a cell's value and its output"):
        got = executor("print('hello')\n6 * 7")
        same((got.output, got.logs.strip(), got.is_final_answer), ("42", "hello", False))
    with step("variables stay"):
        executor("x = [1, 2]")
        same(executor("sum(x)").output, "3")
    with step("the agent's variables arrive"):
        executor.send_variables({"given": {"a": [1, 2.5, None]}})
        same(executor("given['a'][1]").output, "2.5")
    with step("the agent's tools run inside"):
        executor.send_tools({"double": double})
        same(executor("double(21)").output, "42")
    with step("final_answer ends the run with its value"):
        executor.send_tools({})
        from smolagents import FinalAnswerTool
        executor.send_tools({"final_answer": FinalAnswerTool()})
        got = executor("final_answer({'sum': 3})")
        same((got.output, got.is_final_answer), ({"sum": 3}, True))
    with step("an error names its cause"):
        try:
            executor("1 / 0")
        except Exception as error:
            holds(str(error), "ZeroDivisionError")
        else:
            raise AssertionError("no error")
    with step("an image comes back as an image"):
        got = executor("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.gcf()")
        same(type(got.output).__module__.split(".")[0], "PIL")
finally:
    with step("the sandbox ends"):
        sandbox = executor.sandbox
        executor.cleanup()
        same(sandbox.is_running(), False)
