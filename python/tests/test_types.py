"""py.typed is a promise: the package is checked as strictly as pyproject.toml says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PYTHON = Path(__file__).parents[1]


def test_the_package_has_no_errors_of_type(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--cache-dir", str(tmp_path)], cwd=PYTHON,
                          capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
