"""Forwards HTTP requests to the worker that keeps their session, over its Unix socket.

A request is forwarded byte for byte: header values may hold any byte, a path any percent-encoding, a header may be
repeated. Delivery is retried until a deadline. Then the answer is "try again later" as long as the worker lives. Only
when it has ended, the answer is that its sessions are lost.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any

import h11

from paddock.errors import HostLost, PaddockError, WorkerUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from paddock.server.workers import WorkerTable

    Headers = list[tuple[bytes, bytes]]

CHUNK = 65536
DELIVERY_SECONDS = 5.0
"""How long a request waits for a worker that accepts no connection."""
STALLED_SECONDS = 60.0
"""A worker whose event loop is blocked for so long will not answer."""
RETRY_SECONDS = 0.02
EXIT_NOTICE_SECONDS = 0.5
"""The worker manager notices the end of a worker sooner."""
IDLE_SECONDS = 30.0
"""A connection that was idle for longer is not used again: the worker closes it after 75 s."""


class NotReached(ConnectionError):
    """Another worker accepts no connection: nothing was sent to it."""


CONNECTION_ERRORS = (OSError, h11.RemoteProtocolError)


class WorkerConnection:
    """One HTTP/1.1 connection to another worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._protocol = h11.Connection(h11.CLIENT)
        self.used_at = time.monotonic()

    @classmethod
    async def open(cls, path: str) -> WorkerConnection:
        """Raises NotReached: BlockingIOError is its cause if the worker only has too many connections to accept."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(path)
            return cls(*await asyncio.open_unix_connection(sock=connection))
        except OSError as error:
            connection.close()
            raise NotReached(str(error)) from error

    async def send(self, method: str, target: bytes, headers: Headers, body: bytes) -> h11.Response:
        request = h11.Request(method=method, target=target, headers=headers)
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            self._writer.write(self._protocol.send(event) or b"")
        await self._writer.drain()
        while not isinstance(answer := await self._next(), h11.Response):
            pass
        return answer

    async def body(self) -> AsyncIterator[bytes]:
        while not isinstance(piece := await self._next(), h11.EndOfMessage):
            if isinstance(piece, h11.Data):
                yield bytes(piece.data)

    async def _next(self) -> Any:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            self._protocol.receive_data(await self._reader.read(CHUNK))
        if isinstance(event, h11.ConnectionClosed):
            raise ConnectionResetError("the worker closed the connection")
        return event

    def is_usable(self) -> bool:
        """Whether another request may be sent over it. Prepares for that."""
        if self._reader.at_eof() or self._writer.is_closing() or time.monotonic() - self.used_at > IDLE_SECONDS:
            return False
        if self._protocol.our_state is h11.DONE and self._protocol.their_state is h11.DONE:
            self._protocol.start_next_cycle()
        return self._protocol.our_state is h11.IDLE

    def close(self) -> None:
        self._writer.close()


class WorkerConnections:
    """Connections to the other workers."""

    def __init__(self, folder: Path, table: WorkerTable) -> None:
        self._folder = folder
        self._table = table
        self._idle: dict[int, list[WorkerConnection]] = {}

    async def take(self, worker: int) -> WorkerConnection:
        """A connection to a worker that responds. Raises NotReached, or WorkerUnavailable at the deadline."""
        deadline = time.monotonic() + DELIVERY_SECONDS
        while True:
            if self._table.is_responsive(worker):
                idle = self._idle.setdefault(worker, [])
                while idle:
                    if (connection := idle.pop()).is_usable():
                        return connection
                    connection.close()
            try:
                opened = await WorkerConnection.open(str(self._folder / f"{worker}.http"))
                if self._table.is_responsive(worker):
                    return opened
                opened.close()
            except NotReached as error:
                if not isinstance(error.__cause__, BlockingIOError):
                    raise
            if time.monotonic() > deadline:
                message = "the worker that keeps this session does not answer, the call was not carried out"
                raise WorkerUnavailable(message, hint="try again: the session is still there")
            await asyncio.sleep(RETRY_SECONDS)

    def put_back(self, worker: int, connection: WorkerConnection) -> None:
        connection.used_at = time.monotonic()
        self._idle.setdefault(worker, []).append(connection)

    async def wait_until_stalled(self, worker: int) -> None:
        while not self._table.is_silent(worker, STALLED_SECONDS):
            await asyncio.sleep(1.0)

    async def explain(self, worker: int, generation: int, error: Exception) -> PaddockError:
        """The error for a call that broke off: has the worker of that `generation` ended, or only the connection?"""
        if isinstance(error, NotReached):
            message = f"the worker that keeps this session cannot be reached, the call was not carried out: {error}"
            return HostLost(message, hint="its sessions are lost with a worker; open a new one")
        deadline = time.monotonic() + EXIT_NOTICE_SECONDS
        while self._table.generation(worker) == generation:
            if time.monotonic() > deadline:
                message = f"the connection to the worker broke off, the call may have been carried out: {error}"
                return WorkerUnavailable(message, hint="ask for the state before you call again")
            await asyncio.sleep(RETRY_SECONDS)
        message = f"the worker that keeps this session broke off, the call may have been carried out: {error}"
        return HostLost(message, hint="its sessions are lost with a worker; open a new one")
