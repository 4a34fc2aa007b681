"""Capacity: a number of slots, and a fair queue in front of them.

`Slots` is the whole of it for one process. Several processes share one capacity by sharing the
counts behind it (see `paddock.server.workers`).
"""

from __future__ import annotations

import asyncio
import secrets
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from paddock.errors import CapacityReached, PaddockError, QueueTimeout
from paddock.sessions.queue import Places, Queue, Waiter

if TYPE_CHECKING:
    from collections.abc import Callable


class Count(Protocol):
    """How many slots are taken and who waits, wherever those numbers live."""

    @property
    def capacity(self) -> int: ...

    def take(self, ticket: int | None = None) -> bool:
        """Take a slot if one is free and nobody with an earlier ticket waits."""

    def give_back(self) -> None: ...

    def taken(self) -> int: ...

    def new_ticket(self) -> int:
        """A number later than all given out before."""
        ...

    def publish(self, first: int | None, waiting: int) -> None:
        """Tell others which ticket waits here first, and how many wait in all."""

    def waiting_before(self, ticket: int) -> int:
        """How many wait elsewhere ahead of `ticket`."""
        ...


class LocalCount:
    """The count of a server with one process: nobody waits elsewhere."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken = 0
        self._tickets = 0

    def take(self, ticket: int | None = None) -> bool:
        if self._taken >= self.capacity:
            return False
        self._taken += 1
        return True

    def give_back(self) -> None:
        self._taken -= 1

    def taken(self) -> int:
        return self._taken

    def new_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def publish(self, first: int | None, waiting: int) -> None:
        pass

    def waiting_before(self, ticket: int) -> int:
        return 0


LEASE_SECONDS = 10.0
LEASE: ContextVar[str | None] = ContextVar("lease", default=None)
"""The lease that came with the present request."""


class Leases:
    """Slots taken for sessions that are still to be opened. Each is used once, or runs out."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def grant(self, host: str, now: float) -> str:
        lease = f"{host}-{secrets.token_hex(8)}"
        self._until[lease] = now + LEASE_SECONDS
        return lease

    def redeem(self, lease: str | None) -> bool:
        """Whether the lease is good. It is used up by that."""
        return lease is not None and self._until.pop(lease, None) is not None

    def expired(self, now: float) -> list[str]:
        return [lease for lease, until in self._until.items() if now >= until] if self._until else []


class Slots:
    """Takes and gives back slots. Who waits is served first come, first served, by `Queue`."""

    def __init__(
        self,
        count: Count,
        clock: Callable[[], float],
        most_waiting: int | None = None,
        most_waiting_per_owner: int | None = None,
    ) -> None:
        self._count = count
        self._clock = clock
        self._most_waiting = most_waiting
        self._most_per_owner = most_waiting_per_owner
        self._queue = Queue()
        self._places = Places(self._queue, count)
        self.freed: Callable[[], None] | None = None
        """Hears of every slot that is given back."""

    @property
    def capacity(self) -> int:
        return self._count.capacity

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def taken(self) -> int:
        return self._count.taken()

    def take(self, ticket: int | None = None) -> bool:
        """Take a slot if one is free and nobody waits for it, or nobody longer than the holder of `ticket`."""
        first = self._queue.first()
        if first is not None and (ticket is None or first.ticket < ticket):
            return False
        return self._count.take(ticket)

    def give_back(self) -> None:
        self._count.give_back()
        self.admit()
        if self.freed is not None:
            self.freed()

    def admit(self) -> None:
        """Let in as many of those who wait as there is room for."""
        before = len(self._queue)
        while (waiter := self._queue.first()) is not None:
            if not waiter.admitted.done():
                if not self._count.take(waiter.ticket):
                    break
                waiter.admitted.set_result(None)
            self._queue.leave(waiter)
        if len(self._queue) != before:
            self._moved()

    async def wait(
        self,
        seconds: float,
        moved: Callable[[int], None] | None = None,
        ticket: int | None = None,
        owner: object = None,
    ) -> None:
        """Wait for a slot. `moved(place)` is told the place in the queue, 1 being next, now and after it has changed.

        Who has a `ticket` already waits where it says. `owner` is the connection that several wait for. Raises
        QueueTimeout after `seconds`, and CapacityReached where too many wait. A cancelled wait leaves no slot behind.
        """
        self._check_room(owner)
        ticket = self._count.new_ticket() if ticket is None else ticket
        waiter = Waiter(ticket, self._clock() + seconds, moved, owner)
        self._queue.join(waiter)
        self._places.tell_newcomer(waiter)
        self._publish()
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.done() and not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
                self.give_back()
            raise
        finally:
            if self._queue.leave(waiter):
                self._moved()

    def expire(self, now: float) -> None:
        """Turn away those whose time is up."""
        for waiter in self._queue.overdue(now):
            if not waiter.admitted.done():
                taken, most = self.taken(), self.capacity
                waiter.admitted.set_exception(
                    QueueTimeout(
                        f"Server at capacity: {taken}/{most} sessions active. No slot came free in time.",
                        hint="wait longer (queue_timeout), or raise --max-sessions",
                        active_sessions=taken,
                        max_sessions=most,
                    )
                )

    def turn_away(self, error: PaddockError) -> None:
        """Nobody who waits will be let in any more."""
        for waiter in self._queue.in_order():
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)

    def tell_places(self) -> None:
        """Tell those who wait where they stand, if that has changed."""
        self._publish()
        self._places.tell()

    def _moved(self) -> None:
        self._publish()
        self._places.tell_soon()

    def _publish(self) -> None:
        first = self._queue.first()
        self._count.publish(first.ticket if first is not None else None, len(self._queue))

    def _check_room(self, owner: object) -> None:
        most, own = self._most_waiting, self._most_per_owner
        if most is not None and len(self._queue) >= most:
            reason, hint = f"{most} wait for a slot already (max_waiting)", "raise --max-waiting"
        elif own is not None and owner is not None and self._queue.waiting_for(owner) >= own:
            reason = f"{own} of this connection wait for a slot already (max_waiting_per_connection)"
            hint = "wait for some of them, or use more connections"
        else:
            return
        taken, capacity = self.taken(), self.capacity
        raise CapacityReached(
            f"Server at capacity: {taken}/{capacity} sessions active, and {reason}.",
            hint=f"try again later, or {hint}",
            active_sessions=taken,
            max_sessions=capacity,
        )
