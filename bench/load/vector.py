"""Steps many sessions with Paddock's `VectorClient`."""

from bench.load.batches import time_batches
from bench.load.program import Report, arguments, run
from paddock.client.vector import VectorClient


async def step_vector(url: str, count: int, seconds: float) -> Report:
    actions = [{"amount": 0}] * count
    async with VectorClient(url, sessions=count) as environments:
        await environments.reset_all()

        async def step_all() -> None:
            for result in await environments.step_all(actions):
                if isinstance(result, Exception):
                    raise result

        return await time_batches(step_all, count, seconds)


if __name__ == "__main__":
    options = arguments(__doc__, sessions=1000, seconds=2.0)
    run(step_vector(options.url, options.sessions, options.seconds))
