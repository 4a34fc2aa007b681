"""Two sockets tied together: bytes of a WebSocket go through a door unread, but for where one frame ends.

That much is followed so that a client whose host vanishes hears why, in a frame of its own, and not in the middle
of another.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TEXT, CLOSE = 0x1, 0x8
LAST_WORDS = 1.0
MOST_EARLY_BYTES = 1024 * 1024
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def accept_key(key: str) -> str:
    """The answer to a `Sec-WebSocket-Key`."""
    return base64.b64encode(hashlib.sha1(key.encode() + _GUID).digest()).decode()


def frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """A whole, unmasked frame, as servers send them."""
    size = len(payload)
    if size < 126:
        head = bytes((0x80 | opcode, size))
    elif size < 65536:
        head = bytes((0x80 | opcode, 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 127)) + size.to_bytes(8, "big")
    return head + payload


def closing(code: int, reason: str) -> bytes:
    return frame(code.to_bytes(2, "big") + reason.encode()[:120], CLOSE)


class Frames:
    """Follows unmasked frames through a stream. `between` tells whether the last one is whole."""

    __slots__ = ("_head", "_left", "closed")

    def __init__(self) -> None:
        self.closed = False
        """Whether a goodbye went by."""
        self._left = 0
        self._head = b""

    @property
    def between(self) -> bool:
        return self._left == 0 and not self._head

    def follow(self, data: bytes) -> None:
        at, end = 0, len(data)
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
                at += step
                continue
            have = len(self._head)
            head = self._head + data[at : at + 10 - have]
            length = head[1] & 0x7F if len(head) > 1 else 0
            size = 2 if length < 126 else 4 if length == 126 else 10
            if len(head) < size:
                self._head = head
                return
            self.closed = self.closed or head[0] & 0x0F == CLOSE
            self._left = length if length < 126 else int.from_bytes(head[2:size], "big")
            self._head = b""
            at += size - have


class HostSide(asyncio.Protocol):
    """The socket between the door and a host. Says `request` first; everything after it goes to and fro."""

    transport: asyncio.Transport

    def __init__(self, client: ClientSide, request: bytes, *, keep_answer: bool) -> None:
        self._client = client
        self._request = request
        self._frames = Frames()
        self._answer: bytes | None = b""
        """What came of the host's answer to the handshake; None once it is whole."""
        self._keep_answer = keep_answer
        self.accepted: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._answer is not None:
            data = self._read_answer(data)
        if data:
            self._frames.follow(data)
            self._client.transport.write(data)

    def _read_answer(self, data: bytes) -> bytes:
        self._answer = (self._answer or b"") + data
        head, end, rest = self._answer.partition(b"\r\n\r\n")
        if not end:
            return b""
        self._answer = None
        if self._keep_answer:
            self._client.transport.write(head + end)
        if not self.accepted.done():
            self.accepted.set_result(head)
        return rest

    def connection_lost(self, error: Exception | None) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(ConnectionResetError("the host hung up during the handshake"))
            self.accepted.exception()
            return
        self._client.host_left(can_speak=self._frames.between and not self._frames.closed)

    def pause_writing(self) -> None:
        self._client.transport.pause_reading()

    def resume_writing(self) -> None:
        self._client.transport.resume_reading()


class ClientSide(asyncio.Protocol):
    """The socket between a client and the door. Keeps what comes before there is a host."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.host: HostSide | None = None
        self.key = ""
        self._early = bytearray()
        self._lost = False
        self.last_words: Callable[[], Awaitable[bytes]] | None = None
        """Finds what to say to the client when its host hangs up without a goodbye. None: nothing."""
        self._parting: asyncio.Task[None] | None = None

    async def tie(self, address: tuple[str, int], request: bytes, *, keep_answer: bool, timeout: float) -> bytes:
        """Connect to a host, shake hands there with `request`, and let everything through from then on.

        With `keep_answer` the client gets the host's answer; without it the client has had one already.
        Raises OSError or TimeoutError.
        """
        loop = asyncio.get_running_loop()
        side: HostSide | None = None
        try:
            async with asyncio.timeout(timeout):
                _, side = await loop.create_connection(
                    lambda: HostSide(self, request, keep_answer=keep_answer), *address
                )
                head = await side.accepted
        except BaseException:
            if side is not None:
                side.transport.abort()
            raise
        if self._lost:
            side.transport.close()
            return head
        self.host = side
        if self._early:
            side.transport.write(bytes(self._early))
            self._early.clear()
            self.transport.resume_reading()
        return head

    def say_goodbye(self, *frames: bytes) -> None:
        """Send some last frames, and hang up once they are read."""
        if not self._lost:
            self.transport.write(b"".join(frames))
            asyncio.get_running_loop().call_later(LAST_WORDS, self.transport.close)

    def host_left(self, *, can_speak: bool) -> None:
        """The host's socket is closed, after a goodbye or without one."""
        if self._lost:
            return
        self.host = None
        if can_speak and self.last_words is not None:
            self._parting = asyncio.get_running_loop().create_task(self._part(self.last_words()))
        else:
            self.transport.close()

    async def _part(self, words: Awaitable[bytes]) -> None:
        said = await words
        if said:
            self.say_goodbye(said)
        else:
            self.transport.close()

    def drop_host(self) -> None:
        """The host is known to be gone, though its socket has not noticed."""
        if self.host is not None:
            self.host.transport.abort()

    # -- Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.host is not None:
            self.host.transport.write(data)
            return
        self._early += data
        if len(self._early) > MOST_EARLY_BYTES:
            self.transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        if self.host is not None:
            self.host.transport.close()

    def pause_writing(self) -> None:
        if self.host is not None:
            self.host.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.host is not None:
            self.host.transport.resume_reading()
