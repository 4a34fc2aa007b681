# mypy: disable-error-code="import-not-found"
"""Steps many sessions with OpenEnv's own clients, one per session, gathered.

Runs in OpenEnv's virtual environment.
"""

import asyncio

from openenv.core import GenericEnvClient

from bench.load.batches import time_batches
from bench.load.program import Report, arguments, run

OPENERS = 32
CONNECT_SECONDS = 60.0


async def step_clients(url: str, count: int, seconds: float) -> Report:
    clients = [GenericEnvClient(base_url=url, connect_timeout_s=CONNECT_SECONDS) for _ in range(count)]
    try:
        for start in range(0, count, OPENERS):
            await asyncio.gather(*(client.reset() for client in clients[start : start + OPENERS]))

        async def step_all() -> None:
            await asyncio.gather(*(client.step({"amount": 0}) for client in clients))

        return await time_batches(step_all, count, seconds)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


if __name__ == "__main__":
    options = arguments(__doc__, sessions=1000, seconds=2.0)
    run(step_clients(options.url, options.sessions, options.seconds))
