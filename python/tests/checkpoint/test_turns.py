"""Turns at a session, taken by threads and by event loops."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import cove as package
from cove._turns import Turns


async def test_those_who_wait_need_no_thread() -> None:
    """The holder asks the only thread of the loop for something while twenty wait for the holder."""
    turns, inside = Turns(60, "wait"), []
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    async def one(n: int) -> None:
        async with turns.aof("a"):
            inside.append(n)
            await asyncio.to_thread(lambda: None)
            assert inside[-1] == n  # nobody else came in meanwhile

    await asyncio.wait_for(asyncio.gather(*map(one, range(20))), 60)
    assert inside == list(range(20))


async def test_threads_and_loops_take_turns() -> None:
    turns, both = Turns(60, "wait"), []
    taken, go = threading.Event(), threading.Event()

    def hold() -> None:
        with turns.of("a"):
            taken.set()
            assert go.wait(60)
            both.append("thread")

    holding = threading.Thread(target=hold)
    holding.start()
    assert await asyncio.to_thread(taken.wait, 60)
    async with turns.aof("b"):  # another name is nobody's business
        both.append("other")
    waiting = asyncio.create_task(enter(turns, both))
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait_for(waiting, 60)
    holding.join()
    assert both == ["other", "thread", "loop"]


async def enter(turns: Turns, seen: list[str]) -> None:
    async with turns.aof("a"):
        seen.append("loop")


async def test_whoever_leaves_the_queue_takes_no_turn() -> None:
    turns, seen = Turns(60, "wait"), []
    async with turns.aof("a"):
        left, stays, late = (asyncio.create_task(enter(turns, seen)) for _ in range(3))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
    late.cancel()
    await asyncio.wait_for(asyncio.gather(stays, late, return_exceptions=True), 60)
    async with turns.aof("a"):
        assert seen == ["loop"]
    assert turns._waiting == {}


async def test_a_cancelled_turn_goes_to_the_next() -> None:
    turns, seen = Turns(60, "wait"), []
    async with turns.aof("a"):
        first, second = (asyncio.create_task(enter(turns, seen)) for _ in range(2))
        await asyncio.sleep(0)
    first.cancel()  # it is the first one's turn already, and it does not know
    await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 60)
    async with turns.aof("a"):
        assert "loop" in seen


async def test_nobody_waits_for_ever() -> None:
    turns = Turns(0.1, "ask later")
    async with turns.aof("a"):
        with pytest.raises(package.Timeout, match="session a was in use for more than 0.1 seconds; ask later"):
            async with turns.aof("a"):
                pass
        with pytest.raises(package.Timeout, match="ask later"):
            with turns.of("a"):
                pass
    with turns.of("a"):  # and it is free again
        pass


def test_a_failure_inside_is_told_as_it_is() -> None:
    turns = Turns(60, "wait")
    with pytest.raises(TimeoutError, match="^mine$"), turns.of("a"):
        raise TimeoutError("mine")
    with turns.of("a"):
        pass
