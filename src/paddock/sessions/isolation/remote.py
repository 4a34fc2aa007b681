"""An environment whose methods run in a child process, at the other end of a link.

Its process may end at any time. Then all requests fail with EnvironmentCrashed, until `reopen` gets another one.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

from paddock.errors import EnvironmentCrashed, EnvironmentFailure, StepTimeout
from paddock.protocol.redact import redact
from paddock.sessions.isolation.host import DIED, HEADER, OPENED, STATUS
from paddock.sessions.isolation.link import Link, how_it_ended

if TYPE_CHECKING:
    import socket

    from paddock.sessions.isolation.process import Process

logger = logging.getLogger("paddock.sessions")

CLOSE_SECONDS = 10.0
"""How long the environment's own `close` may take."""
HUNG_CLOSE_SECONDS = 1.0
"""The same, when a call is still under way that nobody waits for."""
STOP_SECONDS = 1.0
"""How long an async call may take to stop, once it was asked to."""


class RemoteEnvironment:
    """What all environments in child processes share: one link, opened when it is first needed."""

    process: Process
    _link: Link | None = None
    _number = 0
    _end: socket.socket | None = None
    """The socket of a session that is open already, until the link takes it."""
    _opening: asyncio.Lock | None = None
    _is_hung = False

    def decode(self, kind: bytes, data: bytes) -> Any:
        raise NotImplementedError

    @property
    def is_lost(self) -> bool:
        return self._link is not None and self._link.lost

    async def send(self, kind: bytes, data: bytes, *, stoppable: bool = False) -> Any:
        link = self._link or await self._opened()
        try:
            return await link.ask(kind, data, stoppable=stoppable)
        except EnvironmentCrashed:
            if self._is_hung:
                message = "the environment's process was ended: a call in it did not return by its deadline"
                raise EnvironmentCrashed(message, hint="reset begins a new episode in a new process") from None
            raise

    async def reopen(self) -> None:
        """Get another process, if the one there was has ended."""
        if self.is_lost:
            self._link, self._is_hung = None, False
            await self._opened()

    async def _opened(self) -> Link:
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._link is None and self._end is not None:
                end, self._end = self._end, None
                self._link = await Link.over(end, self.decode)
            if self._link is None:
                self._number, end = await asyncio.to_thread(self.process.open)
                link = await Link.over(end, self.decode)
                try:
                    await link.ask(b"open", b"")
                except BaseException:
                    self.process.kill(self._number)
                    await link.close(0)
                    raise
                self._link = link
            return self._link

    def end_given_up(self, seconds: float) -> None:
        """Nobody waits for a call any more, whose deadline is in `seconds`: if it is still under way then, its
        process is ended. One that can be stopped gets a moment more for it."""
        link = self._link
        if link is None or link.lost:
            return
        for number, stoppable in link.unanswered().items():
            moment = STOP_SECONDS if stoppable else 0.0
            link.loop.call_later(seconds + moment, self._kill_if_given_up, link, number)

    def _kill_if_given_up(self, link: Link, number: int) -> None:
        if link is self._link and link.is_given_up(number):
            self._kill()

    def _kill(self) -> None:
        self._is_hung = True
        logger.warning("a call hangs: ending the process of its environment")
        self.process.kill(self._number)

    async def close(self) -> None:
        if self._end is not None:
            # Nobody has used it: the other side closes it when it sees this.
            self._end.close()
            self._end = None
        link = self._link
        if link is None or link.lost:
            return
        if link.loop is not asyncio.get_running_loop():
            self.process.kill(self._number)
            return
        seconds = HUNG_CLOSE_SECONDS if link.unanswered() else CLOSE_SECONDS
        if not await link.close(seconds):
            logger.warning("the environment was not closed within %g s: ending its process", seconds)
            self.process.kill(self._number)


def open_blocking(process: Process, seconds: float | None) -> tuple[int, socket.socket]:
    """On a thread: a session whose environment is built, and its number.

    Raises what the constructor raised (an exception of the same name), EnvironmentCrashed or StepTimeout.
    """
    number, end = process.open()
    try:
        end.settimeout(seconds)
        end.sendall(HEADER.pack(0, 0, b"open"))
        size, _, kind = HEADER.unpack(_exactly(end, HEADER.size))
        data = _exactly(end, size)
        if kind.rstrip(b"\0") == OPENED:
            return number, end
    except TimeoutError:
        process.kill(number)
        end.close()
        raise StepTimeout(f"the environment was not built within {seconds} s", hint="raise --step-timeout") from None
    except (OSError, EOFError) as error:
        end.close()
        raise EnvironmentCrashed(f"the environment's process ended while it was built: {error}") from None
    end.close()
    if kind.rstrip(b"\0") == DIED:
        why = how_it_ended(STATUS.unpack(data)[0])
        raise EnvironmentCrashed(f"the environment's process ended while it was built: {why}")
    failure = json.loads(data)
    raise type(str(failure["type"]), (Exception,), {})(failure["message"])


def failure_of(data: bytes) -> EnvironmentFailure:
    """What a child says of an exception, as ours."""
    failure = json.loads(data)
    name, text = str(failure["type"]), redact(str(failure["message"]))
    return EnvironmentFailure(f"{name}: {text}" if text else name, error_type=name)


def _exactly(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = end.recv(size - len(data))
        if not piece:
            raise EOFError("its connection broke off")
        data += piece
    return data
