"""Frames written by threads, past the event loop.

A step on a thread has its answer there. Handing it to the loop to be written costs more than many a step, so the
thread writes it into the kernel's buffer itself, as long as the loop has nothing of its own left to write. The
loop's writes and the threads' exclude each other, so that frames never mix.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST = 0xFFFF
"""Larger frames are left to the loop, which can wait for room."""
SHORT_LENGTH = 126
WHOLE_TEXT = 0x81
"""The first byte of a text message in one frame."""
HEADS = [bytes((WHOLE_TEXT, size)) for size in range(SHORT_LENGTH)]


class SideWriter:
    """One connection's socket, for any thread to write to."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.lock = threading.Lock()
        """Held by whoever writes to the connection."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._descriptor: int | None = transport.get_extra_info("socket").fileno()
        self._rest = b""

    @staticmethod
    def fits(transport: asyncio.Transport) -> bool:
        """Whether bytes for this transport go to its socket as they are."""
        return sys.platform == "linux" and transport.get_extra_info("sslcontext") is None

    def send(self, frame: bytes) -> bool:
        """Write a text frame now; False if the loop has to."""
        size = len(frame)
        if size > LARGEST:
            return False
        head = HEADS[size] if size < SHORT_LENGTH else bytes((WHOLE_TEXT, SHORT_LENGTH, size >> 8, size & 0xFF))
        data = head + frame
        with self.lock:
            if self._descriptor is None or self._rest or self._transport.get_write_buffer_size():
                return False
            sent = _send(self._descriptor, data, len(data), _FLAGS)
            if sent <= 0:
                return False
            if sent < len(data):
                # The buffer is full. What it did not take is the next that the loop writes.
                self._rest = data[sent:]
                self._loop.call_soon_threadsafe(self.write)
        return True

    def write(self, write: Callable[..., object] | None = None, *arguments: Any) -> None:
        """On the loop: `write(*arguments)`, after what a thread has left over."""
        with self.lock:
            if self._rest and self._descriptor is not None:
                self._transport.write(self._rest)
            self._rest = b""
            if write is not None:
                write(*arguments)

    def close(self) -> None:
        """On the loop, before the socket is closed: its number may soon be another connection's."""
        with self.lock:
            self._descriptor = None


if sys.platform == "linux":
    # Not `socket.send`, which gives the interpreter's lock up: to get it back costs more than the call takes. The
    # types are left for ctypes to see: bytes and small integers, for which that is twice as quick as to be told.
    _send = ctypes.PyDLL(None).send
    _FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
