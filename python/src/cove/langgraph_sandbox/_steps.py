"""The steps that work on sessions is made of: what each means in a thread and in an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from .. import _drive
from .. import _wire as wire
from .._calls import Call
from ..aio import AsyncCove, _content as _async_content, save
from ..client import Cove, Landing, _content

T = TypeVar("T")
Work = Generator[Any, Any, T]


@dataclass(frozen=True)
class Run:
    """A run whose events are told while it goes on."""

    call: Call[Any]
    on_event: Callable[[wire.Event], object] | None = None


@dataclass(frozen=True)
class Send:
    """A call whose body is somebody's content: bytes, a file, pieces; each driver reads it in its own way."""

    call: Callable[[Any], Call[Any]]
    content: Any


@dataclass(frozen=True)
class Save:
    """The answer of a call, written to a file."""

    call: Call[bytes]
    landing: Landing


@dataclass(frozen=True)
class Ask:
    """A function of the user's, sync or async."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Do:
    """A function of ours that blocks for a moment, such as writing a file."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


def drive(cove: Cove, work: Work[T]) -> T:
    """Do the work in this thread."""
    return _drive.drive(work, lambda step: _take(cove, step))


async def adrive(cove: AsyncCove, work: Work[T]) -> T:
    """Do the work in this event loop. Cancelling it ends what it waits for."""
    return await _drive.adrive(work, lambda step: _atake(cove, step))


def _take(cove: Cove, step: Any) -> Any:
    match step:
        case Call():
            return cove._t.send(step)
        case Run():
            return cove._run(step.call, step.on_event, wire.SessionOutputInfo)
        case Send():
            return cove._t.send(step.call(_content(step.content)))
        case Save():
            return step.landing.save(cove._t.chunks(step.call))
        case Ask():
            answer = step.function(*step.args)
            return _wait(answer) if inspect.isawaitable(answer) else answer
        case Do():
            return step.function(*step.args)
    raise TypeError(f"no step: {step!r}")


async def _atake(cove: AsyncCove, step: Any) -> Any:
    match step:
        case Call():
            return await cove._t.send(step)
        case Run():
            return await cove._run(step.call, step.on_event, wire.SessionOutputInfo)
        case Send():
            return await cove._t.send(step.call(_async_content(step.content)))
        case Save():
            return await save(step.landing, cove._t.chunks(step.call))
        case Ask():
            if inspect.iscoroutinefunction(step.function):
                return await step.function(*step.args)
            answer = await asyncio.to_thread(step.function, *step.args)
            return await answer if inspect.isawaitable(answer) else answer
        case Do():
            return await asyncio.to_thread(step.function, *step.args)
    raise TypeError(f"no step: {step!r}")


def _wait(answer: Awaitable[T]) -> T:
    """An async answer in a thread that may have a loop of its own running: another thread awaits it."""

    async def whole() -> T:
        return await answer

    context = contextvars.copy_context()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(context.run, asyncio.run, whole()).result()
