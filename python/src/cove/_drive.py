"""Work written once for threads and for event loops.

A piece of work is a generator: it yields what has to be waited for, gets the answer (or its failure, raised where it stands)
and returns a value. One driver waits in a thread, the other awaits; neither knows what the steps are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from . import _calls as calls

S = TypeVar("S")
T = TypeVar("T")
Work = Generator[calls.Call[Any], Any, T]


def drive(work: Generator[S, Any, T], take: Callable[[S], Any]) -> T:
    """Do it, waiting for each answer."""
    with contextlib.closing(work):
        try:
            step = next(work)
            while True:
                try:
                    answer = take(step)
                except Exception as err:  # the work decides what a failure means
                    step = work.throw(err)
                else:
                    step = work.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result


async def adrive(work: Generator[S, Any, T], take: Callable[[S], Awaitable[Any]]) -> T:
    """Do it without blocking the loop."""
    with contextlib.closing(work):
        try:
            step = next(work)
            while True:
                try:
                    answer = await take(step)
                except Exception as err:
                    step = work.throw(err)
                else:
                    step = work.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
