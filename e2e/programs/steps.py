"""What the trials of other people's programs share: steps, of which one failing does not end the trial."""

import importlib.metadata
import json
import os
import traceback
from contextlib import contextmanager


class Steps:
    """Writes to the file PROGRAM_REPORT which version of a program was tried, and one line of JSON for each step."""

    def __init__(self, package):
        self._write({"package": package, "version": importlib.metadata.version(package)})

    @contextmanager
    def __call__(self, name, fault=None):
        """Runs one step. A step with a fault is one that the program itself gets wrong, and must fail: one that passes
        says that the remark about it in docs/compatibility.md is out of date."""
        line = {"step": name, "fault": fault or "", "error": ""}
        try:
            yield
        except Exception:
            line["error"] = traceback.format_exc()
        self._write(line)

    @staticmethod
    def _write(line):
        with open(os.environ["PROGRAM_REPORT"], "a", encoding="utf-8") as report:
            report.write(json.dumps(line) + "\n")


def same(got, want):
    """Fails with both values when they differ."""
    if got != want:
        raise AssertionError(f"got {got!r}, want {want!r}")


def holds(text, part):
    """Fails with the text when the part is not in it."""
    if part not in text:
        raise AssertionError(f"{part!r} is not in {text!r}")
