"""Waiting for a free place on a plane that runs as many instances as it may: first come, first served.

One queue for each plane and key, shared by all event loops of the process. The first in the queue asks the plane
again after a pause; when this process ends an instance, the next one asks at once. Knows no network.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import threading
import time
from typing import TYPE_CHECKING

from paddock.fleet.retry import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.fleet.settings import PlaneAddress

PAUSES = Backoff(first=0.5, longest=5.0)
PROGRESS_SECONDS = 15.0

_queues: dict[PlaneAddress, _Queue] = {}
_lock = threading.RLock()


class _Queue:
    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.waiting: list[Ticket] = []


class Ticket:
    """The place of one create in the order of all creates of this process at one plane."""

    def __init__(self, address: PlaneAddress) -> None:
        self._queue = _queue(address)
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self.number = next(self._queue.numbers)
        self.refusals = 0
        self.is_asking = True

    @property
    def ahead(self) -> int:
        """How many of this process come first."""
        with _lock:
            return self._queue.waiting.index(self) if self in self._queue.waiting else 0

    async def wait(self, seconds: float, progress: Callable[[int, float], None] | None = None) -> bool:
        """Wait until it is this create's turn to ask the plane; False if that is not within `seconds`.

        Returns at once unless the plane refused this create, or others wait already.
        """
        with _lock:
            if not self.refusals and not self._queue.waiting:
                return True
            self.is_asking = False
            if self not in self._queue.waiting:
                bisect.insort(self._queue.waiting, self, key=lambda each: each.number)
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            if waited >= seconds:
                return False
            if progress is not None:
                progress(self.ahead, waited)
            pause = PAUSES.pause(self.refusals) if self.refusals and not self.ahead else PROGRESS_SECONDS
            try:
                await asyncio.wait_for(self._wake.wait(), min(pause, seconds - waited))
            except TimeoutError:
                if self.ahead:
                    continue
            self._wake.clear()
            self.is_asking = True
            return True

    def refused(self) -> None:
        """The plane has no place."""
        self.refusals += 1

    def leave(self) -> None:
        """The create has ended, one way or the other: the next one may ask."""
        with _lock:
            if self in self._queue.waiting:
                self._queue.waiting.remove(self)
            _wake_next(self._queue)

    def wake(self) -> None:
        self.is_asking = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)


def slot_freed(address: PlaneAddress) -> None:
    """An instance of this process is gone: who waits longest may ask."""
    with _lock:
        if address in _queues:
            _wake_next(_queues[address])


def forget_all() -> None:
    """In a forked child: nobody waits here."""
    global _lock
    _lock = threading.RLock()
    _queues.clear()


def _queue(address: PlaneAddress) -> _Queue:
    with _lock:
        return _queues.setdefault(address, _Queue())


def _wake_next(queue: _Queue) -> None:
    waiter = next((each for each in queue.waiting if not each.is_asking), None)
    if waiter is not None:
        waiter.wake()
