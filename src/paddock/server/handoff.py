"""Socket hand-off between workers: an accepted WebSocket goes to the worker that keeps its session.

Invariant: a connection has exactly one owner, and it is answered before its deadline. The sender keeps the
connection until the receiver has claimed it; what cannot be sent yet (the receiver's queue is full) stays in the
sender's queue; a connection that no worker has claimed by the deadline is taken back by the sender. Only the worker
that keeps a session may say that it does not exist, so a connection for a session is never answered by anybody else,
but for "try again later".

The claim is a socket pair: the receiver writes a byte to its end, the sender shuts its own end for reading before it
takes the connection back. The kernel lets only one of the two succeed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from array import array
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger("paddock.workers")

HANDSHAKE = b"handshake "
CLAIM = b"1"
MAX_NOTE_BYTES = 200_000
"""A datagram holds no more."""
RETRY_SECONDS = 0.005
OWNER_SECONDS = 5.0
"""How long a connection waits for the worker that keeps its session. Clients wait 10 s for a handshake."""
NEWCOMER_SECONDS = 1.0
"""How long a connection that any worker could serve waits for another one."""
_REASON = b"the worker that keeps this session does not answer; try again"
TRY_LATER = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_REASON), _REASON)
)
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class HandOff:
    """One connection on its way. `on_return` is called if no worker claimed it in time."""

    def __init__(self, transport: Any, note: bytes, seconds: float, on_return: Callable[[], None]) -> None:
        self.note = note
        self._transport = transport
        self._on_return = on_return
        self._loop = asyncio.get_running_loop()
        self.claim, self._receiver_claim = socket.socketpair()
        self.claim.setblocking(False)
        # What the client sends from now on must be read by the receiver.
        transport.pause_reading()
        self.is_over = False
        self._timer = self._loop.call_later(seconds, self.settle)
        self._loop.add_reader(self.claim.fileno(), self.settle)

    def descriptors(self) -> list[int]:
        return [self._transport.get_extra_info("socket").fileno(), self._receiver_claim.fileno()]

    def close_receiver_claim(self) -> None:
        self._receiver_claim.close()

    def settle(self) -> None:
        """The receiver has claimed it, has dropped it, or the time is up."""
        if self.is_over:
            return
        self.is_over = True
        self._timer.cancel()
        self._loop.remove_reader(self.claim.fileno())
        claimed = b""
        with suppress(OSError):
            self.claim.shutdown(socket.SHUT_RD)
            claimed = self.claim.recv(1)
        self.claim.close()
        self._receiver_claim.close()
        if claimed == CLAIM:
            self._transport.abort()
        elif not self._transport.is_closing():
            self._transport.resume_reading()
            self._on_return()


class HandOffSender:
    """Datagrams to the other workers. Those that do not fit into a receiver's queue wait here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._waiting: dict[int, deque[HandOff]] = {}

    def send_note(self, worker: int, note: bytes) -> None:
        """Raises OSError, BlockingIOError if the receiver has a full queue."""
        self._socket.sendto(note, self._address(worker))

    def hand_over(self, worker: int, transport: Any, request: bytes) -> bool:
        """Give the connection of a session to the worker that keeps it; it is answered in any case."""
        if len(HANDSHAKE + request) > MAX_NOTE_BYTES:
            _answer(transport, TOO_LONG)
            return True

        def on_return() -> None:
            logger.warning("worker %d did not take a connection within %g s", worker, OWNER_SECONDS)
            _answer(transport, TRY_LATER)

        try:
            hand_off = HandOff(transport, HANDSHAKE + request, OWNER_SECONDS, on_return)
        except OSError:
            on_return()
            return True
        waiting = self._waiting.setdefault(worker, deque())
        waiting.append(hand_off)
        if len(waiting) == 1:
            self._flush(worker)
        return True

    def offer(self, worker: int, transport: Any, request: bytes, on_return: Callable[[], None]) -> bool:
        """Give a connection without a session to a worker with a lower load. False if that worker's queue is full."""
        if self._waiting.get(worker) or len(HANDSHAKE + request) > MAX_NOTE_BYTES:
            return False
        try:
            hand_off = HandOff(transport, HANDSHAKE + request, NEWCOMER_SECONDS, on_return)
        except OSError:
            return False
        if not self._send(worker, hand_off):
            # It was not sent: settle it at once, and serve it here.
            hand_off.settle()
        return True

    def _flush(self, worker: int) -> None:
        waiting = self._waiting[worker]
        while waiting and (waiting[0].is_over or self._send(worker, waiting[0])):
            waiting.popleft()
        if waiting:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._flush, worker)

    def _send(self, worker: int, hand_off: HandOff) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", hand_off.descriptors()))]
        try:
            self._socket.sendmsg([hand_off.note], rights, 0, self._address(worker))
        except OSError as error:
            # A full queue, too many descriptors in flight, or a worker that is being replaced: none of them lasts.
            logger.debug("worker %d takes no connection now: %s", worker, error)
            return False
        hand_off.close_receiver_claim()
        return True

    def _address(self, worker: int) -> str:
        return str(self._folder / f"{worker}.inbox")


def claim(descriptors: list[int]) -> socket.socket | None:
    """Take over a connection that was received with its claim; None if its sender has taken it back."""
    if len(descriptors) != 2:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    connection, claiming = (socket.socket(fileno=descriptor) for descriptor in descriptors)
    try:
        claiming.send(CLAIM, getattr(socket, "MSG_NOSIGNAL", 0))
    except OSError:
        connection.close()
        return None
    finally:
        claiming.close()
    return connection


def _answer(transport: Any, response: bytes) -> None:
    transport.write(response)
    transport.close()
