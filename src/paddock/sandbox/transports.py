"""How an owner reaches a guest: a Unix socket on this machine, a byte channel elsewhere. Knows no messages."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from paddock.errors import SandboxError
from paddock.sandbox.guest.multiplexer import MOST_UNSENT_BYTES
from paddock.sandbox.guest.transports import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.sandbox.connection import GuestConnection

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""For an orderly end of a byte channel. After that it is abandoned; its sandbox is removed anyway."""
LONGEST_PACKET = 1 << 17
MOST_DESCRIPTORS = 4


class ByteChannel(Protocol):
    """A byte stream to the guest and back, over the API of a sandbox backend."""

    async def receive(self) -> bytes:
        """The next bytes; none at the end."""

    async def send(self, data: bytes) -> None: ...

    async def close(self) -> None: ...


class GuestTransport(Protocol):
    """Carries frames for a `GuestConnection`."""

    passes_descriptors: bool

    def start(self, connection: GuestConnection) -> None: ...

    def write(self, data: bytes | memoryview, descriptors: Sequence[int] = ()) -> None:
        """Send a frame, or queue it. Raises SandboxError if that is impossible."""

    @property
    def is_congested(self) -> bool: ...

    def stop(self) -> None:
        """Receive no more. Called when the connection ends."""

    async def close(self) -> None: ...


class LocalTransport:
    """A Unix socket to a guest on this machine. Each packet is a frame, and can carry descriptors (SCM_RIGHTS)."""

    passes_descriptors = True
    is_congested = False

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._connection: GuestConnection | None = None
        connection.setblocking(False)

    def start(self, connection: GuestConnection) -> None:
        self._connection = connection
        self._loop.add_reader(self._socket.fileno(), self._receive)

    def write(self, data: bytes | memoryview, descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._socket, [data], list(descriptors))
        except BlockingIOError:
            raise SandboxError("the sandbox does not take requests any more") from None
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                hint = "write it to a file and run that"
                raise SandboxError(f"a command of {len(data)} bytes is too long", hint=hint) from None
            raise SandboxError("the sandbox has ended") from error

    def _receive(self) -> None:
        connection = self._connection
        while connection is not None and connection.is_open:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._socket, LONGEST_PACKET, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if not data:
                connection.end()
                return
            connection.receive(data, descriptors)

    def stop(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    async def close(self) -> None:
        self.stop()


class StreamTransport:
    """Frames over a `ByteChannel`. Two tasks send and receive; what is not sent yet is queued."""

    passes_descriptors = False

    def __init__(self, channel: ByteChannel) -> None:
        self._channel = channel
        self._unsent = bytearray()
        self._has_unsent = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, connection: GuestConnection) -> None:
        self._tasks = [
            asyncio.ensure_future(self._receive(connection)),
            asyncio.ensure_future(self._send(connection)),
        ]

    def write(self, data: bytes | memoryview, descriptors: Sequence[int] = ()) -> None:
        self._unsent += data
        self._has_unsent.set()

    @property
    def is_congested(self) -> bool:
        return len(self._unsent) > MOST_UNSENT_BYTES

    async def _send(self, connection: GuestConnection) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            data, self._unsent = bytes(self._unsent), bytearray()
            try:
                await self._channel.send(data)
            except (OSError, SandboxError):
                connection.end()
                return
            connection.resume_streams()

    async def _receive(self, connection: GuestConnection) -> None:
        try:
            while connection.is_open and (data := await self._channel.receive()):
                connection.receive(data, [])
        except (OSError, SandboxError) as error:
            logger.debug("the connection to a guest broke: %s", error)
        finally:
            connection.end()

    def stop(self) -> None:
        """The tasks end by themselves, or in `close`: this may be called by one of them."""

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        closing = asyncio.ensure_future(self._close_channel())
        # A channel may belong to a library that ignores cancellation: then it is abandoned.
        await asyncio.wait([closing], timeout=CLOSE_SECONDS)
        if closing.done():
            closing.result()
        else:
            closing.cancel()
            logger.warning("a connection to a sandbox did not close within %g s", CLOSE_SECONDS)

    async def _close_channel(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(OSError, SandboxError):
            await self._channel.close()


class AsyncioChannel:
    """A `ByteChannel` over a connected socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self) -> bytes:
        return await self._reader.read(4 * CHUNK_BYTES)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
