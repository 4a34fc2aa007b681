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

from paddock.sessions.jobs import HELD_SECONDS, TOGETHER

if TYPE_CHECKING:
    from collections.abc import Sized

    from picows import WSTransport

TEXT = WSMsgType.TEXT
logger = logging.getLogger("paddock.server")


class Outbox:
    """One server's, for its connections. Used on its loop only."""

    def __init__(self, connections: Sized) -> None:
        self._connections = connections
        self._frames: list[tuple[WSTransport, bytes]] = []
        self._since = 0.0
        self._loop = asyncio.get_running_loop()

    def put(self, transport: WSTransport, frame: bytes) -> None:
        """Send it, at the end of this turn at the latest."""
        frames = self._frames
        if len(self._connections) == 1 and not frames:
            transport.send(TEXT, frame)
            return
        frames.append((transport, frame))
        if len(frames) == 1:
            self._since = monotonic()
            self._loop.call_soon(self.empty)
        elif len(frames) >= TOGETHER or monotonic() - self._since > HELD_SECONDS:
            self.empty()

    def empty(self) -> None:
        """Send what is there."""
        frames, self._frames = self._frames, []
        for transport, frame in frames:
            try:
                transport.send(TEXT, frame)
            except Exception:
                logger.exception("an answer could not be sent")
