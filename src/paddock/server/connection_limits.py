"""A limit for connections, and a deadline for answers that nobody reads.

Invariant: every open connection is a WebSocket with a client that answers pings, a request that is being executed, or
waits for its peer until a deadline: for a request to arrive (`request_deadlines.py`), for the peer to read an answer,
for the next request. Live sessions are not connections: they have their own timeouts.
"""

from __future__ import annotations

import os
from time import monotonic
from typing import TYPE_CHECKING, Any

from paddock.config import Limits
from paddock.server.rare_log import RareLog, late_log
from paddock.server.request_deadlines import DeadlineProtocol

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

LOOK_EVERY = 0.25
RESERVED_DESCRIPTORS = 64
"""What is left for files, pipes and sockets of environments, where `max_connections` is not set."""
TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"

full_log, descriptor_log = RareLog(), RareLog()


def most_connections(limits: Limits) -> int:
    """How many connections this process takes."""
    if limits.max_connections is not None:
        return limits.max_connections
    try:
        import resource
    except ImportError:
        return 1 << 30
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else max(soft - RESERVED_DESCRIPTORS, soft // 2)


class LimitedProtocol(DeadlineProtocol):
    """uvicorn's HTTP protocol with a limit of connections, and a deadline for the peer to read its answers."""

    limits = Limits()
    _unsent = 0
    _unread_since: float | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        most = most_connections(self.limits)
        if len(self.connections) > most:
            full_log.warning("%d connections are open (max_connections): another one was refused", most)
            self.transport.write(TOO_MANY)
            self.transport.close()

    def check_unread(self, now: float) -> None:
        """End the connection if its peer has read nothing for too long."""
        if not self.flow.write_paused or self.transport.is_closing():
            self._unread_since = None
            return
        unsent = self.transport.get_write_buffer_size()
        if self._unread_since is None or unsent < self._unsent:
            self._unread_since = now
        elif now - self._unread_since > self.limits.unread_timeout:
            late_log.warning(
                "a client read nothing for %.0f s: disconnected, %d bytes unsent", now - self._unread_since, unsent
            )
            self.transport.abort()
        self._unsent = unsent


class ConnectionWatch:
    """Looks at all connections of one server, now and then."""

    def __init__(self, connections: Iterable[Any]) -> None:
        self._connections = connections
        self._next = 0.0
        self._listening: list[socket.socket] = []

    def listen_on(self, sockets: list[socket.socket] | None) -> None:
        self._listening = sockets or []

    def look(self) -> None:
        now = monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_EVERY
        for connection in list(self._connections):
            if isinstance(connection, LimitedProtocol):
                connection.check_unread(now)
        self._check_descriptors()

    def _check_descriptors(self) -> None:
        """Where none is left the system accepts nobody, and nobody is told."""
        for listening in self._listening[:1]:
            try:
                os.close(os.dup(listening.fileno()))
            except OSError as error:
                descriptor_log.warning("no connection can be accepted: %s", error)
