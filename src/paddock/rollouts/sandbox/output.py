"""What a command writes: kept within bounds, and handed on line by line.

Knows pipes and bytes, not commands. It never waits for a reader unless one asked for the lines.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

CHUNK = 65536
LONGEST_LINE = 1024 * 1024
MOST_WAITING = 4 * 1024 * 1024
"""Bytes that may wait for a slow reader of lines before the command is made to wait too."""


class Kept:
    """The first and the last half of `limit` bytes; what was between them is dropped."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.truncated = False

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > self._half:
            self.truncated = True
            # Twice the half at most, so that the bytes are not moved for every chunk.
            if len(self._tail) > 2 * self._half:
                del self._tail[: -self._half]

    def value(self) -> bytes:
        return bytes(self._head) + bytes(self._tail[-self._half :])


class Stream:
    """The reading end of one output pipe. It owns the descriptor."""

    def __init__(self, descriptor: int, limit: int, seen: Callable[[bytes], None]) -> None:
        self._descriptor = descriptor
        self._seen = seen
        self._loop = asyncio.get_running_loop()
        self.kept = Kept(limit)
        self.finished = asyncio.Event()
        self._lines: Lines | None = None
        self._reading = False
        os.set_blocking(descriptor, False)
        self._resume()

    @property
    def waits_for_its_reader(self) -> bool:
        return not self._reading and not self.finished.is_set()

    def _resume(self) -> None:
        if not self._reading and not self.finished.is_set():
            self._reading = True
            self._loop.add_reader(self._descriptor, self._readable)

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._descriptor)

    def _readable(self) -> None:
        if self._read():
            self.finish()

    def _read(self) -> bool:
        """Take one chunk. True at the end of the output."""
        try:
            data = os.read(self._descriptor, CHUNK)
        except BlockingIOError:
            return False
        self.kept.add(data)
        self._seen(data)
        if self._lines is not None and data:
            self._lines.add(data)
            if self._lines.waiting > MOST_WAITING:
                self._pause()
        return not data

    def stop(self) -> None:
        """Take what is there and read no more, even if somebody still holds the pipe."""
        if not self.finished.is_set():
            self._read()
            self.finish()

    def finish(self) -> None:
        if not self.finished.is_set():
            self._pause()
            os.close(self._descriptor)
            self.finished.set()
            if self._lines is not None:
                self._lines.end()

    async def lines(self) -> AsyncIterator[bytes]:
        """Every line, from the first that is still kept."""
        mine = self._lines = Lines()
        mine.add(self.kept.value())
        if self.finished.is_set():
            mine.end()
        try:
            while (line := await mine.next()) is not None:
                if mine.waiting <= MOST_WAITING // 2:
                    self._resume()
                yield line
        finally:
            if self._lines is mine:
                self._lines = None
                self._resume()


class Lines:
    """Bytes cut into lines for one reader. A line that grows too long is cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._start = 0
        self._ended = False
        self._news = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._buffer) - self._start

    def add(self, data: bytes) -> None:
        self._buffer += data
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    async def next(self) -> bytes | None:
        """The next line without its newline; None at the end."""
        while True:
            line = self._cut()
            if line is not None:
                return line
            if self._ended:
                rest = self._take(len(self._buffer), 0)
                return rest or None
            self._news.clear()
            await self._news.wait()

    def _cut(self) -> bytes | None:
        end = self._buffer.find(b"\n", max(self._start, self._searched), self._start + LONGEST_LINE + 1)
        if end >= 0:
            return self._take(end, 1)
        if self.waiting > LONGEST_LINE:
            return self._take(self._start + LONGEST_LINE, 0)
        self._searched = len(self._buffer)
        return None

    def _take(self, end: int, newline: int) -> bytes:
        line = bytes(self._buffer[self._start : end])
        self._start = self._searched = end + newline
        # Cut off what was read now and then, not for every line.
        if self._start > CHUNK and self._start * 2 > len(self._buffer):
            del self._buffer[: self._start]
            self._start = self._searched = 0
        return line
