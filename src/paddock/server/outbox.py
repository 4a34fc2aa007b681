"""Answers that the loop has written, on their way out: those of one turn leave together.

Every answer wakes a client, and a client that wakes wants a core. Where server and clients share a machine, one that
is woken after each step takes the core from the next; many that are woken together do not.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING

from picows import WSMsgType

from paddock.server.plain_frame import head_of
from paddock.sessions.jobs import HELD_SECONDS, TOGETHER

if TYPE_CHECKING:
    from collections.abc import Sized

    from picows import WSTransport

TEXT = WSMsgType.TEXT
MOST_BYTES = 65536
"""More are not kept back: the transport has to count them, so that it can stop the requests of a slow reader."""
logger = logging.getLogger("paddock.server")


COPIED = 8192
"""picows copies frames up to this size. It gives the head of a larger one to the transport as a view of a buffer that
the next frame overwrites, so where the transport has to keep it, the client reads a wrong length."""


def send_text(transport: WSTransport, frame: bytes) -> None:
    """Write one text frame."""
    if len(frame) <= COPIED:
        transport.send(TEXT, frame)
    elif not (transport.is_close_frame_sent or transport.is_disconnected):
        transport.underlying_transport.writelines((head_of(len(frame)), frame))


class Outbox:
    """One server's, for its connections. Used on its loop only."""

    def __init__(self, connections: Sized) -> None:
        self._connections = connections
        self._frames: list[tuple[WSTransport, bytes]] = []
        self._bytes = 0
        self._since = 0.0
        self._loop = asyncio.get_running_loop()

    def put(self, transport: WSTransport, frame: bytes) -> None:
        """Send it, at the end of this turn at the latest."""
        frames = self._frames
        if len(self._connections) == 1 and not frames:
            send_text(transport, frame)
            return
        frames.append((transport, frame))
        self._bytes += len(frame)
        if len(frames) == 1:
            self._since = monotonic()
            self._loop.call_soon(self.empty)
        if self._bytes >= MOST_BYTES or len(frames) >= TOGETHER or monotonic() - self._since > HELD_SECONDS:
            self.empty()

    def empty(self) -> None:
        """Send what is there."""
        frames, self._frames, self._bytes = self._frames, [], 0
        for transport, frame in frames:
            try:
                send_text(transport, frame)
            except Exception:
                logger.exception("an answer could not be sent")
