"""Sockets past their transports: `send` and `receive` never wait, and keep the interpreter's lock.

The methods of `socket` give the lock up around the call. Where other threads want it, to get it back takes longer
than the call does; where none does, that is still cheaper than ctypes, and `read` is the better `receive`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import sys
from typing import TYPE_CHECKING, ClassVar

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


class _Event(ctypes.Structure):
    """The kernel's `struct epoll_event`, which has no gap on x86."""

    _pack_ = 1 if platform.machine() in ("x86_64", "AMD64", "i686") else 0
    _fields_: ClassVar = [("events", ctypes.c_uint32), ("descriptor", ctypes.c_int32), ("_", ctypes.c_int32)]


class Looker:
    """Asks an epoll object what is ready."""

    def __init__(self, descriptor: int, most: int) -> None:
        self._descriptor = descriptor
        self._events = (_Event * most)()
        self._most = most

    def look(self) -> list[tuple[int, int]]:
        """Like `epoll.poll(0)`, but the lock is kept.

        A thread that gives it up for a moment, again and again, keeps it from all others: each is woken, and finds it
        taken. One that keeps it is asked for it, and has to wait then.
        """
        found = _epoll_wait(self._descriptor, self._events, self._most, 0)
        return [(event.descriptor, event.events) for event in self._events[: max(0, found)]]


if sys.platform == "linux":
    # The types of arguments are left for ctypes to see: for bytes and small integers that is twice as quick as to be
    # told.
    _library = ctypes.PyDLL(None)
    _send, _recv, _epoll_wait = _library.send, _library.recv, _library.epoll_wait
    _SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    _RECEIVE_FLAGS = int(socket.MSG_DONTWAIT)
