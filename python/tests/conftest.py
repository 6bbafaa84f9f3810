"""What all suites share: the server of COVE_URL, fresh session keys, and a report of every test for the acceptance list."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from cove import Cove, CoveError


@pytest.fixture(scope="session")
def server() -> Cove:
    """A client of the server that the suite runs against."""
    if not os.environ.get("COVE_URL"):
        pytest.fail("COVE_URL is not set: these tests need a server", pytrace=False)
    return Cove()


@pytest.fixture
def key(server: Cove) -> Iterator[str]:
    """A session key of the test's own; what is behind it is removed."""
    key = f"test-{uuid.uuid4().hex[:12]}"
    yield key
    for info in [i for i in server.sessions() if i.key.startswith(key)]:
        try:
            server.get_session(info.key).remove()
        except CoveError:
            pass


def pytest_runtest_logreport(report: Any) -> None:
    path = os.environ.get("COVE_ACCEPTANCE_REPORT")
    final = report.when == "call" or report.outcome != "passed"
    if path and final and (report.when != "teardown" or report.outcome == "failed"):
        with open(path, "a") as f:
            outcome = "xfailed" if report.outcome == "skipped" and hasattr(report, "wasxfail") else report.outcome
            f.write(json.dumps({"nodeid": report.nodeid, "outcome": outcome}) + "\n")
