"""Writes the answers of one loop iteration together.

Every answer wakes a client, and a client that wakes needs a core. Where server and clients share a machine, a client
that is woken after each step takes the core from the next step; clients that are woken together do not.

Measured gain: a fifth with 16 and 128 sessions that step inline.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING

from picows import WSMsgType

from paddock.server.fastpath.threads import MAX_BATCH_ANSWERS, MAX_HELD_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sized

    from picows import WSTransport

TEXT = WSMsgType.TEXT
MAX_HELD_BYTES = 65536
"""More are not held back: the transport has to count them, so that it can apply backpressure to a slow reader."""
COPIED_BYTES = 8192
"""picows copies frames up to this size. It gives the header of a larger one to the transport as a view of a buffer
that the next frame overwrites. If the transport has to keep it, the client reads a wrong length."""
FINAL_TEXT, MEDIUM_LENGTH, LONG_LENGTH = 0x81, 126, 127
MAX_MEDIUM_FRAME_BYTES = 0xFFFF
_SMALL_HEADERS = [bytes((FINAL_TEXT, size)) for size in range(MEDIUM_LENGTH)]

logger = logging.getLogger("paddock.server")


class BatchWriter:
    """One server's, for its connections. Used on its loop only."""

    def __init__(self, connections: Sized) -> None:
        self._connections = connections
        self._frames: list[tuple[WSTransport, bytes]] = []
        self._bytes = 0
        self._since = 0.0
        self._loop = asyncio.get_running_loop()

    def put(self, transport: WSTransport, message: bytes) -> None:
        """Send it, at the end of this iteration at the latest."""
        frames = self._frames
        if len(self._connections) == 1 and not frames:
            send_text(transport, message)
            return
        frames.append((transport, message))
        self._bytes += len(message)
        if len(frames) == 1:
            self._since = monotonic()
            self._loop.call_soon(self.flush)
        if (
            self._bytes >= MAX_HELD_BYTES
            or len(frames) >= MAX_BATCH_ANSWERS
            or monotonic() - self._since > MAX_HELD_SECONDS
        ):
            self.flush()

    def flush(self) -> None:
        """Send what is held."""
        frames, self._frames, self._bytes = self._frames, [], 0
        for transport, message in frames:
            try:
                send_text(transport, message)
            except Exception:
                logger.exception("an answer could not be sent")


def send_text(transport: WSTransport, message: bytes) -> None:
    """Write one text frame."""
    if len(message) <= COPIED_BYTES:
        transport.send(TEXT, message)
    elif not (transport.is_close_frame_sent or transport.is_disconnected):
        transport.underlying_transport.writelines((frame_header(len(message)), message))


def frame_header(size: int) -> bytes:
    """The header of a server's frame with a whole text message of `size` bytes."""
    if size < MEDIUM_LENGTH:
        return _SMALL_HEADERS[size]
    if size <= MAX_MEDIUM_FRAME_BYTES:
        return bytes((FINAL_TEXT, MEDIUM_LENGTH, size >> 8, size & 0xFF))
    return bytes((FINAL_TEXT, LONG_LENGTH)) + size.to_bytes(8, "big")


def frame_with(message: bytes) -> bytes:
    """A server's frame with a message of at most `MAX_MEDIUM_FRAME_BYTES` bytes."""
    return frame_header(len(message)) + message
