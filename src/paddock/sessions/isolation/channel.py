"""The server's end of one session's socket: requests go out as numbered frames, responses come back by number.

Knows nothing of what the frames contain: `remote.py` and its subclasses do.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from typing import TYPE_CHECKING, Any

from paddock.errors import EnvironmentCrashed
from paddock.sessions.isolation.host import DIED, HEADER, OPENED, STATUS

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

TRAILER = HEADER.size + STATUS.size


class SessionChannel(asyncio.Protocol):
    """`decode(kind, data)` returns the value of a response, or raises the error that it encodes."""

    def __init__(self, decode: Callable[[bytes, bytes], Any]) -> None:
        self._decode = decode
        self._transport: Any = None
        self._numbers = itertools.count(1)
        self._responses: dict[int, asyncio.Future[Any]] = {}
        self._unanswered: dict[int, bool] = {}
        """Requests that the child still executes, and whether each can be cancelled there."""
        self._buffer = bytearray()
        self.loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self.loop.create_future()
        self.is_lost = False
        self.reason = "its connection broke off"
        """Why the process has ended."""

    @classmethod
    async def connect(cls, end: socket.socket, decode: Callable[[bytes, bytes], Any]) -> SessionChannel:
        end.setblocking(False)
        _, channel = await asyncio.get_running_loop().create_unix_connection(lambda: cls(decode), sock=end)
        return channel

    def request(self, kind: bytes, data: bytes, *, stoppable: bool = False) -> asyncio.Future[Any]:
        """Send a request. The future gets the response.

        If the future is cancelled, the request is cancelled in the child if it is `stoppable`, and runs on otherwise.
        The future raises EnvironmentCrashed if the child's process has ended, and what `decode` raises.
        """
        response: asyncio.Future[Any] = self.loop.create_future()
        if self.is_lost:
            response.set_exception(self.crash_error())
            return response
        number = next(self._numbers)
        self._responses[number] = response
        self._unanswered[number] = stoppable
        if stoppable:
            response.add_done_callback(lambda future: self._cancel(number) if future.cancelled() else None)
        self._transport.write(HEADER.pack(len(data), number, kind) + data)
        return response

    def unanswered(self) -> dict[int, bool]:
        """The requests that the child still executes, and whether each can be cancelled there."""
        return dict(self._unanswered)

    def is_given_up(self, number: int) -> bool:
        """Whether the child still executes it, and no caller waits for it any more."""
        return number in self._unanswered and self._responses[number].cancelled()

    async def close(self, seconds: float) -> bool:
        """Close the socket: the child finishes its requests and closes the environment. False if late."""
        self._transport.close()
        await asyncio.wait([self._ended], timeout=seconds)
        return self._ended.done()

    def crash_error(self) -> EnvironmentCrashed:
        return EnvironmentCrashed(
            f"the environment's process has ended: {self.reason}",
            hint="reset begins a new episode in a new process (over MCP: open a new session); the log tells more",
        )

    def _cancel(self, number: int) -> None:
        if not self.is_lost and number in self._unanswered:
            self._transport.write(HEADER.pack(0, number, b"cancel"))

    # -- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= HEADER.size:
            size, number, kind = HEADER.unpack_from(buffer)
            end = HEADER.size + size
            if len(buffer) < end:
                return
            payload = bytes(buffer[HEADER.size : end])
            del buffer[:end]
            kind = kind.rstrip(b"\0")
            if kind == DIED:
                self._record_exit(payload)
                self._transport.abort()
                return
            self._deliver(number, kind, payload)

    def _deliver(self, number: int, kind: bytes, data: bytes) -> None:
        self._unanswered.pop(number, None)
        response = self._responses.pop(number, None)
        if response is None or response.done():
            return
        try:
            value = None if kind == OPENED else self._decode(kind, data)
        except Exception as error:
            response.set_exception(error)
        else:
            response.set_result(value)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        trailer = bytes(self._buffer[-TRAILER:])
        if len(trailer) == TRAILER and HEADER.unpack_from(trailer)[2].rstrip(b"\0") == DIED:
            # The `died` frame follows an incomplete frame.
            self._record_exit(trailer[HEADER.size :])
        if not self._ended.done():
            self._ended.set_result(None)
        for response in self._responses.values():
            if not response.done():
                response.set_exception(self.crash_error())
        self._responses.clear()
        self._unanswered.clear()

    def _record_exit(self, status: bytes) -> None:
        self.reason = describe_exit(STATUS.unpack(status)[0])
        self.is_lost = True


def describe_exit(status: int) -> str:
    """A wait status as text: the exit code, or the signal."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
