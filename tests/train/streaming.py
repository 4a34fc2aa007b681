"""Streams of small rollouts: a session whose reward and end a test decides, and a model that plays a script."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.rollouts import Task
from paddock.store.outcome import Reward
from paddock.train.sampled import ScoredGroup
from paddock.train.sources import Source
from paddock.train.stream import Stream
from paddock.train.stream_config import StreamConfig
from rollouts.loop.fake_session import FakeSession, turns

SCRIPT = turns({"text": "Done."})
SECONDS = 30.0

Worth = Callable[[Task, int], float | None]


class Played(FakeSession):
    """Ends at once, unless its task is held."""

    def __init__(self, place: "Place", task: Task, number: int) -> None:
        super().__init__()
        self._place, self._task, self._number = place, task, number

    async def open(self) -> None:
        self._place.started.append(self._task.id)
        await self._place.gate(self._task.id).wait()

    async def score(self, messages: list[dict[str, Any]]) -> Reward:
        worth = self._place.worth(self._task, self._number)
        return Reward.unknown("nobody knows") if worth is None else Reward(worth)


class Place:
    """Where rollouts work. `worth` gives the reward of a rollout; each task counts its rollouts from 1.

    `hold` keeps a task from ending until `release`."""

    def __init__(self, worth: Worth = lambda _, number: float(number % 2)) -> None:
        self.worth = worth
        self.started: list[str] = []
        self._counts: Counter[str] = Counter()
        self._gates: dict[str, asyncio.Event] = {}
        self._held: set[str] = set()

    def hold(self, *tasks: str) -> None:
        self._held.update(tasks)

    def release(self, *tasks: str) -> None:
        self._held.difference_update(tasks)
        for task in tasks:
            self.gate(task).set()

    def gate(self, task: str) -> asyncio.Event:
        gate = self._gates.setdefault(task, asyncio.Event())
        if task not in self._held:
            gate.set()
        return gate

    def session(self, task: Task) -> Played:
        self._counts[task.id] += 1
        return Played(self, task, self._counts[task.id])


def tasks(count: int, prefix: str = "t") -> list[Task]:
    return [Task("Do it.", id=f"{prefix}{number}") for number in range(count)]


class Streams:
    """Opens streams on one model and one store. Use it as `async with`."""

    def __init__(self, folder: Path, script: dict[str, Any] = SCRIPT) -> None:
        self.folder = folder
        self.server = ReplayServer(script)

    async def __aenter__(self) -> "Streams":
        await self.server.__aenter__()
        self.endpoint = Endpoint(self.server.url, "replay", engine="vllm")
        return self

    async def __aexit__(self, *problem: Any) -> None:
        await self.server.__aexit__(*problem)

    def source(self, place: Place, chosen: Sequence[Task], **options: Any) -> Source:
        fields = {"n": 2, "parallel": 4, "retries": 0, "store": self.folder, **options}
        return Source.create(self.endpoint, chosen, environment=place.session, **fields)

    def stream(self, *sources: Source, version: int | None = None, **fields: Any) -> Stream:
        return Stream(sources, StreamConfig(**{"timeout": SECONDS, **fields}), version=version)


def ids(groups: Sequence[ScoredGroup]) -> list[str]:
    return [group.task.id for group in groups]


def run(work: Any) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(2 * SECONDS):
            return await work

    return asyncio.run(limited())
