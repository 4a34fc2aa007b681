"""Frames written by threads, past the event loop.

A step on a thread has its answer there. Handing it to the loop to be written costs more than many a step, so the
thread writes it into the kernel's buffer itself, as long as the loop has nothing of its own left to write. The
loop's writes and the threads' exclude each other, so that frames never mix.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from paddock.server import kernel
from paddock.server.plain_frame import LARGEST, frame_of

if TYPE_CHECKING:
    from collections.abc import Callable


class SideWriter:
    """One connection's socket, for any thread to write to."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.lock = threading.Lock()
        """Held by whoever writes to the connection."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._descriptor: int | None = transport.get_extra_info("socket").fileno()
        self._rest = b""

    def send(self, frame: bytes) -> bool:
        """Write a text frame now; False if the loop has to, which can wait for room."""
        if len(frame) > LARGEST:
            return False
        data = frame_of(frame)
        with self.lock:
            if self._descriptor is None or self._rest or self._transport.get_write_buffer_size():
                return False
            sent = kernel.send(self._descriptor, data)
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
