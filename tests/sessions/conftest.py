import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from environments import Watched
from paddock.config import Limits
from paddock.sessions.dispatch import Dispatch
from paddock.sessions.manager import SessionManager
from paddock.sessions.spec import EnvironmentSpec


class Harness:
    """A manager and its dispatch, ticked by hand."""

    def __init__(self, make: Any, clock: Any, **limits: Any) -> None:
        limits.setdefault("max_sessions", 4)
        self.spec = EnvironmentSpec(make)
        self.limits = Limits(**limits)
        self.clock = clock
        self.manager = SessionManager(self.spec, self.limits, clock=clock)
        self.dispatch = Dispatch(self.spec, self.limits.step_timeout)
        self.execute = self.dispatch.execute

    async def pass_time(self, seconds: float) -> None:
        """Move the clock, and let everything that is due happen."""
        self.clock.advance(seconds)
        self.manager.tick()
        await settled()

    async def drain(self, grace: float) -> None:
        """Drain while the clock moves along with real time."""
        task = asyncio.create_task(self.manager.drain(grace))
        while not task.done():
            await asyncio.sleep(0.01)
            self.clock.advance(0.01)
        await task


async def settled() -> None:
    """Let callbacks that are ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    """Wait for something that another thread or task does."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
async def harness(clock: Any, lives: list[Watched]) -> AsyncIterator[Callable[..., Harness]]:
    """Makes managers; at the end each is drained, and every environment was closed exactly once."""
    made: list[Harness] = []

    def build(make: Any, **limits: Any) -> Harness:
        made.append(Harness(make, clock, **limits))
        return made[-1]

    yield build
    for life in lives:
        life.release.set()
    for one in made:
        await one.drain(0.5)
    await until(lambda: all(life.closes for life in lives))
    assert [life.closes for life in lives] == [1] * len(lives)
