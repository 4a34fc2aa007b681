"""Processes kept ready, and a fair line for those who need one.

Starting Python and importing an environment's needs is most of what an instance costs; a few processes
have done it before anybody asks. Knows nothing of instances.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from paddock.errors import PaddockError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from paddock.fleet.control.process import HostedProcess, Launcher

logger = logging.getLogger("paddock.fleet.control")

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0


class Pool:
    """Hands out processes: a warm one if there is one, else one started for the caller.

    At most `parallel` callers start at a time, first come, first served.
    """

    def __init__(self, launcher: Launcher, folder: Path, *, warm: int, parallel: int, end_seconds: float) -> None:
        self._launcher = launcher
        self._folder = folder
        self._warm = warm
        self._end_seconds = end_seconds
        self._slots = asyncio.Semaphore(parallel)
        self._idle: deque[HostedProcess] = deque()
        self._names = itertools.count(1)
        self._wanted = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._pause = FIRST_PAUSE
        self.asked = 0
        """How many callers wait for their turn or have it."""

    @property
    def idle(self) -> int:
        return len(self._idle)

    def open(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._wanted.set()
        self._keeper = asyncio.create_task(self._keep_warm(), name="warm-pool")

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        idle = list(self._idle)
        self._idle.clear()
        await asyncio.gather(*(process.end(self._end_seconds) for process in idle))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The right to start something now. New warm processes wait until nobody asks any more."""
        self.asked += 1
        try:
            async with self._slots:
                yield
        finally:
            self.asked -= 1
            if not self.asked:
                self._wanted.set()

    async def take(self, *, fresh: bool = False) -> HostedProcess:
        """A process for the caller, who must end it; with `fresh` one that has not waited."""
        while self._idle and not fresh:
            process = self._idle.popleft()
            if process.is_alive:
                return process
        return await self._start()

    async def _start(self) -> HostedProcess:
        return await self._launcher.start(self._folder / f"{next(self._names)}.log")

    async def _keep_warm(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while len(self._idle) < self._warm and not self.asked:
                try:
                    process = await self._start()
                except (OSError, PaddockError) as error:
                    await self._recover(f"no process can be started: {error}")
                    continue
                process.was_warm = True
                self._idle.append(process)
                process.ended.add_done_callback(partial(self._lost, process))
                # Let those go first who came meanwhile.
                await asyncio.sleep(0)

    def _lost(self, process: HostedProcess, ended: asyncio.Future[int]) -> None:
        if process not in self._idle:
            return
        self._idle.remove(process)
        logger.warning("a waiting process ended: %s", process.last_words())
        asyncio.get_running_loop().call_later(self._pause, self._wanted.set)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    async def _recover(self, trouble: str) -> None:
        logger.warning("%s; trying again in %g s", trouble, self._pause)
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
