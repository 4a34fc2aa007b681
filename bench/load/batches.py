"""Times a client that steps all of its sessions at once, batch after batch."""

import time
from collections.abc import Awaitable, Callable

WARM_UP_BATCHES = 2


async def time_batches(step_all: Callable[[], Awaitable[None]], sessions: int, seconds: float) -> dict[str, float]:
    """Step in batches for `seconds`, to the end of the last batch, and report the rate."""
    for _ in range(WARM_UP_BATCHES):
        await step_all()
    began, cpu_began = time.perf_counter(), time.process_time()
    steps = 0
    while (elapsed := time.perf_counter() - began) < seconds:
        await step_all()
        steps += sessions
    cpu_share = (time.process_time() - cpu_began) / elapsed
    return {"rate": steps / elapsed, "generator_cpu_share": cpu_share}
