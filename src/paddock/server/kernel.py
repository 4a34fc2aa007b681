"""Sockets past their transports: `send` and `receive` never wait, and keep the interpreter's lock.

The methods of `socket` give the lock up around the call. Where other threads want it, to get it back takes longer
than the call does; where none does, that is still cheaper than ctypes, and `read` is the better `receive`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import Transport

ROOM = 16384
"""The most that is read at once."""


def is_plain(transport: Transport) -> bool:
    """Whether the bytes of this transport are those on its socket, where they can be read and written past it."""
    return sys.platform == "linux" and transport.get_extra_info("sslcontext") is None


def send(descriptor: int, data: bytes) -> int:
    """How many bytes were taken; not more than 0 if none can be."""
    return _send(descriptor, data, len(data), _SEND_FLAGS)  # type: ignore[no-any-return]


def read(descriptor: int, most: int) -> bytes:
    """What has come, up to `most` bytes. Empty at the end, or where nothing came."""
    try:
        return os.read(descriptor, most)
    except OSError:
        return b""


class Receiver:
    """One thread's buffer."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(ROOM)
        self._view = memoryview(self._buffer).cast("B")

    def receive(self, descriptor: int, most: int) -> bytes:
        """Like `read`, for at most `ROOM` bytes."""
        size = _recv(descriptor, self._buffer, most, _RECEIVE_FLAGS)
        return self._view[:size].tobytes() if size > 0 else b""


_EVENT = struct.Struct("=Ii4x" if platform.machine() in ("x86_64", "AMD64", "i386", "i686") else "=I4xi4x")
"""The kernel's `struct epoll_event`: what happened, and the descriptor. Only on x86 there is no gap between them."""


class Looker:
    """Asks an epoll object what is ready."""

    def __init__(self, descriptor: int, most: int) -> None:
        self._descriptor = descriptor
        self._most = most
        self._buffer = ctypes.create_string_buffer(_EVENT.size * most)
        self._view = memoryview(self._buffer).cast("B")

    def look(self) -> list[tuple[int, int]]:
        """Like `epoll.poll(0)`, but the lock is kept.

        A thread that gives it up for a moment, again and again, keeps it from all others: each is woken, and finds it
        taken. One that keeps it is asked for it, and has to wait then.
        """
        found = _epoll_wait(self._descriptor, self._buffer, self._most, 0)
        events = _EVENT.iter_unpack(self._view[: max(0, found) * _EVENT.size])
        return [(descriptor, event) for event, descriptor in events]


if sys.platform == "linux":
    # The types of arguments are left for ctypes to see: for bytes and small integers that is twice as quick as to be
    # told.
    _library = ctypes.PyDLL(None)
    _send, _recv, _epoll_wait = _library.send, _library.recv, _library.epoll_wait
    _SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    _RECEIVE_FLAGS = int(socket.MSG_DONTWAIT)
