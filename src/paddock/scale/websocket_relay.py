"""Relays a WebSocket between a client and a host: bytes pass through without being decoded.

Only the frame boundaries are tracked. When a host vanishes, the gateway can then send the client an error frame,
which must not start in the middle of another frame.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from websockets.frames import Frame, Opcode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CLOSE_SECONDS = 1.0
MAX_EARLY_BYTES = 1024 * 1024
MAX_REASON_BYTES = 120


def text_frame(payload: bytes) -> bytes:
    return Frame(Opcode.TEXT, payload).serialize(mask=False)


def close_frame(code: int, reason: str) -> bytes:
    payload = code.to_bytes(2, "big") + reason.encode()[:MAX_REASON_BYTES]
    return Frame(Opcode.CLOSE, payload).serialize(mask=False)


class FrameTracker:
    """Tracks the boundaries of unmasked frames in a stream of bytes."""

    __slots__ = ("_head", "_left", "closed")

    def __init__(self) -> None:
        self.closed = False
        """Whether a close frame was seen."""
        self._left = 0
        self._head = b""

    @property
    def is_between_frames(self) -> bool:
        return self._left == 0 and not self._head

    def feed(self, data: bytes) -> None:
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
            self.closed = self.closed or head[0] & 0x0F == Opcode.CLOSE
            self._left = length if length < 126 else int.from_bytes(head[2:size], "big")
            self._head = b""
            at += size - have


class HostSocket(asyncio.Protocol):
    """The socket between the gateway and a host. Sends `request` (the handshake) first, then relays both ways."""

    transport: asyncio.Transport

    def __init__(self, client: ClientSocket, request: bytes, *, keep_answer: bool) -> None:
        self._client = client
        self._request = request
        self._frames = FrameTracker()
        self._answer: bytes | None = b""
        """The first bytes of the host's answer to the handshake; None once it is complete."""
        self._keep_answer = keep_answer
        self.accepted: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._answer is not None:
            data = self._read_answer(data)
        if data:
            self._frames.feed(data)
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
        self._client.on_host_closed(may_send=self._frames.is_between_frames and not self._frames.closed)

    def pause_writing(self) -> None:
        self._client.transport.pause_reading()

    def resume_writing(self) -> None:
        self._client.transport.resume_reading()


class ClientSocket(asyncio.Protocol):
    """The socket between a client and the gateway. Buffers what arrives before there is a host."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.host: HostSocket | None = None
        self.key = ""
        self._early_data = bytearray()
        self._is_lost = False
        self.closing_frames: Callable[[], Awaitable[bytes]] | None = None
        """Returns the frames for a client whose host closed without a close frame. None: send nothing."""
        self._closing: asyncio.Task[None] | None = None

    async def connect_host(
        self, address: tuple[str, int], request: bytes, *, keep_answer: bool, timeout: float
    ) -> bytes:
        """Connect to a host, send the handshake `request`, and relay everything from then on.

        With `keep_answer` the client gets the host's answer. Without it the gateway has answered the client already.
        Raises OSError or TimeoutError.
        """
        loop = asyncio.get_running_loop()
        side: HostSocket | None = None
        try:
            async with asyncio.timeout(timeout):
                _, side = await loop.create_connection(
                    lambda: HostSocket(self, request, keep_answer=keep_answer), *address
                )
                head = await side.accepted
        except BaseException:
            if side is not None:
                side.transport.abort()
            raise
        if self._is_lost:
            side.transport.close()
            return head
        self.host = side
        if self._early_data:
            side.transport.write(bytes(self._early_data))
            self._early_data.clear()
            self.transport.resume_reading()
        return head

    def send_and_close(self, *frames: bytes) -> None:
        """Send the last frames, and close after a second, so that the client can read them."""
        if not self._is_lost:
            self.transport.write(b"".join(frames))
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self.transport.close)

    def on_host_closed(self, *, may_send: bool) -> None:
        """The host's socket is closed. `may_send`: a frame can still be sent to the client."""
        if self._is_lost:
            return
        self.host = None
        if may_send and self.closing_frames is not None:
            self._closing = asyncio.get_running_loop().create_task(self._close_with(self.closing_frames()))
        else:
            self.transport.close()

    async def _close_with(self, closing_frames: Awaitable[bytes]) -> None:
        frames = await closing_frames
        if frames:
            self.send_and_close(frames)
        else:
            self.transport.close()

    def drop_host(self) -> None:
        """The host is lost, although its socket is still open."""
        if self.host is not None:
            self.host.transport.abort()

    # -- Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.host is not None:
            self.host.transport.write(data)
            return
        self._early_data += data
        if len(self._early_data) > MAX_EARLY_BYTES:
            self.transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if self.host is not None:
            self.host.transport.close()

    def pause_writing(self) -> None:
        if self.host is not None:
            self.host.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.host is not None:
            self.host.transport.resume_reading()
