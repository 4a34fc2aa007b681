"""Who waits for a slot, and what they are told about it.

Invariant: what one waiter costs does not grow with the number of the others. Joining, leaving and being next take
O(log n). Telling everybody their place takes O(n), so it happens seldom and in slices: however many wait, the loop
spends a small share of its time on it, and goes on with other work in between.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

KeyT = TypeVar("KeyT", int, float)

PLACES_EVERY = 0.25
"""Seconds between two notices of a place, at least."""
SHARE = 20
"""A round of notices is followed by a pause of so many times its own length."""
SLICE = 256
"""How many are told in one turn of the loop."""


class Elsewhere(Protocol):
    def waiting_before(self, ticket: int) -> int:
        """How many wait in other processes ahead of `ticket`."""


class Waiter:
    __slots__ = ("admitted", "deadline", "has_left", "moved", "owner", "place", "ticket")

    def __init__(
        self, ticket: int, deadline: float, moved: Callable[[int], None] | None, owner: object = None
    ) -> None:
        self.ticket = ticket
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.deadline = deadline
        self.moved = moved
        self.owner = owner
        self.place = 0
        self.has_left = False


class Queue:
    """Waiters by ticket and by deadline: two heaps, from which those who left are dropped later."""

    def __init__(self) -> None:
        self._by_ticket: list[tuple[int, int, Waiter]] = []
        self._by_deadline: list[tuple[float, int, Waiter]] = []
        self._numbers = itertools.count()
        self._size = 0
        self._watching = 0
        self._owners: Counter[object] = Counter()
        self._latest_ticket = 0

    def __len__(self) -> int:
        return self._size

    @property
    def watching(self) -> int:
        """How many want to hear of their place."""
        return self._watching

    def waiting_for(self, owner: object) -> int:
        return self._owners[owner]

    def join(self, waiter: Waiter) -> None:
        number = next(self._numbers)
        heapq.heappush(self._by_ticket, (waiter.ticket, number, waiter))
        heapq.heappush(self._by_deadline, (waiter.deadline, number, waiter))
        self._size += 1
        self._watching += waiter.moved is not None
        if waiter.owner is not None:
            self._owners[waiter.owner] += 1
        self._latest_ticket = max(self._latest_ticket, waiter.ticket)

    def is_last(self, waiter: Waiter) -> bool:
        return waiter.ticket >= self._latest_ticket

    def leave(self, waiter: Waiter) -> bool:
        """False if it has left before."""
        if waiter.has_left:
            return False
        waiter.has_left = True
        self._size -= 1
        self._watching -= waiter.moved is not None
        if waiter.owner is not None:
            self._owners[waiter.owner] -= 1
            if not self._owners[waiter.owner]:
                del self._owners[waiter.owner]
        if len(self._by_deadline) > 2 * self._size + SLICE:
            self._by_deadline = _without_those_who_left(self._by_deadline)
        if len(self._by_ticket) > 2 * self._size + SLICE:
            self._by_ticket = _without_those_who_left(self._by_ticket)
        return True

    def first(self) -> Waiter | None:
        while self._by_ticket and self._by_ticket[0][2].has_left:
            heapq.heappop(self._by_ticket)
        return self._by_ticket[0][2] if self._by_ticket else None

    def overdue(self, now: float) -> list[Waiter]:
        """Those whose deadline has passed. Each is named once."""
        found = []
        while self._by_deadline and self._by_deadline[0][0] <= now:
            waiter = heapq.heappop(self._by_deadline)[2]
            if not waiter.has_left:
                found.append(waiter)
        return found

    def in_order(self) -> list[Waiter]:
        return [entry[2] for entry in sorted(self._by_ticket) if not entry[2].has_left]


def _without_those_who_left(heap: list[tuple[KeyT, int, Waiter]]) -> list[tuple[KeyT, int, Waiter]]:
    kept = [entry for entry in heap if not entry[2].has_left]
    heapq.heapify(kept)
    return kept


class Places:
    """Tells waiters their place in the queue."""

    def __init__(self, queue: Queue, elsewhere: Elsewhere) -> None:
        self._queue = queue
        self._elsewhere = elsewhere
        self._not_before = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_telling = False

    def tell_newcomer(self, waiter: Waiter) -> None:
        if waiter.moved is not None and self._queue.is_last(waiter):
            self._tell_one(waiter, len(self._queue))
        else:
            self.tell_soon()

    def tell_soon(self) -> None:
        """Places have changed. Those who want to know hear of it at once, or when the last notice is old enough."""
        if not self._queue.watching or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._not_before and not self._is_telling:
            self.tell()
        else:
            self._timer = loop.call_at(max(self._not_before, loop.time() + PLACES_EVERY), self._tell_later)

    def tell(self) -> None:
        """Begin a round of notices, unless one is under way: then another follows it."""
        if self._is_telling:
            self.tell_soon()
        elif self._queue.watching:
            self._is_telling = True
            self._tell_slice(self._queue.in_order(), 0, 0.0)

    def _tell_later(self) -> None:
        self._timer = None
        self.tell()

    def _tell_slice(self, waiters: list[Waiter], begins: int, spent: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for here, waiter in enumerate(waiters[begins : begins + SLICE], start=begins + 1):
            if waiter.moved is not None and not waiter.has_left:
                self._tell_one(waiter, here)
        spent += loop.time() - began
        if begins + SLICE < len(waiters):
            loop.call_soon(self._tell_slice, waiters, begins + SLICE, spent)
        else:
            self._is_telling = False
            self._not_before = loop.time() + max(PLACES_EVERY, SHARE * spent)

    def _tell_one(self, waiter: Waiter, here: int) -> None:
        place = here + self._elsewhere.waiting_before(waiter.ticket)
        if waiter.moved is not None and place != waiter.place:
            waiter.place = place
            waiter.moved(place)
