"""A command that runs under a supervisor: its outputs, its end, its deadline."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from paddock.errors import SandboxError
from paddock.rollouts.sandbox.base import Completed, Job
from paddock.rollouts.sandbox.output import Stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

OUTPUT_GRACE = 0.5
"""Seconds that the output may stay open after the command ended, held by something it left behind."""
KILL_GRACE = 5.0
RECENT = 65536


class SupervisedJob(Job):
    """Made before the command starts; `pid` is known once it has."""

    def __init__(
        self,
        stdout: int,
        stderr: int,
        limit: int,
        send_signal: Callable[[int, int], None],
        why: Callable[[], str | None],
    ) -> None:
        self.pid = 0
        self._send_signal = send_signal
        self._why_killed = why
        self._recent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._stdout = Stream(stdout, limit, self._saw)
        self._stderr = Stream(stderr, limit, self._saw)
        self._ended = asyncio.Event()
        self._complete = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._exit_code: int | None = None
        self._timed_out = False
        self._tampered: str | None = None

    def _saw(self, data: bytes) -> None:
        self._recent += data
        if len(self._recent) > 2 * RECENT:
            del self._recent[:-RECENT]

    # -- told by the sandbox --------------------------------------------------------------------------

    def ended(self, exit_code: int | None, *, tampered: str | None = None) -> None:
        """The command is over. Its outputs get a moment to end by themselves."""
        if not self._ended.is_set():
            self._exit_code = exit_code
            self._tampered = tampered
            self._ended.set()
            self._timer = self._loop.call_later(OUTPUT_GRACE, self._stop_reading)

    def _stop_reading(self) -> None:
        self._complete.set()
        for stream in (self._stdout, self._stderr):
            # Lines that wait for a slow reader are not cut off.
            if not stream.waits_for_its_reader:
                stream.stop()

    def drop(self) -> None:
        """Give the pipes back. Only for a command whose sandbox goes away."""
        if self._timer is not None:
            self._timer.cancel()
        self.ended(None)
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
            await self._end_late()
        await self._read_to_the_end()
        killed_for = self._why_killed() if self._exit_code is None else None
        return Completed(
            exit_code=None if self._timed_out else self._exit_code,
            stdout=self._stdout.kept.value(),
            stderr=self._stderr.kept.value(),
            timed_out=self._timed_out,
            truncated=self._stdout.kept.truncated or self._stderr.kept.truncated,
            killed_for=killed_for,
            tampered=self._tampered,
        )

    async def _end_late(self) -> None:
        if self._ended.is_set():
            return
        self._timed_out = True
        self._send_signal(self.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(KILL_GRACE):
                await self._ended.wait()
        except TimeoutError:
            raise SandboxError(f"process {self.pid} could not be killed", hint="close the sandbox") from None

    async def _read_to_the_end(self) -> None:
        """Until both outputs ended, or the grace is over."""
        both = asyncio.gather(self._stdout.finished.wait(), self._stderr.finished.wait())
        grace = asyncio.ensure_future(self._complete.wait())
        try:
            await asyncio.wait((both, grace), timeout=OUTPUT_GRACE + KILL_GRACE, return_when=asyncio.FIRST_COMPLETED)
        finally:
            both.cancel()
            grace.cancel()

    async def kill(self, number: int = signal.SIGKILL) -> None:
        self._send_signal(self.pid, number)

    def tail(self, count: int = 4096) -> str:
        return bytes(self._recent[-count:]).decode("utf-8", "replace") if count > 0 else ""
