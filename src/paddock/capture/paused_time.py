"""When calls of a rollout waited for a pause to end. Deadlines and blame do not count this time. No IO.

Times are those of `time.monotonic`. Calls that run in parallel wait at the same time, so intervals are merged.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

Interval = tuple[float, float]


class PausedTime:
    """The paused time of one rollout. `on_change` is called when a first call begins to wait, and when none waits."""

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        self._on_change = on_change
        self._past: list[Interval] = []
        self._waiting: dict[object, float] = {}
        """Since when each call waits."""
        self._none_waits = asyncio.Event()
        self._none_waits.set()

    @property
    def is_paused(self) -> bool:
        """Whether a call waits now."""
        return bool(self._waiting)

    @property
    def count(self) -> int:
        return len(self._intervals())

    @property
    def seconds(self) -> float:
        return self.seconds_before(time.monotonic())

    def seconds_before(self, moment: float) -> float:
        """The paused seconds before a moment."""
        return sum(min(end, moment) - start for start, end in self._intervals() if start < moment)

    def working_time(self, moment: float) -> float:
        """A moment on a clock that stands still in pauses."""
        return moment - self.seconds_before(moment)

    @contextmanager
    def hold(self, since: float) -> Iterator[None]:
        """A call waits during the block. `since` may be earlier: when an attempt began that the pause cut off."""
        token, is_first = object(), not self._waiting
        self._waiting[token] = since
        self._none_waits.clear()
        if is_first:
            self._report()
        try:
            yield
        finally:
            self._past = merge([*self._past, (self._waiting.pop(token), time.monotonic())])
            if not self._waiting:
                self._none_waits.set()
                self._report()

    async def wait_until_working(self) -> None:
        """Until no call waits."""
        await self._none_waits.wait()

    def to_json(self) -> dict[str, Any]:
        return {"count": self.count, "seconds": round(self.seconds, 3)}

    def _intervals(self) -> list[Interval]:
        if not self._waiting:
            return self._past
        now = time.monotonic()
        return merge([*self._past, *((since, now) for since in self._waiting.values())])

    def _report(self) -> None:
        if self._on_change is not None:
            self._on_change()


class AgentDeadline:
    """When the agent's time is up. It moves while calls of the agent are paused."""

    def __init__(self, began: float, seconds: float, paused: PausedTime) -> None:
        self._ends = paused.working_time(began) + seconds
        self._paused = paused

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._ends - self._paused.working_time(time.monotonic()))

    async def wait(self) -> None:
        """Until the time is up."""
        while self.seconds_left > 0.0:
            await asyncio.sleep(self.seconds_left)
            await self._paused.wait_until_working()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[asyncio.Timeout]:
        """As `asyncio.timeout`: raises TimeoutError when the time is up."""
        async with asyncio.timeout(None) as limit:
            watcher = asyncio.ensure_future(self._expire(limit))
            try:
                yield limit
            finally:
                watcher.cancel()

    async def _expire(self, limit: asyncio.Timeout) -> None:
        await self.wait()
        limit.reschedule(0.0)


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times without overlaps, in their order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
