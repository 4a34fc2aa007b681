"""What a stream gains over a worker that waits for whole batches, if some rollouts take 50 times as long as others.

    python -m bench.stream [--seconds 180] [--rounds 1] [--json FILE]

Real rollouts (agent loop, capture, store) on a scripted model, in sessions that sleep for lognormal times: the 1st
and the 99th percentile are 1 : 50. A simulated trainer takes `BATCH` groups, is busy for a while, and updates its
weights.

stream    our stream: `max_staleness` is enforced by pacing.
barrier   our worker before the stream: a round of groups fills all slots, and the next round starts when all of its
          rollouts have ended. The trainer discards groups that are too old.
unpaced   what TRL 1.16's own worker does (`AsyncRolloutLoop`): rollouts start in free slots and groups are delivered
          when they are complete, without a limit. The trainer discards groups that are too old.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from paddock.capture.gate import CallGate
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.models.weight_version import Weights
from paddock.rollouts.loop.session import ToolResult
from paddock.store.outcome import Reward
from paddock.tasks.task import Task
from paddock.train.sampled import ScoredGroup
from paddock.train.sources import Source, open_sources
from paddock.train.stream import Stream
from paddock.train.stream_config import StreamConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

MEMBERS, SLOTS, BATCH, STALENESS = 8, 16, 2, 4
"""The staleness limit is TRL's default."""
MEDIAN_SECONDS, SPREAD = 4.0, 50.0
SIGMA = math.log(SPREAD) / (2 * 2.326)
TRAIN_SECONDS = 2.0
"""Less than the rollouts of a batch take: they are the bottleneck."""
QUEUE_GROUPS = 8
SCRIPT = {"turns": [{"tool": "work", "arguments": {}}, {"text": "Done."}]}
TARGET = 2.0


@dataclass(slots=True)
class Result:
    """What a trainer got in one run."""

    kind: str
    samples: int = 0
    groups: int = 0
    discarded: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    versions: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.samples / self.seconds


class SleepingSession:
    """Takes a lognormal time between two model calls. It depends on the task and on which of its rollouts it is."""

    is_repeatable = is_scored = True
    verifier_log = ""
    prompt = "Do it."
    _numbers: ClassVar[Counter[str]] = Counter()

    def __init__(self, task: Task) -> None:
        number = self._numbers[task.id] = self._numbers[task.id] + 1
        chance = random.Random(f"{task.id}/{number}")
        self._seconds = MEDIAN_SECONDS * math.exp(SIGMA * chance.gauss(0.0, 1.0))
        self._reward = float(number % 2)
        self.evidence: dict[str, Any] = {"seconds": self._seconds}

    async def open(self) -> None:
        pass

    async def tools(self) -> SleepingSession:
        return self

    async def list_tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "work", "parameters": {"type": "object"}}}]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        await asyncio.sleep(self._seconds)
        return ToolResult.of_text("worked")

    async def score(self, messages: list[dict[str, Any]]) -> Reward:
        return Reward(self._reward)

    async def close(self) -> None:
        pass


@asynccontextmanager
async def source() -> AsyncIterator[Source]:
    SleepingSession._numbers.clear()
    tasks = [Task("Do it.", id=f"task-{number}") for number in range(4096)]
    with tempfile.TemporaryDirectory() as store:
        async with ReplayServer(SCRIPT) as server:
            endpoint = Endpoint(server.url, "replay", engine="vllm")
            options: dict[str, Any] = {"n": MEMBERS, "parallel": SLOTS, "store": Path(store)}
            yield Source.create(endpoint, tasks, environment=lambda task: SleepingSession(task), **options)


async def train(result: Result, seconds: float, take: Callable[[int], Awaitable[ScoredGroup]]) -> None:
    """The simulated trainer. `take` is told the version. Groups that are older than the limit are discarded."""
    began = time.monotonic()
    version = 0
    while time.monotonic() - began < seconds:
        batch = 0
        while batch < BATCH:
            group = await take(version)
            oldest = version if group.versions is None else group.versions[0]
            if version - oldest > STALENESS:
                result.discarded += 1
                continue
            batch += 1
            result.groups += 1
            result.samples += len(group.samples)
            result.staleness[version - oldest] += 1
        await asyncio.sleep(TRAIN_SECONDS)
        version += 1
    result.versions, result.seconds = version, time.monotonic() - began


async def run_stream(seconds: float, *, paced: bool) -> Result:
    result = Result("stream" if paced else "unpaced")
    config = StreamConfig(
        batch_size=BATCH,
        max_staleness=STALENESS if paced else None,
        max_ready=QUEUE_GROUPS,
        zero_advantage="keep",
    )
    async with source() as tasks, Stream(tasks, config) as stream:

        async def take(version: int) -> ScoredGroup:
            if version != stream.version:
                await stream.set_version(version)
            return await anext(stream)

        await train(result, seconds, take)
    return result


async def run_barrier(seconds: float) -> Result:
    result = Result("barrier")
    weights, queue = Weights(0), asyncio.Queue[ScoredGroup](QUEUE_GROUPS)
    async with source() as tasks, open_sources([tasks], weights, CallGate()) as opened:

        async def roll() -> None:
            number = 0
            while True:
                chosen = tasks.tasks[number : number + SLOTS // MEMBERS]
                number += len(chosen)
                rollouts = await opened[tasks.name].run(chosen, n=MEMBERS)
                for place, task in enumerate(chosen):
                    members = rollouts[place * MEMBERS : (place + 1) * MEMBERS]
                    rewards = [each.record.reward for each in members if each.record.reward is not None]
                    await queue.put(ScoredGroup(number, tasks.name, task, members, rewards))

        async def take(version: int) -> ScoredGroup:
            weights.set(version)
            return await queue.get()

        rolling = asyncio.create_task(roll())
        try:
            await train(result, seconds, take)
        finally:
            rolling.cancel()
            await asyncio.gather(rolling, return_exceptions=True)
    return result


async def measure(seconds: float) -> list[Result]:
    return [
        await run_stream(seconds, paced=True),
        await run_barrier(seconds),
        await run_stream(seconds, paced=False),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.stream", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="length of one run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result to a file")
    options = parser.parse_args()
    results: list[Result] = []
    for _ in range(options.rounds):
        for each in asyncio.run(measure(options.seconds)):
            results.append(each)
            oldest = max(each.staleness, default=0)
            print(
                f"{each.kind:8} {each.rate:6.1f} samples/s  {each.groups:4} groups, {each.discarded:3} discarded, "
                f"staleness at most {oldest}, {each.versions} versions in {each.seconds:.0f} s",
                flush=True,
            )
    rates = {kind: median(each.rate for each in results if each.kind == kind) for kind in {r.kind for r in results}}
    paced = [each for each in results if each.kind == "stream"]
    kept = all(each.discarded == 0 and max(each.staleness, default=0) <= STALENESS for each in paced)
    gains = {kind: rates["stream"] / rate for kind, rate in rates.items() if kind != "stream"}
    print(", ".join(f"{gain:.2f} times {kind}" for kind, gain in gains.items()))
    if options.json:
        rows = [{**asdict(replace(each, staleness=Counter())), "staleness": each.staleness} for each in results]
        options.json.write_text(json.dumps(rows, indent=2))
    return 0 if kept and gains["barrier"] >= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
