"""The example as a person runs it, with a script in the place of a model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "deepagents"


@pytest.mark.parametrize(("program", "says"), [
    ("backend", "2 3 5 7 11 13 17 19 23 29\n123 bytes in the sandbox\n"),
    ("threads", "ann 1\nbob 1\nann 2\n"),
    ("tool", "exit=0\n42\nsandbox made\n"),
    ("back", "then two\nback one\n"),
])
def test_S1_7_S1_9_S1_37_the_example_runs(program: str, says: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-B", "main.py", program, "--scripted"], cwd=EXAMPLE, env=env, capture_output=True, text=True, timeout=1200)
    assert (done.stdout, done.returncode) == (says, 0), done.stderr
