"""An environment whose methods run in a child process, at the other end of a channel.

Its process may end at any time. Then all requests fail with EnvironmentCrashed, until `reopen` gets another process.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

from paddock.errors import EnvironmentCrashed, EnvironmentFailure, StepTimeout
from paddock.protocol.redact import redact
from paddock.sessions.isolation.channel import SessionChannel, describe_exit
from paddock.sessions.isolation.host import DIED, HEADER, OPENED, STATUS, receive_exactly

if TYPE_CHECKING:
    import socket

    from paddock.sessions.isolation.process import HostProcess

logger = logging.getLogger("paddock.sessions")

CLOSE_SECONDS = 10.0
"""How long the environment's own `close` may take."""
HUNG_CLOSE_SECONDS = 1.0
"""The same, when an abandoned call still runs."""
STOP_SECONDS = 1.0
"""How long an async call may take to end after it was cancelled."""


class RemoteEnvironment:
    """Base of all environments in child processes: one channel, connected with the first request."""

    process: HostProcess
    _channel: SessionChannel | None = None
    _number = 0
    _socket: socket.socket | None = None
    """The socket of a session that is open already, until the channel takes it over."""
    _opening: asyncio.Lock | None = None
    _is_hung = False

    def decode(self, kind: bytes, data: bytes) -> Any:
        """The value of a response. Raises the error that it encodes."""
        raise NotImplementedError

    @property
    def is_lost(self) -> bool:
        return self._channel is not None and self._channel.is_lost

    async def request(self, kind: bytes, data: bytes, *, stoppable: bool = False) -> Any:
        """Send a request and wait for its response. Raises EnvironmentCrashed, or what `decode` raises."""
        channel = self._channel or await self._connect()
        try:
            return await channel.request(kind, data, stoppable=stoppable)
        except EnvironmentCrashed:
            if self._is_hung:
                message = "the environment's process was ended: a call in it did not return by its deadline"
                raise EnvironmentCrashed(message, hint="reset begins a new episode in a new process") from None
            raise

    async def reopen(self) -> None:
        """Open a session in a new process, if the present one has ended."""
        if self.is_lost:
            self._channel, self._is_hung = None, False
            await self._connect()

    async def _connect(self) -> SessionChannel:
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._channel is None and self._socket is not None:
                session_socket, self._socket = self._socket, None
                self._channel = await SessionChannel.connect(session_socket, self.decode)
            if self._channel is None:
                self._number, session_socket = await asyncio.to_thread(self.process.open)
                channel = await SessionChannel.connect(session_socket, self.decode)
                try:
                    await channel.request(b"open", b"")
                except BaseException:
                    self.process.kill(self._number)
                    await channel.close(0)
                    raise
                self._channel = channel
            return self._channel

    def enforce_deadline(self, seconds: float) -> None:
        """Kill the process if an abandoned call still runs after `seconds`.

        A call that was cancelled in the child gets `STOP_SECONDS` more.
        """
        channel = self._channel
        if channel is None or channel.is_lost:
            return
        for number, stoppable in channel.unanswered().items():
            extra = STOP_SECONDS if stoppable else 0.0
            channel.loop.call_later(seconds + extra, self._kill_if_given_up, channel, number)

    def _kill_if_given_up(self, channel: SessionChannel, number: int) -> None:
        if channel is self._channel and channel.is_given_up(number):
            self._kill()

    def _kill(self) -> None:
        self._is_hung = True
        logger.warning("a call hangs: ending the process of its environment")
        self.process.kill(self._number)

    async def close(self) -> None:
        if self._socket is not None:
            # It was never used: the child closes the environment when its socket is closed.
            self._socket.close()
            self._socket = None
        channel = self._channel
        if channel is None or channel.is_lost:
            return
        if channel.loop is not asyncio.get_running_loop():
            self.process.kill(self._number)
            return
        seconds = HUNG_CLOSE_SECONDS if channel.unanswered() else CLOSE_SECONDS
        if not await channel.close(seconds):
            logger.warning("the environment was not closed within %g s: ending its process", seconds)
            self.process.kill(self._number)


def open_blocking(process: HostProcess, seconds: float | None) -> tuple[int, socket.socket]:
    """Open a session and wait until its environment is built. Returns its number and its socket.

    Blocks, so it is called on a thread.

    Raises what the constructor raised (an exception of the same name), EnvironmentCrashed or StepTimeout.
    """
    number, session_socket = process.open()
    try:
        session_socket.settimeout(seconds)
        session_socket.sendall(HEADER.pack(0, 0, b"open"))
        size, _, kind = HEADER.unpack(receive_exactly(session_socket, HEADER.size))
        data = receive_exactly(session_socket, size)
        if kind.rstrip(b"\0") == OPENED:
            return number, session_socket
    except TimeoutError:
        process.kill(number)
        session_socket.close()
        raise StepTimeout(f"the environment was not built within {seconds} s", hint="raise --step-timeout") from None
    except (OSError, EOFError) as error:
        session_socket.close()
        raise EnvironmentCrashed(f"the environment's process ended while it was built: {error}") from None
    session_socket.close()
    if kind.rstrip(b"\0") == DIED:
        why = describe_exit(STATUS.unpack(data)[0])
        raise EnvironmentCrashed(f"the environment's process ended while it was built: {why}")
    failure = json.loads(data)
    raise type(str(failure["type"]), (Exception,), {})(failure["message"])


def read_failure(data: bytes) -> EnvironmentFailure:
    """The EnvironmentFailure for a `failed` response, with secrets masked."""
    failure = json.loads(data)
    name, text = str(failure["type"]), redact(str(failure["message"]))
    return EnvironmentFailure(f"{name}: {text}" if text else name, error_type=name)
