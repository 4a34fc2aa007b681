"""A connection's socket, read by a thread for a while instead of the loop's transport."""

from __future__ import annotations

import os
import select
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from websockets.frames import apply_mask  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from asyncio import Transport

MOST = 16384
"""What is larger is left to the loop, which reads on."""
AWAKE = 0.0002
"""How long a thread waits for a quick client without falling asleep, in seconds."""
CAN_SPARE_A_CORE = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1
WHOLE_TEXT, MASKED, MEDIUM = 0x81, 0x80, 126


class Owner(Protocol):
    """The connection, as its line sees it."""

    heard: bool
    is_full: bool
    """Whether the client leaves its answers unread, so that no more of its requests are read."""


class SocketLine:
    """Lends the socket of a transport whose protocol has read all of what came before."""

    def __init__(self, owner: Owner, transport: Transport, limit: int) -> None:
        self._owner = owner
        self._transport: Any = transport
        self._descriptor: int = transport.get_extra_info("socket").fileno()
        self._most = min(MOST, limit)
        self.is_lent = False
        self._bell = -1
        """Rung to wake the thread."""
        self._poll: select.poll
        self._has_ended = False
        self._is_quick = False
        """Whether the client's last request came within `AWAKE`."""

    def lend(self) -> None:
        self.is_lent = True
        self._transport.pause_reading()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._poll.register(self._bell, select.POLLIN)
        self._has_ended = False

    def wait(self) -> None:
        began = monotonic()
        events = self._wait_awake(began + AWAKE) if self._is_quick else []
        if not events:
            events = self._poll.poll()
        self._is_quick = CAN_SPARE_A_CORE and monotonic() - began < AWAKE
        self._has_ended = any(event & ~select.POLLIN for _, event in events)

    def _wait_awake(self, until: float) -> list[tuple[int, int]]:
        """To fall asleep and be woken takes longer than a client that is on its way already."""
        events: list[tuple[int, int]] = []
        while not events and monotonic() < until:
            events = self._poll.poll(0)
        return events

    def wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def read(self) -> bytes | None:
        self._owner.heard = True
        try:
            return b"" if self._has_ended else os.read(self._descriptor, self._most)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def end(self) -> None:
        os.close(self._bell)

    def take_back(self, unread: bytes) -> None:
        self.is_lent = False
        if self._transport.is_closing():
            return
        if not self._owner.is_full:
            # It begins with the next turn of the loop, so what is unread comes first.
            self._transport.resume_reading()
        if unread:
            self._transport.get_protocol().data_received(unread)


def whole_text(data: bytes) -> bytes | None:
    """The text message that `data` is, if it is a single one in one masked frame, and all of it."""
    size = len(data)
    if size < 6 or data[0] != WHOLE_TEXT:
        return None
    length, begins = data[1] - MASKED, 6
    if length == MEDIUM and size >= 8:
        length, begins = data[2] << 8 | data[3], 8
    elif not 0 <= length < MEDIUM:
        return None
    if size != begins + length:
        return None
    return apply_mask(data[begins:], data[begins - 4 : begins])
