"""Whose turn it is: one order of all who wait, at whichever door they do.

A ticket is the time of arrival, by the clock of the machine that all doors of a server share. Every door tells every
other since when those have waited who wait at it. Nobody keeps the whole: with a door go only those who waited there,
and the others go on with what they know.
"""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_left, insort
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Address = tuple[str, int]

PASSED_OVER_AFTER = 1.0
"""Seconds for which a free slot is kept for somebody at another door who does not take it."""
DOOR_SILENT_FOR = 3.0
TELL_EVERY = 0.5
DIAL_AGAIN_AFTER = 0.2
DIAL_TIMEOUT = 2.0
MOST_IN_A_LINE = 1000
MOST_UNREAD = 4 * 1024 * 1024


class Turns:
    """Who waits here, and what the other doors have told. No sockets, no clock of its own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.here: set[int] = set()
        self._let_in: set[int] = set()
        """Of those here, the ones that ask a host for the slot by now. They may be refused and wait on."""
        self.told: Callable[[], None] | None = None
        """Hears whenever places may have changed."""
        self.changed: Callable[[Iterable[int], Iterable[int]], None] | None = None
        """Hears of those who join and those who leave here."""
        self._clock = clock
        self._elsewhere: dict[str, list[int]] = {}
        self._kept_for: tuple[int, float] | None = None

    def join(self, ticket: int) -> None:
        self._let_in.discard(ticket)
        if ticket not in self.here:
            self.here.add(ticket)
            if self.changed is not None:
                self.changed((ticket,), ())

    def let_in(self, ticket: int) -> None:
        if ticket in self.here:
            self._let_in.add(ticket)

    def leave(self, ticket: int) -> None:
        if ticket in self.here:
            self.here.remove(ticket)
            self._let_in.discard(ticket)
            if self.changed is not None:
                self.changed((), (ticket,))
            if self.told is not None:
                self.told()

    @property
    def doors(self) -> int:
        """How many other doors tell us who waits at them."""
        return len(self._elsewhere)

    @property
    def elsewhere(self) -> int:
        """How many wait at other doors."""
        return sum(map(len, self._elsewhere.values()))

    def before(self, ticket: int) -> int:
        """How many wait at other doors and came earlier."""
        return sum(bisect_left(tickets, ticket) for tickets in self._elsewhere.values())

    def ahead(self, ticket: int) -> int:
        """How many came earlier, of all but those who are in this door's own queue."""
        return self.before(ticket) + sum(earlier < ticket for earlier in self._let_in)

    def comes(self, ticket: int, room: int) -> bool:
        """Whether it is the turn of one who came with `ticket`, if `room` slots are free.

        The first in the whole line have them. A door that leaves a slot to its own for too long cannot use it.
        """
        if room <= 0:
            self._kept_for = None
            return False
        if room > self.before(ticket):
            return True
        first, now = min(tickets[0] for tickets in self._elsewhere.values() if tickets), self._clock()
        if self._kept_for is None or self._kept_for[0] != first:
            self._kept_for = (first, now)
        return now - self._kept_for[1] > PASSED_OVER_AFTER

    # -- what other doors tell --------------------------------------------------------------------

    def meet(self, door: str) -> list[int]:
        """A door begins to tell. Returns its tickets, as `hear` and `part` want them."""
        tickets = self._elsewhere[door] = []
        return tickets

    def hear(self, tickets: list[int], joined: Iterable[int], left: Iterable[int]) -> None:
        for ticket in joined:
            insort(tickets, ticket)
        for ticket in left:
            at = bisect_left(tickets, ticket)
            if at < len(tickets) and tickets[at] == ticket:
                del tickets[at]
        if self.told is not None:
            self.told()

    def part(self, door: str, tickets: list[int]) -> None:
        """A door tells no more: nobody waits for those that it spoke of."""
        if self._elsewhere.get(door) is tickets:
            del self._elsewhere[door]
            if self.told is not None:
                self.told()


class Teller:
    """Tells the other doors who waits here, over a connection to each that nothing comes back on."""

    def __init__(self, turns: Turns, doors: Sequence[Address], secret: str) -> None:
        self._turns = turns
        self._doors = doors
        self._hello = {"secret": secret, "door": secrets.token_hex(8)}
        self._joined: list[int] = []
        self._left: list[int] = []
        self._writers: dict[Address, asyncio.StreamWriter] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        if self._doors:
            self._turns.changed = self._note
            self._tasks = [asyncio.create_task(self._keep(door)) for door in self._doors]
            self._tasks.append(asyncio.create_task(self._beat()))

    def stop(self) -> None:
        self._turns.changed = None
        for task in self._tasks:
            task.cancel()
        for writer in self._writers.values():
            writer.close()

    def _note(self, joined: Iterable[int], left: Iterable[int]) -> None:
        """What happens in one turn of the loop is told together."""
        if not self._joined and not self._left:
            asyncio.get_running_loop().call_soon(self._tell)
        self._joined += joined
        self._left += left

    def _tell(self) -> None:
        joined, left, self._joined, self._left = self._joined, self._left, [], []
        for word, tickets in (("joined", joined), ("left", left)):
            for part in lines_of(tickets):
                self._say({word: part})

    def _say(self, document: dict[str, Any]) -> None:
        line = orjson.dumps(document) + b"\n"
        for writer in self._writers.values():
            if writer.transport.get_write_buffer_size() > MOST_UNREAD:
                writer.transport.abort()
            else:
                writer.write(line)

    async def _beat(self) -> None:
        while True:
            self._say({})
            await asyncio.sleep(TELL_EVERY)

    async def _keep(self, door: Address) -> None:
        """Dial, say who waits, and dial again when the line breaks."""
        while True:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(DIAL_TIMEOUT):
                    reader, writer = await asyncio.open_connection(*door)
                try:
                    self._tell()
                    writer.write(orjson.dumps(self._hello) + b"\n")
                    for part in lines_of(list(self._turns.here)):
                        writer.write(orjson.dumps({"joined": part}) + b"\n")
                    self._writers[door] = writer
                    await reader.read()
                finally:
                    self._writers.pop(door, None)
                    writer.close()
            await asyncio.sleep(DIAL_AGAIN_AFTER)


def lines_of(tickets: list[int]) -> list[list[int]]:
    """In parts that fit into the other end's buffer for a line."""
    return [tickets[start : start + MOST_IN_A_LINE] for start in range(0, len(tickets), MOST_IN_A_LINE)]


async def listen(turns: Turns, door: str, reader: asyncio.StreamReader) -> None:
    """Hear another door out, until it hangs up or falls silent."""
    tickets = turns.meet(door)
    try:
        while True:
            async with asyncio.timeout(DOOR_SILENT_FOR):
                line = await reader.readline()
            if not line:
                return
            said = orjson.loads(line)
            if said:
                turns.hear(tickets, said.get("joined", ()), said.get("left", ()))
    finally:
        turns.part(door, tickets)
