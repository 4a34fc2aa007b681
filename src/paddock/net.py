"""A small HTTP/1.1 client connection on asyncio streams and h11: enough for JSON and for a stream of events.

It uses TCP, a Unix socket, or the streams that `connect` opens. It needs no aiohttp, so the base install has it.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import h11

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

READ_BYTES = 65536


class HttpConnection:
    """One connection, one request at a time. A connection the server has closed is opened again."""

    def __init__(
        self,
        url: str,
        headers: dict[str, str] | None = None,
        *,
        unix: str | None = None,
        connect: Callable[[], Awaitable[Streams]] | None = None,
        max_body_bytes: int | None = None,
    ) -> None:
        """A body of more than `max_body_bytes` raises OSError."""
        self._parts = urlsplit(url)
        self._unix = unix
        self._open = connect
        self._max_body_bytes = max_body_bytes
        self._headers = headers or {}
        self._streams: Streams | None = None
        self._protocol = h11.Connection(h11.CLIENT)
        self._lock = asyncio.Lock()
        self.has_sent = False
        """Whether anything of the last request was sent, so that the server may act on it."""

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (names in lower case) and body. Raises OSError if there is no server."""
        async with self._lock:
            fresh, self.has_sent = self._streams is None, False
            try:
                return await self._exchange(method, path, body, headers or {})
            except (OSError, h11.RemoteProtocolError):
                # A kept connection may have been closed while idle; a fresh one that fails has failed.
                await self._drop()
                if fresh or method != "GET":
                    raise
                return await self._exchange(method, path, body, headers or {})
            except BaseException:
                await self._drop()
                raise

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        """The body of a GET, piece by piece as it comes. The connection is of no use afterwards.
        Raises OSError if there is no server, or if it does not answer with 200."""
        async with self._lock:
            try:
                reader = await self._send("GET", path, b"", {})
                while True:
                    answer = self._protocol.next_event()
                    if answer is h11.NEED_DATA:
                        self._protocol.receive_data(await reader.read(READ_BYTES))
                    elif isinstance(answer, h11.Response) and answer.status_code != 200:
                        raise ConnectionError(f"{path} answered with status {answer.status_code}")
                    elif isinstance(answer, h11.Data):
                        yield bytes(answer.data)
                    elif isinstance(answer, h11.EndOfMessage | h11.ConnectionClosed):
                        return
            finally:
                await self._drop()

    def abandon(self) -> None:
        """Cut the connection without waiting."""
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].transport.abort()

    async def close(self) -> None:
        """Close the connection. The next request opens a new one."""
        await self._drop()

    async def _exchange(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        reader = await self._send(method, path, body, headers)
        status, received, parts, size = 0, {}, [], 0
        while True:
            answer = self._protocol.next_event()
            if answer is h11.NEED_DATA:
                self._protocol.receive_data(await reader.read(READ_BYTES))
            elif isinstance(answer, h11.Response):
                status = answer.status_code
                received = {name.decode(): value.decode("latin-1") for name, value in answer.headers}
            elif isinstance(answer, h11.Data):
                parts.append(bytes(answer.data))
                size += len(answer.data)
                if self._max_body_bytes is not None and size > self._max_body_bytes:
                    raise ConnectionError(f"{path} answered with more than {self._max_body_bytes} bytes")
            elif isinstance(answer, h11.EndOfMessage):
                break
            elif isinstance(answer, h11.ConnectionClosed):
                raise ConnectionResetError("the server closed the connection")
        if self._protocol.our_state is h11.MUST_CLOSE:
            await self._drop()
        else:
            self._protocol.start_next_cycle()
        return status, received, b"".join(parts)

    async def _send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> asyncio.StreamReader:
        reader, writer = await self._connected()
        fields = {"host": self._parts.netloc, "content-length": str(len(body)), **self._headers, **headers}
        if body:
            fields.setdefault("content-type", "application/json")
        target = f"{self._parts.path.rstrip('/')}{path}"
        request = h11.Request(method=method, target=target, headers=list(fields.items()))
        self.has_sent = True
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(self._protocol.send(event) or b"")
        await writer.drain()
        return reader

    async def _connected(self) -> Streams:
        if self._streams is not None and (self._streams[0].at_eof() or self._streams[1].is_closing()):
            await self._drop()
        if self._streams is None:
            self._streams = await self._connect()
            self._protocol = h11.Connection(h11.CLIENT)
        return self._streams

    async def _connect(self) -> Streams:
        if self._open is not None:
            return await self._open()
        if self._unix is not None:
            return await asyncio.open_unix_connection(self._unix)
        secure = self._parts.scheme == "https"
        port = self._parts.port or (443 if secure else 80)
        context = ssl.create_default_context() if secure else None
        return await asyncio.open_connection(self._parts.hostname, port, ssl=context)

    async def _drop(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
