"""The same graph with another pair of commands: ripgrep where the image has it, grep where not.

    python search.py
"""

import asyncio
import sys

from model import choose
from sandboxes import Sandboxes
from workflow import Nodes, State, build, follow, new_state

FILES = {"/tmp/src/a.py": "x = 1  # TODO: why one?\n", "/tmp/src/b.py": "y = 2\n", "/tmp/notes.txt": "What is left to do.\n"}


def job() -> State:
    return new_state(FILES, "/tmp/notes.txt", command="rg --no-heading -n TODO /tmp/src", fallback="grep -rn TODO /tmp/src")


async def main(argv: list[str]) -> State:
    sandboxes = Sandboxes()
    state = await follow(build(Nodes(sandboxes, choose(argv))), sandboxes, job())
    print(f"Output: {state['run_output']}")
    print(f"Summary: {state['summary']}")
    return state


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
