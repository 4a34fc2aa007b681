import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from environments import Watched
from running import Serve, servers

from .proxy import Proxy


@pytest.fixture
def serve(lives: list[Watched]) -> Iterator[Serve]:
    """Starts servers; at the end every environment was closed exactly once."""
    yield from servers("fast", lives)


@pytest.fixture
async def through() -> AsyncIterator[Callable[[int], Any]]:
    """Puts a proxy in front of a port."""
    made: list[Proxy] = []

    async def build(port: int) -> Proxy:
        made.append(Proxy(port))
        await made[-1].open()
        return made[-1]

    yield build
    for proxy in made:
        await proxy.close()


async def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    """Wait for what another thread or task does."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
