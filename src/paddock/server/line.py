"""Connections that a thread reads instead of the loop: the sockets below their transports."""

from __future__ import annotations

import os
import select
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from paddock.server.awake import is_quick, wait_awake
from paddock.server.kernel import ROOM, Looker, Receiver
from paddock.sessions.jobs import TOGETHER

if TYPE_CHECKING:
    from asyncio import Transport
    from collections.abc import Callable

    from paddock.server.reading import Reading


class Owner(Protocol):
    """The connection, as its line sees it."""

    heard: bool


class SocketLine:
    """Lends the socket of a transport whose protocol has read all of what came before."""

    def __init__(self, owner: Owner, reading: Reading, transport: Transport, limit: int) -> None:
        self._owner = owner
        self.lend = reading.lend
        self.take_back = reading.take_back
        self.descriptor: int = transport.get_extra_info("socket").fileno()
        self._most = min(ROOM, limit)
        self.has_ended = False
        self.receive: Callable[[int, int], bytes]

    def watch(self) -> SocketWatch:
        return SocketWatch()

    def read(self) -> bytes:
        self._owner.heard = True
        return b"" if self.has_ended else self.receive(self.descriptor, self._most)


class SocketWatch:
    """Lines that one thread waits for."""

    def __init__(self) -> None:
        self._ready = select.epoll()
        try:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            self._ready.close()
            raise
        self._ready.register(self._bell, select.EPOLLIN)
        self._lines: dict[int, SocketLine] = {}
        self._receive = Receiver().receive
        self._look = Looker(self._ready.fileno(), TOGETHER).look
        self._is_quick = False
        """Whether the last request came soon after the answer before it."""

    def add(self, line: SocketLine) -> None:
        self._ready.register(line.descriptor, select.EPOLLIN)
        line.has_ended, line.receive = False, self._receive
        self._lines[line.descriptor] = line

    def remove(self, line: SocketLine) -> None:
        del self._lines[line.descriptor]
        self._ready.unregister(line.descriptor)

    def wait(self) -> list[SocketLine]:
        began = monotonic()
        is_alone = len(self._lines) == 1
        events = self._look() if not is_alone else wait_awake(self._look) if self._is_quick else []
        if not events:
            events = self._ready.poll(-1, TOGETHER)
        self._is_quick = is_quick(began)
        found: list[SocketLine] = []
        for descriptor, event in events:
            line = self._lines.get(descriptor)
            if line is not None:
                line.has_ended = bool(event & ~select.EPOLLIN)
                found.append(line)
            elif descriptor == self._bell:
                os.eventfd_read(self._bell)
        return found

    def wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        self._ready.close()
        os.close(self._bell)
