from __future__ import annotations

from collections.abc import Iterator

import pytest

from cove import Cove
from cove.deepagents import CoveSandbox


@pytest.fixture(scope="module")
def cove() -> Iterator[Cove]:
    with Cove() as c:
        yield c


@pytest.fixture(scope="module")
def shared(cove: Cove) -> Iterator[CoveSandbox]:
    """A sandbox for tests that leave it as usable as they found it."""
    with CoveSandbox.create(cove=cove) as backend:
        yield backend


@pytest.fixture
def own(cove: Cove) -> Iterator[CoveSandbox]:
    """A sandbox of a test's own."""
    with CoveSandbox.create(cove=cove) as backend:
        yield backend
