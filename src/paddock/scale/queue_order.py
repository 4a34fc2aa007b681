"""One first-come, first-served queue over all gateways of a server.

A ticket is the time of arrival, by the monotonic clock of the machine that all gateways share. Each gateway publishes
the tickets that wait at it to the other gateways (its peers). No process holds the whole queue: when a gateway dies,
only the clients that waited at it are lost. `QueueOrder` has no sockets, `QueuePublisher` knows no rules.
"""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_left, insort
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    Address = tuple[str, int]

IDLE_SLOT_SECONDS = 1.0
"""How long a free slot is kept for an earlier ticket at another gateway that does not take it."""
PEER_SILENCE_SECONDS = 3.0
HEARTBEAT_SECONDS = 0.5
RECONNECT_SECONDS = 0.2
CONNECT_SECONDS = 2.0
MAX_TICKETS_PER_LINE = 1000
MAX_BUFFERED_BYTES = 4 * 1024 * 1024


class QueueOrder:
    """The tickets that wait at this gateway, and those that the peers have published."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.local: set[int] = set()
        self._admitted: set[int] = set()
        """Local tickets that are requesting a slot from a host. The host may refuse, then they wait on."""
        self.on_change: Callable[[], None] | None = None
        """Called when positions in the queue may have changed."""
        self.on_local_change: Callable[[Iterable[int], Iterable[int]], None] | None = None
        """Called with the local tickets that were added and removed."""
        self._clock = clock
        self._remote: dict[str, list[int]] = {}
        self._slot_kept_for: tuple[int, float] | None = None

    def add(self, ticket: int) -> None:
        self._admitted.discard(ticket)
        if ticket not in self.local:
            self.local.add(ticket)
            if self.on_local_change is not None:
                self.on_local_change((ticket,), ())

    def admit(self, ticket: int) -> None:
        if ticket in self.local:
            self._admitted.add(ticket)

    def remove(self, ticket: int) -> None:
        if ticket in self.local:
            self.local.remove(ticket)
            self._admitted.discard(ticket)
            if self.on_local_change is not None:
                self.on_local_change((), (ticket,))
            if self.on_change is not None:
                self.on_change()

    @property
    def peers(self) -> int:
        """How many peers publish their tickets to this gateway."""
        return len(self._remote)

    @property
    def remote_count(self) -> int:
        """How many tickets wait at peers."""
        return sum(map(len, self._remote.values()))

    def remote_before(self, ticket: int) -> int:
        """How many earlier tickets wait at peers."""
        return sum(bisect_left(tickets, ticket) for tickets in self._remote.values())

    def count_before(self, ticket: int) -> int:
        """How many earlier tickets there are besides those in the local queue of `Slots`."""
        return self.remote_before(ticket) + sum(earlier < ticket for earlier in self._admitted)

    def is_turn(self, ticket: int, room: int) -> bool:
        """Whether `ticket` may take one of `room` free slots.

        Free slots belong to the earliest tickets of all gateways. A slot that a peer leaves idle for too long is
        given to the next ticket here.
        """
        if room <= 0:
            self._slot_kept_for = None
            return False
        if room > self.remote_before(ticket):
            return True
        first, now = min(tickets[0] for tickets in self._remote.values() if tickets), self._clock()
        if self._slot_kept_for is None or self._slot_kept_for[0] != first:
            self._slot_kept_for = (first, now)
        return now - self._slot_kept_for[1] > IDLE_SLOT_SECONDS

    # -- tickets of the peers --------------------------------------------------------------------

    def add_peer(self, peer: str) -> list[int]:
        """A peer has connected. Returns its ticket list, for `update_peer` and `remove_peer`."""
        tickets = self._remote[peer] = []
        return tickets

    def update_peer(self, tickets: list[int], joined: Iterable[int], left: Iterable[int]) -> None:
        for ticket in joined:
            insort(tickets, ticket)
        for ticket in left:
            at = bisect_left(tickets, ticket)
            if at < len(tickets) and tickets[at] == ticket:
                del tickets[at]
        if self.on_change is not None:
            self.on_change()

    def remove_peer(self, peer: str, tickets: list[int]) -> None:
        """A peer has disconnected: its tickets no longer count."""
        if self._remote.get(peer) is tickets:
            del self._remote[peer]
            if self.on_change is not None:
                self.on_change()


class QueuePublisher:
    """Sends the local tickets to every peer, over one connection each. Peers send nothing back."""

    def __init__(self, order: QueueOrder, peers: Sequence[Address], secret: str) -> None:
        self._order = order
        self._addresses = peers
        self._greeting = {"secret": secret, "gateway": secrets.token_hex(8)}
        self._added: list[int] = []
        self._removed: list[int] = []
        self._writers: dict[Address, asyncio.StreamWriter] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        if self._addresses:
            self._order.on_local_change = self._collect_change
            self._tasks = [asyncio.create_task(keep_connected(address, self._talk)) for address in self._addresses]
            self._tasks.append(asyncio.create_task(self._send_heartbeats()))

    def stop(self) -> None:
        self._order.on_local_change = None
        for task in self._tasks:
            task.cancel()
        for writer in self._writers.values():
            writer.close()

    def _collect_change(self, joined: Iterable[int], left: Iterable[int]) -> None:
        """Batches the changes of one iteration of the event loop."""
        if not self._added and not self._removed:
            asyncio.get_running_loop().call_soon(self._publish)
        self._added += joined
        self._removed += left

    def _publish(self) -> None:
        joined, left, self._added, self._removed = self._added, self._removed, [], []
        for key, tickets in (("joined", joined), ("left", left)):
            for chunk in chunks(tickets):
                self._write({key: chunk})

    def _write(self, document: dict[str, Any]) -> None:
        line = orjson.dumps(document) + b"\n"
        for writer in self._writers.values():
            if writer.transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
                writer.transport.abort()
            else:
                writer.write(line)

    async def _send_heartbeats(self) -> None:
        while True:
            self._write({})
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _talk(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._publish()
        writer.write(orjson.dumps(self._greeting) + b"\n")
        for chunk in chunks(list(self._order.local)):
            writer.write(orjson.dumps({"joined": chunk}) + b"\n")
        self._writers[address] = writer
        try:
            await reader.read()
        finally:
            self._writers.pop(address, None)


async def keep_connected(
    address: Address, talk: Callable[[Address, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> None:
    """Connect, `talk` until the connection breaks, and reconnect. Runs until it is cancelled."""
    while True:
        with suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(*address)
            try:
                await talk(address, reader, writer)
            finally:
                writer.close()
        await asyncio.sleep(RECONNECT_SECONDS)


def chunks(tickets: list[int]) -> list[list[int]]:
    """Split tickets so that each line fits into the read buffer of the peer."""
    return [tickets[start : start + MAX_TICKETS_PER_LINE] for start in range(0, len(tickets), MAX_TICKETS_PER_LINE)]


async def receive_peer_queue(order: QueueOrder, peer: str, reader: asyncio.StreamReader) -> None:
    """Apply what a peer publishes, until it disconnects or is silent for too long."""
    tickets = order.add_peer(peer)
    try:
        while True:
            async with asyncio.timeout(PEER_SILENCE_SECONDS):
                line = await reader.readline()
            if not line:
                return
            update = orjson.loads(line)
            if update:
                order.update_peer(tickets, update.get("joined", ()), update.get("left", ()))
    finally:
        order.remove_peer(peer, tickets)
