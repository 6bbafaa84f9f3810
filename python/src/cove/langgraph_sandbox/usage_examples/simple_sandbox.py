"""TMPFS_NONE: algorithms and calculations, everything in memory. `python -m cove.langgraph_sandbox.usage_examples.simple_sandbox`"""

from __future__ import annotations

from ...testing import last_tool_text, tool_call
from .. import Config, DatasetAccess, SessionManager, SessionStorage, make_code_sandbox_tool
from .conversation import arguments, converse, new_key

QUESTIONS = ["What is the factorial of 10?", "And how many digits has the factorial of that?"]
SCRIPT = [
    tool_call("code_sandbox", code="import math\nn = math.factorial(10)\nprint(n)"),
    lambda messages: f"It is {last_tool_text(messages).splitlines()[0]}.",
    tool_call("code_sandbox", code="digits = int(math.lgamma(n + 1) / math.log(10)) + 1\nprint(digits)"),
    lambda messages: f"It has {last_tool_text(messages).splitlines()[0]} digits.",
]


def main() -> None:
    args = arguments(__doc__ or "")
    config = Config.from_env()
    manager = SessionManager(image=config.sandbox_image, session_storage=SessionStorage.TMPFS, dataset_access=DatasetAccess.NONE, tmpfs_size=512)
    key = new_key()
    tools = [make_code_sandbox_tool(session_manager=manager, session_key_fn=lambda: key, timeout_s=60)]
    converse(manager, key, tools, "Use the code_sandbox tool to calculate.", QUESTIONS, SCRIPT, args)


if __name__ == "__main__":
    main()
