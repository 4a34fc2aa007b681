"""A command while it runs: its outputs, its end, its deadline.

Output is read from pipes, whatever backend fills them. It is kept within bounds and handed on line by line. Reading
never waits for a consumer, unless one asked for the lines (backpressure).
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

from paddock.errors import SandboxError
from paddock.sandbox.base import Completed, Job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

OUTPUT_GRACE_SECONDS = 0.5
"""Seconds that the output may stay open after the command ended, held by something it left behind."""
KILL_SECONDS = 5.0
TAIL_BYTES = 65536
CHUNK_BYTES = 65536
MAX_LINE_BYTES = 1024 * 1024
MOST_UNREAD_BYTES = 4 * 1024 * 1024
"""Bytes that may wait for a slow reader of lines before the command is made to wait too."""


class CommandJob(Job):
    """Created before the command starts; `pid` is set once it has started."""

    def __init__(
        self,
        stdout: int,
        stderr: int,
        limit: int,
        send_signal: Callable[[int, int], None],
        killed_for: Callable[[], str | None],
    ) -> None:
        self.pid = 0
        self._send_signal = send_signal
        self._killed_for = killed_for
        self._recent = bytearray()
        self.output_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._stdout = OutputPipe(stdout, limit, self._add_recent)
        self._stderr = OutputPipe(stderr, limit, self._add_recent)
        self._ended = asyncio.Event()
        self._complete = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._exit_code: int | None = None
        self._timed_out = False
        self._tampered: str | None = None

    def _add_recent(self, data: bytes) -> None:
        self._recent += data
        self.output_bytes += len(data)
        if len(self._recent) > 2 * TAIL_BYTES:
            del self._recent[:-TAIL_BYTES]

    # -- for the sandbox ------------------------------------------------------------------------------

    def end(self, exit_code: int | None, *, tampered: str | None = None) -> None:
        """The command is over. Its outputs get a moment to end by themselves."""
        if not self._ended.is_set():
            self._exit_code = exit_code
            self._tampered = tampered
            self._ended.set()
            self._timer = self._loop.call_later(OUTPUT_GRACE_SECONDS, self._stop_reading)

    def _stop_reading(self) -> None:
        self._complete.set()
        for stream in (self._stdout, self._stderr):
            # Lines that wait for a slow consumer are not lost.
            if not stream.is_paused:
                stream.stop()

    def discard(self) -> None:
        """Close the pipes of a command that could not be started."""
        if self._timer is not None:
            self._timer.cancel()
        self.end(None)
        for stream in (self._stdout, self._stderr):
            stream.stop()

    # -- for the caller -------------------------------------------------------------------------------

    def lines(self) -> AsyncIterator[bytes]:
        """As in `Job`. While a reader is slow, the command waits for it: read to the end, or close it."""
        return self._stdout.lines()

    async def wait(self, timeout: float | None = None) -> Completed:
        try:
            async with asyncio.timeout(timeout):
                await self._ended.wait()
        except TimeoutError:
            await self._kill_late()
        await self._wait_for_output()
        killed_for = self._killed_for() if self._exit_code is None else None
        return Completed(
            exit_code=None if self._timed_out else self._exit_code,
            stdout=self._stdout.kept.value(),
            stderr=self._stderr.kept.value(),
            timed_out=self._timed_out,
            truncated=self._stdout.kept.truncated or self._stderr.kept.truncated,
            killed_for=killed_for,
            tampered=self._tampered,
        )

    async def _kill_late(self) -> None:
        if self._ended.is_set():
            return
        self._timed_out = True
        self._send_signal(self.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(KILL_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            raise SandboxError(f"process {self.pid} could not be killed", hint="close the sandbox") from None

    async def _wait_for_output(self) -> None:
        """Until both outputs ended, or the grace is over."""
        both = asyncio.gather(self._stdout.finished.wait(), self._stderr.finished.wait())
        grace = asyncio.ensure_future(self._complete.wait())
        try:
            await asyncio.wait(
                (both, grace), timeout=OUTPUT_GRACE_SECONDS + KILL_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            both.cancel()
            grace.cancel()

    async def kill(self, number: int = signal.SIGKILL) -> None:
        self._send_signal(self.pid, number)

    def tail(self, count: int = 4096) -> str:
        return bytes(self._recent[-count:]).decode("utf-8", "replace") if count > 0 else ""


class BoundedOutput:
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
            # Only at twice the half: each time moves the kept bytes.
            if len(self._tail) > 2 * self._half:
                del self._tail[: -self._half]

    def value(self) -> bytes:
        return bytes(self._head) + bytes(self._tail[-self._half :])


class OutputPipe:
    """The reading end of one output pipe. It owns the descriptor."""

    def __init__(self, descriptor: int, limit: int, on_data: Callable[[bytes], None]) -> None:
        self._descriptor = descriptor
        self._on_data = on_data
        self._loop = asyncio.get_running_loop()
        self.kept = BoundedOutput(limit)
        self.finished = asyncio.Event()
        self._lines: LineBuffer | None = None
        self._reading = False
        os.set_blocking(descriptor, False)
        self._resume()

    @property
    def is_paused(self) -> bool:
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
            data = os.read(self._descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return False
        self.kept.add(data)
        self._on_data(data)
        if self._lines is not None and data:
            self._lines.add(data)
            if self._lines.waiting > MOST_UNREAD_BYTES:
                self._pause()
        return not data

    def stop(self) -> None:
        """Read what has arrived, then stop, even if another process still holds the pipe open."""
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
        lines = self._lines = LineBuffer()
        lines.add(self.kept.value())
        if self.finished.is_set():
            lines.end()
        try:
            while (line := await lines.next()) is not None:
                if lines.waiting <= MOST_UNREAD_BYTES // 2:
                    self._resume()
                yield line
        finally:
            if self._lines is lines:
                self._lines = None
                self._resume()


class LineBuffer:
    """Bytes cut into lines for one reader. A line that grows too long is cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._start = 0
        self._ended = False
        self._has_data = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._buffer) - self._start

    def add(self, data: bytes) -> None:
        self._buffer += data
        self._has_data.set()

    def end(self) -> None:
        self._ended = True
        self._has_data.set()

    async def next(self) -> bytes | None:
        """The next line without its newline; None at the end."""
        while True:
            line = self._cut()
            if line is not None:
                return line
            if self._ended:
                rest = self._take(len(self._buffer), 0)
                return rest or None
            self._has_data.clear()
            await self._has_data.wait()

    def _cut(self) -> bytes | None:
        end = self._buffer.find(b"\n", max(self._start, self._searched), self._start + MAX_LINE_BYTES + 1)
        if end >= 0:
            return self._take(end, 1)
        if self.waiting > MAX_LINE_BYTES:
            return self._take(self._start + MAX_LINE_BYTES, 0)
        self._searched = len(self._buffer)
        return None

    def _take(self, end: int, newline: int) -> bytes:
        line = bytes(self._buffer[self._start : end])
        self._start = self._searched = end + newline
        # Drop what was read only now and then: each time moves the rest of the buffer.
        if self._start > CHUNK_BYTES and self._start * 2 > len(self._buffer):
            del self._buffer[: self._start]
            self._start = self._searched = 0
        return line
