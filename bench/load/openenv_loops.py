# mypy: disable-error-code="import-not-found"
"""Steps sessions with OpenEnv's own clients, one per session, each in its own loop.

Runs in OpenEnv's virtual environment.
"""

import asyncio
from functools import partial

from openenv.core import GenericEnvClient

from bench.load.loops import time_loops
from bench.load.program import Report, arguments, run

CONNECT_SECONDS = 60.0


async def step_clients(url: str, count: int, seconds: float) -> Report:
    clients = [GenericEnvClient(base_url=url, connect_timeout_s=CONNECT_SECONDS) for _ in range(count)]
    try:
        await asyncio.gather(*(client.reset() for client in clients))
        return await time_loops([partial(client.step, {"amount": 0}) for client in clients], seconds)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


if __name__ == "__main__":
    options = arguments(__doc__, sessions=16, seconds=2.0)
    run(step_clients(options.url, options.sessions, options.seconds))
