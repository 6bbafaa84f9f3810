"""Multiplies two numbers in a sandbox and has the result told in a sentence.

    python main.py                  a script writes the sentence, unless there is a key
    ANTHROPIC_API_KEY=… python main.py
"""

import asyncio
import sys

from model import choose
from sandboxes import Sandboxes
from workflow import Nodes, State, build, follow, new_state

FILES = {"/tmp/job.py": "print(137 * 42)\n", "/tmp/notes.txt": "A graph drives a sandbox.\n"}


def job() -> State:
    """Some images call the program python3, some python."""
    return new_state(FILES, "/tmp/notes.txt", command="python3 /tmp/job.py", fallback="python /tmp/job.py")


async def main(argv: list[str]) -> State:
    sandboxes = Sandboxes()
    state = await follow(build(Nodes(sandboxes, choose(argv))), sandboxes, job())
    print(f"Output: {state['run_output']}")
    print(f"Summary: {state['summary']}")
    return state


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
