"""Rollouts for a trainer that brings prompts: an agent in a sandbox, or a model that acts in an environment.

Equal prompts are members of one group. Works on a thread of its own, so that a trainer needs no event loop, and
keeps the store, the model and the connections open from one call to the next.
"""

from __future__ import annotations

import asyncio
import atexit
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.adapters.trainers.episode import seed_of
from paddock.errors import ConfigError
from paddock.fleet.sync import LoopThread
from paddock.rollouts.agents import load_agent
from paddock.rollouts.batch import RETRIES, Batch
from paddock.rollouts.export.samples import Policy, Sample, samples
from paddock.rollouts.limits import Budget
from paddock.rollouts.loop import LoopAgent, LoopBatch, LoopPlan
from paddock.rollouts.loop.environment import EnvironmentScene
from paddock.rollouts.outcome import Reward
from paddock.rollouts.plan import Plan
from paddock.rollouts.runs import Parts, opened
from paddock.rollouts.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paddock.rollouts.agents.base import Agent
    from paddock.rollouts.loop import Scene
    from paddock.rollouts.models.endpoint import Endpoint
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.store import Store
    from paddock.rollouts.trace import Call


@dataclass(frozen=True, slots=True)
class Rolled:
    """One rollout, and what can be trained on of it."""

    record: RolloutRecord
    calls: list[Call]
    samples: list[Sample]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What the model said."""
        return [call.message for call in self.calls if call.ok]


class Roller:
    """Rolls out prompts. `environment` is a URL or a class, or a function that makes the scene of a task; without
    it, `agent` works on the tasks in a sandbox. `silent` is what an episode is worth in which no step gave a reward,
    say because the model called no tool; None leaves it out. `settings` are the other fields of `Plan`."""

    def __init__(
        self,
        model: str | Endpoint,
        *,
        environment: str | type | Callable[[Task], Scene] | None = None,
        agent: str | Agent | None = None,
        make_task: Callable[[Any], Task] | None = None,
        model_name: str | None = None,
        api_key: str | None = None,
        store: Store | Path | str | None = None,
        parallel: int = 8,
        silent: float | None = None,
        retries: int = RETRIES,
        policy: Policy | None = None,
        budget: Budget | None = None,
        **settings: Any,
    ) -> None:
        if environment is not None and agent is not None and not isinstance(agent, LoopAgent):
            raise ConfigError("an agent works in a sandbox, not in an environment", hint="give one of the two")
        self._model = model
        self._environment = environment
        self._agent = agent
        self._make_task = make_task or task_of
        self._keys = {"name": model_name, "api_key": api_key}
        self._store = store
        self._parallel = parallel
        self._silent = silent
        self._retries = retries
        self._policy = policy or Policy()
        secrets = (api_key,) if api_key else ()
        self._settings = {"budget": budget or Budget(), "secrets": secrets, **settings}
        self._thread = LoopThread("paddock-rollouts")
        self._stack = AsyncExitStack()
        self._parts: Parts | None = None
        self._running: asyncio.Task[Any] | None = None

    def run(self, prompts: Sequence[Any]) -> list[Rolled]:
        """One rollout for each prompt, in their order."""
        return self._thread.call(self._run, prompts)

    def cancel(self) -> None:
        """Cut off the rollouts that are under way, from another thread: `run` raises CancelledError."""
        running = self._running
        if running is not None:
            running.get_loop().call_soon_threadsafe(running.cancel)

    def close(self) -> None:
        """Give everything back. Closing again does nothing."""
        atexit.unregister(self.close)
        if self._parts is not None:
            self._parts = None
            self._thread.call(self._stack.aclose)
        self._thread.close()

    async def _run(self, prompts: Sequence[Any]) -> list[Rolled]:
        self._running = asyncio.current_task()
        try:
            return await self._roll_out(prompts, await self._open())
        finally:
            self._running = None

    async def _roll_out(self, prompts: Sequence[Any], parts: Parts) -> list[Rolled]:
        tasks = [self._make_task(prompt) for prompt in prompts]
        counts: dict[Task, int] = {}
        for task in tasks:
            counts[task] = counts.get(task, 0) + 1
        records: dict[Task, list[RolloutRecord]] = {task: [] for task in counts}
        for n in sorted(set(counts.values())):
            chosen = [task for task, count in counts.items() if count == n]
            by_id = {task.id: task for task in chosen}
            for record in (await self._batch(chosen, n, parts).run()).records:
                records[by_id[record.task_id]].append(record)
        waiting = {task: iter(found) for task, found in records.items()}
        return [await parts.store.run(self._rolled, parts.store, next(waiting[task])) for task in tasks]

    async def _open(self) -> Parts:
        if self._parts is None:
            self._parts = await self._stack.enter_async_context(opened(self._model, self._keys, self._store))
            # A trainer that is done does not say so.
            atexit.register(self.close)
        return self._parts

    def _rolled(self, store: Store, record: RolloutRecord) -> Rolled:
        calls = store.calls(record.rollout_id)
        return Rolled(record, calls, list(samples(record, calls, self._policy)))

    def _batch(self, tasks: list[Task], n: int, parts: Parts) -> Batch:
        shared: dict[str, Any] = {
            "store": parts.store,
            "upstream": parts.upstream,
            "n": n,
            "parallel": self._parallel,
            "retries": self._retries,
        }
        if self._environment is None:
            agent = self._agent or "opencode"
            driven = load_agent(agent) if isinstance(agent, str) else agent
            return Batch(tasks, Plan(driven, parts.endpoint, **self._settings), **shared)
        loop = self._agent if isinstance(self._agent, LoopAgent) else LoopAgent()
        return LoopBatch(tasks, LoopPlan(loop, parts.endpoint, **self._settings), self._scene, **shared)

    def _scene(self, task: Task) -> Scene:
        where = self._environment
        if isinstance(where, str | type):
            seed = task.metadata.get("seed", seed_of({"prompt": task.instruction}))
            return ScoredScene(where, task.instruction, silent=self._silent, seed=seed)
        assert where is not None
        return where(task)


class ScoredScene(EnvironmentScene):
    """A session of an environment, with a reward also for who gets none."""

    def __init__(
        self, target: str | Callable[[], Any], prompt: str, *, silent: float | None, seed: int | None
    ) -> None:
        super().__init__(target, prompt, seed=seed)
        self._silent = silent

    async def score(self, messages: list[dict[str, Any]]) -> Reward:
        found = await super().score(messages)
        return Reward(self._silent) if found.value is None and self._silent is not None else found


def task_of(prompt: Any) -> Task:
    """A prompt as a task: a text, or the texts of the user in a conversation."""
    if isinstance(prompt, str):
        return Task(prompt)
    said = [text_of(message.get("content")) for message in prompt if message.get("role") == "user"]
    return Task("\n\n".join(said))


def text_of(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return str(content or "")
