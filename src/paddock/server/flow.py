"""Backpressure for one WebSocket: when its next request may be executed.

Invariant: the server does not execute for a peer that does not read. Once the transport holds more unsent bytes than
its high-water mark, no further request of the connection begins, and its socket is not read. So the memory of a
connection is bounded by the mark, the answers of requests that were running already, and the requests that had been
read: at most one read buffer of messages, and the conversation's own bounded backlog. The last holds in the other
direction too: a conversation whose backlog is full stops the reading of its socket.

Knows nothing of frames or sessions.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

HIGH_WATER = 65536
"""Unsent bytes of answers above which nothing more is executed, where no transport counts them."""
LOW_WATER = 16384
MESSAGE_OVERHEAD = 64
"""What a held message costs beside its bytes."""

TOO_MANY = "too many requests without reading an answer"

logger = logging.getLogger("paddock.server")


class Requests(Protocol):
    """The conversation, as the flow sees it."""

    def receive(self, raw: bytes) -> None: ...
    def receive_binary(self) -> None: ...
    def resume(self) -> None:
        """The peer reads again: go on with what was received and not begun."""


class Readable(Protocol):
    """The transport, as the flow sees it."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...


class Flow:
    """Pauses and resumes one transport. Used on the loop only."""

    __slots__ = ("_conversation", "_held", "_held_bytes", "_is_delivering", "_is_full", "_limit", "can_write",
                 "has_ended", "is_paused", "transport")  # fmt: skip

    def __init__(self, conversation: Requests, limit: int) -> None:
        self._conversation = conversation
        self._limit = limit
        self._held: deque[bytes | None] = deque()
        self._held_bytes = 0
        self._is_full = False
        self._is_delivering = False
        self.transport: Readable | None = None
        self.can_write = True
        """False while the peer leaves its answers unread."""
        self.is_paused = False
        """Whether a message that comes now has to be held."""
        self.has_ended = False

    def take(self, message: bytes | None) -> bool:
        """Have a message executed, now or when it may be; None stands for a binary one.

        False if more waits than one message may have.
        """
        if self.is_paused:
            return self._hold(message)
        if message is None:
            self._conversation.receive_binary()
        else:
            self._conversation.receive(message)
        return True

    def _hold(self, message: bytes | None) -> bool:
        """It was read together with earlier ones."""
        if self.has_ended:
            return True
        self._held.append(message)
        self._held_bytes += MESSAGE_OVERHEAD + (len(message) if message is not None else 0)
        return self._held_bytes <= self._limit + MESSAGE_OVERHEAD

    def pause_writing(self) -> None:
        self.can_write = False
        self._pause()

    def resume_writing(self) -> None:
        self.can_write = True
        if not self.has_ended:
            self._conversation.resume()
            self._deliver()

    def pause_requests(self) -> None:
        """The conversation has as much as it takes."""
        self._is_full = True
        self._pause()

    def resume_requests(self) -> None:
        self._is_full = False
        self._deliver()

    def end(self) -> None:
        """The connection takes no more requests."""
        self.has_ended = self.is_paused = True
        self._held.clear()

    def _pause(self) -> None:
        self.is_paused = True
        if self.transport is not None:
            self.transport.pause_reading()

    def _deliver(self) -> None:
        """Hand over what is held, in order, until the conversation or the peer needs a pause again."""
        if self._is_delivering:
            return
        self._is_delivering = True
        try:
            while self._held and self.can_write and not self._is_full:
                message = self._held.popleft()
                self._held_bytes -= MESSAGE_OVERHEAD + (len(message) if message is not None else 0)
                if message is None:
                    self._conversation.receive_binary()
                else:
                    self._conversation.receive(message)
        except Exception:
            logger.exception("a message could not be handled")
            self.end()
            if self.transport is not None:
                self.transport.abort()
        finally:
            self._is_delivering = False
        if self.can_write and not self._is_full and not self.has_ended:
            self.is_paused = False
            if self.transport is not None:
                self.transport.resume_reading()
