"""Steps sessions with Paddock's `Client`, one per session, each in its own loop."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from bench.load.loops import time_loops
from bench.load.program import Report, arguments, run
from paddock import Client


async def step_clients(url: str, count: int, seconds: float) -> Report:
    async with AsyncExitStack() as stack:
        clients: list[Client[Any]] = [await stack.enter_async_context(Client(url)) for _ in range(count)]
        await asyncio.gather(*(client.reset() for client in clients))
        return await time_loops([partial(client.step, {"amount": 0}) for client in clients], seconds)


if __name__ == "__main__":
    options = arguments(__doc__, sessions=16, seconds=2.0)
    run(step_clients(options.url, options.sessions, options.seconds))
