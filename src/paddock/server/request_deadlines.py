"""Deadlines for requests that do not arrive: silent sockets, slow headers, stalled bodies.

Invariant: a connection either waits for us, or is idle between two requests (uvicorn's keep-alive timeout), or has a
deadline. A request that arrives in one piece never starts a timer. The deadline of a body grows with what has
arrived, so that a large upload may take long and one byte a second may not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from paddock.server.one_write import OneWriteProtocol
from paddock.server.rare_log import late_log

if TYPE_CHECKING:
    import asyncio

TIMEOUT_ANSWER = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class DeadlineProtocol(OneWriteProtocol):
    """uvicorn's HTTP protocol, which closes connections whose request does not arrive in time."""

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
        left = self._seconds_left()
        if left > 0:
            self._timer = self.loop.call_later(left, self._check_arrival)
            return
        part = "the body" if self._in_body else "the headers"
        late_log.warning("a connection of %s was closed: %s of its request did not arrive in time", self.client, part)
        # A request whose body is missing may have been answered already, or be about to be.
        if not self._in_body and (self.cycle is None or self.cycle.response_complete):
            self.transport.write(TIMEOUT_ANSWER)
        self.transport.close()
