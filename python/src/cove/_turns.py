"""One at a time for each name, among threads and event loops alike."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future

from .errors import Timeout


class Turns:
    """Locks by name, first come, first served.

    Whoever waits in a loop holds up neither the loop nor a thread: a pool whose threads all wait for a lock could not do
    what its holder needs done.
    """

    def __init__(self, patience: float, advice: str) -> None:
        self._patience, self._advice = patience, advice
        self._mu = threading.Lock()
        self._waiting: dict[str, deque[Future[None]]] = {}  # of names that are taken

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        turn = self._ask(name)
        try:
            turn.result(self._patience)
        except BaseException as err:
            raise self._gave_up(name, turn, err) from None
        try:
            yield
        finally:
            self._pass_on(name)

    @contextlib.asynccontextmanager
    async def aof(self, name: str) -> AsyncIterator[None]:
        turn = self._ask(name)
        try:
            if not turn.done():
                await asyncio.wait_for(asyncio.wrap_future(turn), self._patience)
        except BaseException as err:
            raise self._gave_up(name, turn, err) from None
        try:
            yield
        finally:
            self._pass_on(name)

    def _ask(self, name: str) -> Future[None]:
        turn: Future[None] = Future()
        with self._mu:
            if name in self._waiting:
                self._waiting[name].append(turn)
            else:
                self._waiting[name] = deque()
                turn.set_result(None)
        return turn

    def _pass_on(self, name: str) -> None:
        with self._mu:
            waiting = self._waiting[name]
            while waiting:
                turn = waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            del self._waiting[name]

    def _gave_up(self, name: str, turn: Future[None], err: BaseException) -> BaseException:
        """Leave the queue; a turn that came in the same moment is the next one's."""
        if not turn.cancel():
            self._pass_on(name)
        if isinstance(err, TimeoutError):
            return Timeout(f"session {name} was in use for more than {self._patience:g} seconds; {self._advice}")
        return err
