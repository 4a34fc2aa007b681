"""Capacity: a number of slots, a fair queue for them, and notices to waiting clients about their place in it.

`Slots` is the whole of it for one process. Several processes share one capacity by sharing the counts behind it
(`SlotCount`, see `server/workers.py`).

Invariant: what one waiter costs does not grow with the number of the others. Joining, leaving and being next take
O(log n). Sending everybody their place takes O(n), so it happens seldom and in slices: however many wait, the loop
spends a small share of its time on it, and does other work in between.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import secrets
from collections import Counter
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, TypeVar

from paddock.errors import CapacityReached, PaddockError, QueueTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

KeyT = TypeVar("KeyT", int, float)

PLACES_EVERY_SECONDS = 0.25
"""Seconds between two notices of a place, at least."""
PAUSE_FACTOR = 20
"""After a round of notices the queue pauses for this multiple of the round's duration."""
NOTICES_PER_ITERATION = 256
"""How many are sent in one iteration of the loop."""
LEASE_SECONDS = 10.0
LEASE: ContextVar[str | None] = ContextVar("lease", default=None)
"""The lease that came with the present request."""


class Slots:
    """Takes and gives back slots. Waiters are served first come, first served."""

    def __init__(
        self,
        count: SlotCount,
        clock: Callable[[], float],
        max_waiting: int | None = None,
        max_waiting_per_owner: int | None = None,
    ) -> None:
        self._count = count
        self._clock = clock
        self._max_waiting = max_waiting
        self._max_per_owner = max_waiting_per_owner
        self._queue = WaitingQueue()
        self._places = PlaceNotices(self._queue, count)
        self.freed: Callable[[], None] | None = None
        """Called after every slot that is given back."""

    @property
    def capacity(self) -> int:
        """How many sessions may be open at once."""
        return self._count.capacity

    @property
    def waiting(self) -> int:
        """How many clients wait for a slot."""
        return len(self._queue)

    def in_use(self) -> int:
        """How many slots are taken."""
        return self._count.in_use()

    def take(self, ticket: int | None = None) -> bool:
        """Take a slot if one is free and no client waits for it, or none longer than the holder of `ticket`."""
        first = self._queue.first()
        if first is not None and (ticket is None or first.ticket < ticket):
            return False
        return self._count.take(ticket)

    def give_back(self) -> None:
        """Free a slot, and admit the first client that waits."""
        self._count.give_back()
        self.admit()
        if self.freed is not None:
            self.freed()

    def admit(self) -> None:
        """Admit as many waiters as there are free slots."""
        before = len(self._queue)
        while (waiter := self._queue.first()) is not None:
            if not waiter.admitted.done():
                if not self._count.take(waiter.ticket):
                    break
                waiter.admitted.set_result(None)
            self._queue.leave(waiter)
        if len(self._queue) != before:
            self._places_changed()

    async def wait(
        self,
        seconds: float,
        on_place: Callable[[int], None] | None = None,
        ticket: int | None = None,
        owner: object = None,
    ) -> None:
        """Wait for a slot. `on_place(place)` gets the place in the queue, 1 being next, now and after each change.

        Who has a `ticket` already waits where it says. `owner` is the connection that several wait for. Raises
        QueueTimeout after `seconds`, and CapacityReached where too many wait. A cancelled wait leaves no slot behind.
        """
        self._check_room(owner)
        ticket = self._count.new_ticket() if ticket is None else ticket
        waiter = Waiter(ticket, self._clock() + seconds, on_place, owner)
        self._queue.join(waiter)
        self._places.notify_new_waiter(waiter)
        self._publish()
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.done() and not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
                self.give_back()
            raise
        finally:
            if self._queue.leave(waiter):
                self._places_changed()

    def expire(self, now: float) -> None:
        """Reject the waiters whose deadline has passed."""
        for waiter in self._queue.overdue(now):
            if not waiter.admitted.done():
                in_use, capacity = self.in_use(), self.capacity
                waiter.admitted.set_exception(
                    QueueTimeout(
                        f"Server at capacity: {in_use}/{capacity} sessions active. No slot came free in time.",
                        hint="wait longer (queue_timeout), or raise --max-sessions",
                        active_sessions=in_use,
                        max_sessions=capacity,
                    )
                )

    def reject_all(self, error: PaddockError) -> None:
        """Reject all waiters with `error`."""
        for waiter in self._queue.in_order():
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)

    def notify_places(self) -> None:
        """Send the waiters their places, if they have changed."""
        self._publish()
        self._places.notify()

    def _places_changed(self) -> None:
        self._publish()
        self._places.notify_soon()

    def _publish(self) -> None:
        first = self._queue.first()
        self._count.publish(first.ticket if first is not None else None, len(self._queue))

    def _check_room(self, owner: object) -> None:
        limit, owner_limit = self._max_waiting, self._max_per_owner
        if limit is not None and len(self._queue) >= limit:
            reason, hint = f"{limit} wait for a slot already (max_waiting)", "raise --max-waiting"
        elif owner_limit is not None and owner is not None and self._queue.waiting_for(owner) >= owner_limit:
            reason = f"{owner_limit} of this connection wait for a slot already (max_waiting_per_connection)"
            hint = "wait for some of them, or use more connections"
        else:
            return
        in_use, capacity = self.in_use(), self.capacity
        raise CapacityReached(
            f"Server at capacity: {in_use}/{capacity} sessions active, and {reason}.",
            hint=f"try again later, or {hint}",
            active_sessions=in_use,
            max_sessions=capacity,
        )


class SlotCount(Protocol):
    """How many slots are taken and who waits, wherever those numbers live."""

    @property
    def capacity(self) -> int:
        """How many slots there are."""

    def take(self, ticket: int | None = None) -> bool:
        """Take a slot if one is free and no client with an earlier ticket waits."""

    def give_back(self) -> None:
        """Free a slot that `take` took."""

    def in_use(self) -> int:
        """How many slots are taken."""

    def new_ticket(self) -> int:
        """A number later than all given out before."""
        ...

    def publish(self, first: int | None, waiting: int) -> None:
        """Tell others which ticket waits here first, and how many wait in all."""

    def waiting_before(self, ticket: int) -> int:
        """How many wait elsewhere ahead of `ticket`."""
        ...


class LocalSlotCount:
    """The count of a server with one process: no client waits elsewhere."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._in_use = 0
        self._tickets = 0

    def take(self, ticket: int | None = None) -> bool:
        if self._in_use >= self.capacity:
            return False
        self._in_use += 1
        return True

    def give_back(self) -> None:
        self._in_use -= 1

    def in_use(self) -> int:
        return self._in_use

    def new_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def publish(self, first: int | None, waiting: int) -> None:
        pass

    def waiting_before(self, ticket: int) -> int:
        return 0


class Leases:
    """Slots taken for sessions that are still to be opened. Each is used once, or runs out."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def grant(self, host: str, now: float) -> str:
        """A new lease on this host, valid for `LEASE_SECONDS`."""
        lease = f"{host}-{secrets.token_hex(8)}"
        self._until[lease] = now + LEASE_SECONDS
        return lease

    def redeem(self, lease: str | None) -> bool:
        """Use up the lease. False if it is unknown or has expired."""
        return lease is not None and self._until.pop(lease, None) is not None

    def expired(self, now: float) -> list[str]:
        """The leases that were not used in time."""
        return [lease for lease, until in self._until.items() if now >= until] if self._until else []


class Waiter:
    """A client that waits for a slot."""

    __slots__ = ("admitted", "deadline", "has_left", "on_place", "owner", "place", "ticket")

    def __init__(
        self, ticket: int, deadline: float, on_place: Callable[[int], None] | None, owner: object = None
    ) -> None:
        self.ticket = ticket
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.deadline = deadline
        self.on_place = on_place
        self.owner = owner
        self.place = 0
        self.has_left = False


class WaitingQueue:
    """Waiters by ticket and by deadline: two heaps, from which those who left are dropped later."""

    def __init__(self) -> None:
        self._by_ticket: list[tuple[int, int, Waiter]] = []
        self._by_deadline: list[tuple[float, int, Waiter]] = []
        self._numbers = itertools.count()
        self._size = 0
        self._notified_count = 0
        self._owners: Counter[object] = Counter()
        self._latest_ticket = 0

    def __len__(self) -> int:
        return self._size

    @property
    def notified_count(self) -> int:
        """How many waiters get notices of their place."""
        return self._notified_count

    def waiting_for(self, owner: object) -> int:
        """How many clients wait for this owner."""
        return self._owners[owner]

    def join(self, waiter: Waiter) -> None:
        """Add a client."""
        number = next(self._numbers)
        heapq.heappush(self._by_ticket, (waiter.ticket, number, waiter))
        heapq.heappush(self._by_deadline, (waiter.deadline, number, waiter))
        self._size += 1
        self._notified_count += waiter.on_place is not None
        if waiter.owner is not None:
            self._owners[waiter.owner] += 1
        self._latest_ticket = max(self._latest_ticket, waiter.ticket)

    def is_last(self, waiter: Waiter) -> bool:
        """Whether nobody joined after this client."""
        return waiter.ticket >= self._latest_ticket

    def leave(self, waiter: Waiter) -> bool:
        """False if it has left before."""
        if waiter.has_left:
            return False
        waiter.has_left = True
        self._size -= 1
        self._notified_count -= waiter.on_place is not None
        if waiter.owner is not None:
            self._owners[waiter.owner] -= 1
            if not self._owners[waiter.owner]:
                del self._owners[waiter.owner]
        if len(self._by_deadline) > 2 * self._size + NOTICES_PER_ITERATION:
            self._by_deadline = _without_departed(self._by_deadline)
        if len(self._by_ticket) > 2 * self._size + NOTICES_PER_ITERATION:
            self._by_ticket = _without_departed(self._by_ticket)
        return True

    def first(self) -> Waiter | None:
        """The client that is next; None if nobody waits."""
        while self._by_ticket and self._by_ticket[0][2].has_left:
            heapq.heappop(self._by_ticket)
        return self._by_ticket[0][2] if self._by_ticket else None

    def overdue(self, now: float) -> list[Waiter]:
        """Those whose deadline has passed. Each is named once."""
        overdue = []
        while self._by_deadline and self._by_deadline[0][0] <= now:
            waiter = heapq.heappop(self._by_deadline)[2]
            if not waiter.has_left:
                overdue.append(waiter)
        return overdue

    def in_order(self) -> list[Waiter]:
        """All clients that wait, the next one first."""
        return [entry[2] for entry in sorted(self._by_ticket) if not entry[2].has_left]


def _without_departed(heap: list[tuple[KeyT, int, Waiter]]) -> list[tuple[KeyT, int, Waiter]]:
    remaining = [entry for entry in heap if not entry[2].has_left]
    heapq.heapify(remaining)
    return remaining


class PlaceNotices:
    """Tells waiters their place in the queue."""

    def __init__(self, queue: WaitingQueue, count: SlotCount) -> None:
        self._queue = queue
        self._count = count
        self._not_before = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_notifying = False

    def notify_new_waiter(self, waiter: Waiter) -> None:
        """Tell a client that has just joined its place."""
        if waiter.on_place is not None and self._queue.is_last(waiter):
            self._notify_one(waiter, len(self._queue))
        else:
            self.notify_soon()

    def notify_soon(self) -> None:
        """Places have changed: send notices now, or when the pause after the last round is over."""
        if not self._queue.notified_count or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._not_before and not self._is_notifying:
            self.notify()
        else:
            self._timer = loop.call_at(max(self._not_before, loop.time() + PLACES_EVERY_SECONDS), self._notify_later)

    def notify(self) -> None:
        """Begin a round of notices, unless one is under way: then another follows it."""
        if self._is_notifying:
            self.notify_soon()
        elif self._queue.notified_count:
            self._is_notifying = True
            self._notify_slice(self._queue.in_order(), 0, 0.0)

    def _notify_later(self) -> None:
        self._timer = None
        self.notify()

    def _notify_slice(self, waiters: list[Waiter], start: int, spent: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for position, waiter in enumerate(waiters[start : start + NOTICES_PER_ITERATION], start=start + 1):
            if waiter.on_place is not None and not waiter.has_left:
                self._notify_one(waiter, position)
        spent += loop.time() - began
        if start + NOTICES_PER_ITERATION < len(waiters):
            loop.call_soon(self._notify_slice, waiters, start + NOTICES_PER_ITERATION, spent)
        else:
            self._is_notifying = False
            self._not_before = loop.time() + max(PLACES_EVERY_SECONDS, PAUSE_FACTOR * spent)

    def _notify_one(self, waiter: Waiter, position: int) -> None:
        place = position + self._count.waiting_before(waiter.ticket)
        if waiter.on_place is not None and place != waiter.place:
            waiter.place = place
            waiter.on_place(place)
