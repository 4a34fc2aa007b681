"""uvicorn's HTTP protocol with limits: for pipelined requests, for time, and for connections.

Invariant: every open connection is a WebSocket with a client that answers pings, a request that is being executed, or
waits for its peer until a deadline: for a request to arrive, for the peer to read an answer, for the next request
(uvicorn's keep-alive timeout). A request that arrives in one piece never starts a timer. The deadline of a body grows
with what has arrived, so that a large upload may take long and one byte a second may not.

Live sessions are not connections: they have their own timeouts. Knows nothing of the application.
"""

from __future__ import annotations

import os
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paddock.config import Limits
from paddock.server.rate_limited_log import RateLimitedLog, slow_peer_log

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Iterable

PARSE_BYTES = 4096
"""So many bytes are parsed at once: no more requests than these hold can wait for their turn on one connection."""
CHECK_SECONDS = 0.25
RESERVED_DESCRIPTORS = 64
"""What is left for files, pipes and sockets of environments, where `max_connections` is not set."""
TIMEOUT_RESPONSE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_MANY_RESPONSE = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
)

full_log, descriptor_log = RateLimitedLog(), RateLimitedLog()


class PipelineFlow(FlowControl):
    """Does not read on while requests that were parsed wait for their turn."""

    def __init__(self, protocol: PipelinedProtocol, transport: Any) -> None:
        super().__init__(transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        if not self._protocol.pipeline and not self._protocol.unparsed:
            super().resume_reading()


class PipelinedProtocol(HttpToolsProtocol):
    """Parses no further request while one waits for its turn. uvicorn parses all that it has read."""

    unparsed = b""
    """What was read and waits until the requests before it are answered."""
    _is_parsing = False
    is_upgraded = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = PipelineFlow(self, self.transport)

    def data_received(self, data: bytes) -> None:
        if len(data) <= PARSE_BYTES and not self.unparsed and not self.pipeline:
            super().data_received(data)
        else:
            self.unparsed += data
            self._parse()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.unparsed and not self._is_parsing:
            self.loop.call_soon(self._parse)

    def handle_websocket_upgrade(self) -> None:
        self.is_upgraded = True
        super().handle_websocket_upgrade()

    def _parse(self) -> None:
        """Parse what was read until a request has to wait for its turn."""
        if self._is_parsing or self.parser is None or self.transport.is_closing():
            return
        data, at = self.unparsed, 0
        self._is_parsing = True
        try:
            while at < len(data) and not (self.pipeline or self.is_upgraded or self.transport.is_closing()):
                super().data_received(data[at : at + PARSE_BYTES])
                at += PARSE_BYTES
        finally:
            self._is_parsing = False
        self.unparsed = b"" if self.is_upgraded else data[at:]
        if self.is_upgraded:
            return
        if self.unparsed:
            self.flow.pause_reading()
        elif self.cycle is None or self.cycle.response_complete:
            self.flow.resume_reading()


class DeadlineProtocol(PipelinedProtocol):
    """Closes connections whose request does not arrive in time."""

    head_seconds: ClassVar[float] = 20.0
    """From the connection, or the first byte of a later request, to the end of its headers."""
    body_seconds: ClassVar[float] = 30.0
    """From the end of the headers to the end of the body, beside the time that `body_bytes_per_second` grants."""
    body_bytes_per_second: ClassVar[float] = 8192.0

    _is_arriving = True
    """Whether a request is incomplete. A connection that has not sent anything yet counts."""
    _in_body = False
    _began = 0.0
    _received = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._began = self.loop.time()
        self._timer = self.loop.call_later(self.head_seconds, self._check_arrival)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and not (self._is_arriving or self.is_upgraded or self.timeout_keep_alive_task):
            # Bytes that begin no request have ended the wait for the next one.
            self._is_arriving, self._in_body, self._began = True, False, self.loop.time()
        if self._is_arriving:
            if self._timer is None and not self.transport.is_closing():
                self._timer = self.loop.call_later(self._seconds_left(), self._check_arrival)
        elif self._timer is not None:
            self._stop_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_arriving, self._in_body, self._began = True, False, self.loop.time()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_body, self._began, self._received = True, self.loop.time(), 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_arriving = False

    def handle_websocket_upgrade(self) -> None:
        self._is_arriving = False
        self._stop_timer()
        super().handle_websocket_upgrade()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _seconds_left(self) -> float:
        granted = self.head_seconds
        if self._in_body:
            granted = self.body_seconds + self._received / self.body_bytes_per_second
        return self._began + granted - self.loop.time()

    def _check_arrival(self) -> None:
        self._timer = None
        if not self._is_arriving or self.transport.is_closing():
            return
        if self.flow.read_paused:
            # We are the slow side: the time does not count.
            self._began = self.loop.time()
        seconds = self._seconds_left()
        if seconds > 0:
            self._timer = self.loop.call_later(seconds, self._check_arrival)
            return
        part = "the body" if self._in_body else "the headers"
        slow_peer_log.warning(
            "a connection of %s was closed: %s of its request did not arrive in time", self.client, part
        )
        # A request whose body is missing may have been answered already, or be about to be.
        if not self._in_body and (self.cycle is None or self.cycle.response_complete):
            self.transport.write(TIMEOUT_RESPONSE)
        self.transport.close()


class UnreadDeadline:
    """For a protocol: ends the connection if its peer reads nothing of what waits for it."""

    limits = Limits()
    transport: Any
    _unsent = 0
    _unread_since: float | None = None

    def is_write_paused(self) -> bool:
        raise NotImplementedError

    def check_unread(self, now: float) -> None:
        if not self.is_write_paused() or self.transport.is_closing():
            self._unread_since = None
            return
        unsent = self.transport.get_write_buffer_size()
        if self._unread_since is None or unsent < self._unsent:
            self._unread_since = now
        elif now - self._unread_since > self.limits.unread_timeout:
            slow_peer_log.warning(
                "a client read nothing for %.0f s: disconnected, %d bytes unsent", now - self._unread_since, unsent
            )
            self.transport.abort()
        self._unsent = unsent


class LimitedProtocol(UnreadDeadline, DeadlineProtocol):
    """Our servers' HTTP protocol. Also limits connections, and the time for the peer to read its answers."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        limit = max_connections_of(self.limits)
        if len(self.connections) > limit:
            full_log.warning("%d connections are open (max_connections): another one was refused", limit)
            self.transport.write(TOO_MANY_RESPONSE)
            self.transport.close()

    def is_write_paused(self) -> bool:
        return self.flow.write_paused


class ConnectionMonitor:
    """Checks all connections of one server, four times a second."""

    def __init__(self, connections: Iterable[Any]) -> None:
        self._connections = connections
        self._next = 0.0
        self._listening: list[socket.socket] = []

    def listen_on(self, sockets: list[socket.socket] | None) -> None:
        self._listening = sockets or []

    def check(self) -> None:
        now = monotonic()
        if now < self._next:
            return
        self._next = now + CHECK_SECONDS
        for connection in list(self._connections):
            if isinstance(connection, UnreadDeadline):
                connection.check_unread(now)
        self._check_descriptors()

    def _check_descriptors(self) -> None:
        """Without a free descriptor the system accepts no connection and reports nothing, so this does."""
        for listening in self._listening[:1]:
            try:
                os.close(os.dup(listening.fileno()))
            except OSError as error:
                descriptor_log.warning("no connection can be accepted: %s", error)


def max_connections_of(limits: Limits) -> int:
    """How many connections this process takes."""
    if limits.max_connections is not None:
        return limits.max_connections
    try:
        import resource
    except ImportError:
        return 1 << 30
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else max(soft - RESERVED_DESCRIPTORS, soft // 2)
