"""Capacity: a number of slots, and a fair queue in front of them.

`Slots` is the whole of it for one process. Several processes share one capacity by sharing the
counts behind it (see `paddock.server.workers`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from paddock.errors import PaddockError, QueueTimeout

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


class Waiter:
    __slots__ = ("admitted", "deadline", "moved", "place", "ticket")

    def __init__(self, ticket: int, deadline: float, moved: Callable[[int], None] | None) -> None:
        self.ticket = ticket
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.deadline = deadline
        self.moved = moved
        self.place = 0


class Slots:
    """Takes and gives back slots. Who waits is served first come, first served."""

    def __init__(self, count: Count, clock: Callable[[], float]) -> None:
        self._count = count
        self._clock = clock
        self._waiters: deque[Waiter] = deque()
        self.freed: Callable[[], None] | None = None
        """Hears of every slot that is given back."""

    @property
    def capacity(self) -> int:
        return self._count.capacity

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def taken(self) -> int:
        return self._count.taken()

    def take(self, ticket: int | None = None) -> bool:
        """Take a slot if one is free and nobody waits for it, or nobody longer than the holder of `ticket`."""
        if self._waiters and (ticket is None or self._waiters[0].ticket < ticket):
            return False
        return self._count.take(ticket)

    def give_back(self) -> None:
        self._count.give_back()
        self.admit()
        if self.freed is not None:
            self.freed()

    def admit(self) -> None:
        """Let in as many of those who wait as there is room for."""
        before = len(self._waiters)
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.admitted.done():
                if not self._count.take(waiter.ticket):
                    break
                waiter.admitted.set_result(None)
            self._waiters.popleft()
        if len(self._waiters) != before:
            self.tell_places()

    async def wait(
        self, seconds: float, moved: Callable[[int], None] | None = None, ticket: int | None = None
    ) -> None:
        """Wait for a slot. `moved(place)` is told the place in the queue, 1 being next, as it changes.

        Who has a `ticket` already waits where it says. Raises QueueTimeout after `seconds`. A cancelled wait leaves
        no slot behind.
        """
        ticket = self._count.new_ticket() if ticket is None else ticket
        waiter = Waiter(ticket, self._clock() + seconds, moved)
        self._line_up(waiter)
        self.tell_places()
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.done() and not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
                self.give_back()
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self.tell_places()

    def expire(self, now: float) -> None:
        """Turn away those whose time is up."""
        for waiter in [waiter for waiter in self._waiters if now >= waiter.deadline]:
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
        for waiter in self._waiters:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)

    def _line_up(self, waiter: Waiter) -> None:
        at = len(self._waiters)
        while at and self._waiters[at - 1].ticket > waiter.ticket:
            at -= 1
        self._waiters.insert(at, waiter)

    def tell_places(self) -> None:
        """Tell those who wait where they stand, if that has changed."""
        self._count.publish(self._waiters[0].ticket if self._waiters else None, len(self._waiters))
        for here, waiter in enumerate(self._waiters, start=1):
            place = here + self._count.waiting_before(waiter.ticket)
            if waiter.moved is not None and place != waiter.place:
                waiter.place = place
                waiter.moved(place)
