"""Connections read in the order in which something came, a few in each turn of the loop.

The loop reads all that are ready in one turn. With many busy clients a turn is long, and a request that just misses
one waits for two. And most frames are small text messages that arrive whole, for which the way through a transport
and a parser costs as much as the step they ask for. So such connections are read here, and whatever else arrives
(a fragment, a ping, half a frame, the end) is given back.
"""

from __future__ import annotations

import asyncio
import select
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from paddock.server.awake import is_quick, wait_awake
from paddock.server.kernel import ROOM
from paddock.server.plain_frame import text_in
from paddock.sessions.jobs import TOGETHER

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.server.outbox import Outbox

AT_ONCE = TOGETHER
"""How many are read in one turn: as many as are answered together."""


class Listener(Protocol):
    """A connection, as the inbox sees it."""

    def hear(self, message: bytes) -> None:
        """A text message came, and nothing else."""

    def give_back(self, unread: bytes) -> None:
        """Something else came, or the end: it has to leave the inbox."""


class Inbox:
    """One server's, for its connections. Used on its loop only."""

    def __init__(
        self, limit: int, outbox: Outbox, receive: Callable[[int, int], bytes], may_wait_awake: Callable[[], bool]
    ) -> None:
        self._outbox = outbox
        self._may_wait_awake = may_wait_awake
        self._rests_since = 0.0
        self._will_wait = False
        self.is_open = True
        self._listeners: dict[int, Listener] = {}
        self._most = min(ROOM, limit)
        self._receive = receive
        self._ready = select.epoll()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ready.fileno(), self._read)

    def enter(self, descriptor: int, listener: Listener) -> None:
        """From now on it is read here, and nowhere else."""
        self._listeners[descriptor] = listener
        self._ready.register(descriptor, select.EPOLLIN)

    def leave(self, descriptor: int) -> None:
        del self._listeners[descriptor]
        self._ready.unregister(descriptor)

    def close(self) -> None:
        self.is_open = False
        for listener in list(self._listeners.values()):
            listener.give_back(b"")
        self._loop.remove_reader(self._ready.fileno())
        self._ready.close()

    def _read(self) -> None:
        """What is ready, and what gets ready meanwhile: to go through the loop in between costs as much as a step."""
        left = AT_ONCE if len(self._listeners) > 1 else 1
        while left > 0 and self.is_open and (events := self._ready.poll(0, left)):
            self._take(events)
            left -= len(events)

    def _look(self) -> list[tuple[int, int]]:
        return self._ready.poll(0, AT_ONCE)

    def _take(self, events: list[tuple[int, int]]) -> None:
        """First all are read, then all are heard: the processor is quicker at one thing many times."""
        listeners, receive, most = self._listeners, self._receive, self._most
        was_quick = is_quick(self._rests_since)
        came: list[tuple[Listener, bytes]] = []
        for descriptor, _ in events:
            listener = listeners.get(descriptor)
            if listener is not None:
                came.append((listener, receive(descriptor, most)))
        self._outbox.hold()
        try:
            for listener, data in came:
                message = text_in(data)
                if message is None:
                    listener.give_back(data)
                else:
                    listener.hear(message)
        finally:
            self._outbox.release()
        self._rests_since = monotonic()
        if was_quick and len(listeners) == 1 and not self._will_wait and self._may_wait_awake():
            # In a turn of its own, so that the loop has looked at everything else before.
            self._will_wait = True
            self._loop.call_soon(self._wait_awake)

    def _wait_awake(self) -> None:
        """For the next request of a lone client that is quick. It is answered sooner, for the same processor time."""
        self._will_wait = False
        if self.is_open and (events := wait_awake(self._look)):
            self._take(events)
