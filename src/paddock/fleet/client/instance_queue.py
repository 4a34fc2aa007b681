"""A queue of creates for a plane that runs as many instances as its limit allows, in the order of arrival.

One queue for each plane and key, shared by all event loops of the process. The first in the queue sends its create
again after a pause; when this process ends an instance, the next one that has no create under way sends at once. It
can so overtake one whose create is about to be refused. Knows no network.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import threading
import time
from typing import TYPE_CHECKING

from paddock.retry import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.fleet.client.settings import PlaneAddress

PAUSES = Backoff(first_seconds=0.5, longest_seconds=5.0)
PROGRESS_SECONDS = 15.0

_queues: dict[PlaneAddress, _InstanceQueue] = {}
_lock = threading.RLock()


class _InstanceQueue:
    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.waiting: list[QueueTicket] = []

    def wake_next(self) -> None:
        ticket = next((each for each in self.waiting if not each.is_active), None)
        if ticket is not None:
            ticket.wake()


class QueueTicket:
    """The place of one create among all creates of this process at one plane."""

    def __init__(self, address: PlaneAddress) -> None:
        with _lock:
            self._queue = _queues.setdefault(address, _InstanceQueue())
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self.number = next(self._queue.numbers)
        self.refusals = 0
        """How often the plane refused this create because of its limit."""
        self.is_active = True
        """Whether it sends its create, or was woken to do so."""

    @property
    def ahead(self) -> int:
        """How many creates of this process come first."""
        with _lock:
            return self._queue.waiting.index(self) if self in self._queue.waiting else 0

    async def wait(self, seconds: float, report_progress: Callable[[int, float], None]) -> bool:
        """Wait until this create may be sent; False if that is not within `seconds`.

        Returns at once unless the plane refused this create, or others wait already. `report_progress` gets the
        number of creates ahead and the seconds waited.
        """
        with _lock:
            if not self.refusals and not self._queue.waiting:
                return True
            self.is_active = False
            if self not in self._queue.waiting:
                bisect.insort(self._queue.waiting, self, key=lambda each: each.number)
        started_at = time.monotonic()
        while True:
            waited = time.monotonic() - started_at
            if waited >= seconds:
                return False
            report_progress(self.ahead, waited)
            pause = PAUSES.pause(self.refusals) if self.refusals and not self.ahead else PROGRESS_SECONDS
            try:
                await asyncio.wait_for(self._wake.wait(), min(pause, seconds - waited))
            except TimeoutError:
                if self.ahead:
                    continue
            self._wake.clear()
            self.is_active = True
            return True

    def leave(self) -> None:
        """The create has ended: the next one may be sent."""
        with _lock:
            if self in self._queue.waiting:
                self._queue.waiting.remove(self)
            self._queue.wake_next()

    def wake(self) -> None:
        self.is_active = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)


def wake_next(address: PlaneAddress) -> None:
    """An instance of this process is gone: the first create that waits may be sent."""
    with _lock:
        if address in _queues:
            _queues[address].wake_next()


def clear_after_fork() -> None:
    """In a forked child: the waiting creates are the parent's, and its threads may have held the lock."""
    global _lock
    _lock = threading.RLock()
    _queues.clear()
