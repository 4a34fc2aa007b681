"""Counts answers and their latencies between two moments, and the generator's own CPU."""

import asyncio
import time


class Meter:
    """Counts while measuring. Answers that come before or after do not count."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.stopped = False
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, reason: str) -> None:
        """End the measurement; `measure` raises."""
        if not self._failure.done():
            self._failure.set_exception(RuntimeError(reason))

    async def measure(self, warm_up_seconds: float, seconds: float) -> dict[str, float]:
        """Let the load warm up, then count for `seconds`, and tell it to stop.

        Raises:
            RuntimeError: a session reported a failure.
        """
        await self._pass(warm_up_seconds)
        self.latencies.clear()
        began, cpu_began = time.perf_counter(), time.process_time()
        await self._pass(seconds)
        elapsed = time.perf_counter() - began
        cpu_share = (time.process_time() - cpu_began) / elapsed
        self.stopped = True
        latencies = sorted(self.latencies)
        if not latencies:
            raise RuntimeError("the server answered nothing while it was measured")
        return {
            "rate": len(latencies) / elapsed,
            "p50_ms": 1000 * latencies[len(latencies) // 2],
            "p99_ms": 1000 * latencies[len(latencies) * 99 // 100],
            "generator_cpu_share": cpu_share,
        }

    async def _pass(self, seconds: float) -> None:
        done, _ = await asyncio.wait([self._failure], timeout=seconds)
        for failure in done:
            failure.result()
