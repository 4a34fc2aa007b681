"""Times clients that each step their own session in a loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

WARM_UP_SECONDS = 0.3


async def time_loops(steps: Sequence[Callable[[], Awaitable[object]]], seconds: float) -> dict[str, float]:
    """Call each of `steps` again and again, all of them at the same time, and report the rate of all together."""
    count, is_over = 0, False

    async def loop(step: Callable[[], Awaitable[object]]) -> None:
        nonlocal count
        while not is_over:
            await step()
            count += 1

    loops = [asyncio.create_task(loop(step)) for step in steps]
    await asyncio.sleep(WARM_UP_SECONDS)
    began, cpu_began, before = time.perf_counter(), time.process_time(), count
    await asyncio.sleep(seconds)
    elapsed, stepped, cpu = time.perf_counter() - began, count - before, time.process_time() - cpu_began
    is_over = True
    await asyncio.gather(*loops)
    return {"rate": stepped / elapsed, "generator_cpu_share": cpu / elapsed}
