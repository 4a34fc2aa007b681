"""Backpressure for one WebSocket: when its next request may be executed.

Invariant: the server does not execute for a peer that does not read. Once the transport holds more unsent bytes than
its high-water mark, no further request of the connection begins, and its socket is not read. So the memory of a
connection is bounded by the mark, the answers of requests that were running already, and the requests that had been
read: at most one read buffer of messages, and the conversation's own bounded backlog. The last holds in the other
direction too: a conversation whose backlog is full stops the reading of its socket.

Knows nothing of frames or sessions.
"""

from __future__ import annotations

import fcntl
import logging
import sys
import termios
from collections import deque
from typing import Any, Protocol

HIGH_WATER = 65536
"""Unsent bytes of answers above which nothing more is executed, where no transport counts them."""
LOW_WATER = 16384
MESSAGE_OVERHEAD_BYTES = 64
"""What a queued message costs beside its bytes."""

TOO_MANY = "too many requests without reading an answer"

logger = logging.getLogger("paddock.server")


def count_unread(transport: Any) -> int:
    """How many bytes a peer has not received of what was written, including those in the kernel's buffer.

    The kernel may hold megabytes, for which a slow peer needs seconds."""
    in_kernel = 0
    connection = transport.get_extra_info("socket")
    if sys.platform == "linux" and connection is not None and connection.fileno() >= 0:
        size = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4)
        in_kernel = int.from_bytes(size, sys.byteorder)
    return int(transport.get_write_buffer_size()) + in_kernel


class RequestHandler(Protocol):
    """The conversation: gets messages in order, one at a time."""

    def receive(self, raw: bytes) -> None: ...
    def receive_binary(self) -> None: ...
    def resume(self) -> None:
        """The peer reads again: continue with what was received and not begun."""


class ReadableTransport(Protocol):
    """The transport, whose reading can be paused."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...


class FlowControl:
    """Pauses and resumes one transport. Used on the loop only."""

    __slots__ = ("_conversation", "_is_delivering", "_is_full", "_limit", "_queue", "_queued_bytes", "can_write",
                 "has_ended", "is_paused", "transport")  # fmt: skip

    def __init__(self, conversation: RequestHandler, limit: int) -> None:
        self._conversation = conversation
        self._limit = limit
        self._queue: deque[bytes | None] = deque()
        self._queued_bytes = 0
        self._is_full = False
        self._is_delivering = False
        self.transport: ReadableTransport | None = None
        self.can_write = True
        """False while the peer does not read its answers."""
        self.is_paused = False
        """Whether a message that arrives now has to be queued."""
        self.has_ended = False

    def receive_message(self, message: bytes | None) -> bool:
        """Pass a message to the conversation, now or when it is not paused; None stands for a binary message.

        False if the queue is larger than the largest message may be.
        """
        if self.is_paused:
            return self._enqueue(message)
        if message is None:
            self._conversation.receive_binary()
        else:
            self._conversation.receive(message)
        return True

    def _enqueue(self, message: bytes | None) -> bool:
        """Queue a message that was read together with earlier ones."""
        if self.has_ended:
            return True
        self._queue.append(message)
        self._queued_bytes += MESSAGE_OVERHEAD_BYTES + (len(message) if message is not None else 0)
        return self._queued_bytes <= self._limit + MESSAGE_OVERHEAD_BYTES

    def pause_writing(self) -> None:
        self.can_write = False
        self._pause()

    def resume_writing(self) -> None:
        self.can_write = True
        if not self.has_ended:
            self._conversation.resume()
            self._deliver()

    def pause_requests(self) -> None:
        """The conversation's backlog is full."""
        self._is_full = True
        self._pause()

    def resume_requests(self) -> None:
        self._is_full = False
        self._deliver()

    def end(self) -> None:
        """The connection takes no more requests."""
        self.has_ended = self.is_paused = True
        self._queue.clear()

    def _pause(self) -> None:
        self.is_paused = True
        if self.transport is not None:
            self.transport.pause_reading()

    def _deliver(self) -> None:
        """Pass on the queued messages in order, until the conversation or the peer is not ready again."""
        if self._is_delivering:
            return
        self._is_delivering = True
        try:
            while self._queue and self.can_write and not self._is_full:
                message = self._queue.popleft()
                self._queued_bytes -= MESSAGE_OVERHEAD_BYTES + (len(message) if message is not None else 0)
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
