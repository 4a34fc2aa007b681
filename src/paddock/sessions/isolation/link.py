"""The connection of one session to its process: requests go out as frames, answers come back by number."""

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


class Link(asyncio.Protocol):
    """`decode(kind, data)` makes a value of an answer, or raises what it stands for."""

    def __init__(self, decode: Callable[[bytes, bytes], Any]) -> None:
        self._decode = decode
        self._transport: Any = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._unanswered: dict[int, bool] = {}
        """Requests that the other side still carries out, and whether it can be asked to stop."""
        self._rest = bytearray()
        self.loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self.loop.create_future()
        self.lost = False
        self.reason = "its connection broke off"
        """Why it is lost."""

    @classmethod
    async def over(cls, end: socket.socket, decode: Callable[[bytes, bytes], Any]) -> Link:
        end.setblocking(False)
        _, link = await asyncio.get_running_loop().create_unix_connection(lambda: cls(decode), sock=end)
        return link

    def ask(self, kind: bytes, data: bytes, *, stoppable: bool = False) -> asyncio.Future[Any]:
        """What the other side will answer. Who stops waiting gives up the answer; what is done for it is asked to
        stop if it is `stoppable`, and goes on otherwise.

        The future raises EnvironmentCrashed if the other side is gone, and what `decode` raises.
        """
        answered: asyncio.Future[Any] = self.loop.create_future()
        if self.lost:
            answered.set_exception(self.crashed())
            return answered
        number = next(self._numbers)
        self._waiting[number] = answered
        self._unanswered[number] = stoppable
        if stoppable:
            answered.add_done_callback(lambda done: self._stop(number) if done.cancelled() else None)
        self._transport.write(HEADER.pack(len(data), number, kind) + data)
        return answered

    def unanswered(self) -> dict[int, bool]:
        """The requests that are still carried out, and whether they can be asked to stop."""
        return dict(self._unanswered)

    def is_given_up(self, number: int) -> bool:
        """Whether it is still carried out, and nobody waits for it any more."""
        return number in self._unanswered and self._waiting[number].cancelled()

    async def close(self, seconds: float) -> bool:
        """The other side closes the environment when it has done what it was asked for. False if not in time."""
        self._transport.close()
        await asyncio.wait([self._ended], timeout=seconds)
        return self._ended.done()

    def crashed(self) -> EnvironmentCrashed:
        return EnvironmentCrashed(
            f"the environment's process has ended: {self.reason}",
            hint="reset begins a new episode in a new process (over MCP: open a new session); the log tells more",
        )

    def _stop(self, number: int) -> None:
        if not self.lost and number in self._unanswered:
            self._transport.write(HEADER.pack(0, number, b"cancel"))

    # -- what the transport calls -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        rest = self._rest
        rest += data
        while len(rest) >= HEADER.size:
            size, number, kind = HEADER.unpack_from(rest)
            end = HEADER.size + size
            if len(rest) < end:
                return
            answer = bytes(rest[HEADER.size : end])
            del rest[:end]
            kind = kind.rstrip(b"\0")
            if kind == DIED:
                self._ended_with(answer)
                self._transport.abort()
                return
            self._answer(number, kind, answer)

    def _answer(self, number: int, kind: bytes, answer: bytes) -> None:
        self._unanswered.pop(number, None)
        waiting = self._waiting.pop(number, None)
        if waiting is None or waiting.done():
            return
        try:
            value = None if kind == OPENED else self._decode(kind, answer)
        except Exception as error:
            waiting.set_exception(error)
        else:
            waiting.set_result(value)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        trailer = bytes(self._rest[-TRAILER:])
        if len(trailer) == TRAILER and HEADER.unpack_from(trailer)[2].rstrip(b"\0") == DIED:
            # It stands behind a frame that broke off.
            self._ended_with(trailer[HEADER.size :])
        if not self._ended.done():
            self._ended.set_result(None)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self.crashed())
        self._waiting.clear()
        self._unanswered.clear()

    def _ended_with(self, status: bytes) -> None:
        self.reason = how_it_ended(STATUS.unpack(status)[0])
        self.lost = True


def how_it_ended(status: int) -> str:
    """A wait status in words."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
