"""Rollouts for a trainer that brings prompts: an agent in a sandbox, or a model that acts in an environment.

Equal prompts are members of one group. Works on a thread of its own, so that a trainer needs no event loop, and
keeps the store, the model and the connections open from one call to the next.
"""

from __future__ import annotations

import asyncio
import atexit
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError
from paddock.export.samples import Policy, Sample, samples
from paddock.loop_thread import LoopThread
from paddock.rollouts.batch import Batch
from paddock.rollouts.config import RunConfig, make_config
from paddock.rollouts.context import make_agent, open_run
from paddock.rollouts.loop.agent import LoopAgent
from paddock.rollouts.loop.environment import EnvironmentSession
from paddock.rollouts.loop.session import ToolSessions
from paddock.tasks.task import Task
from paddock.train.episode import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paddock.capture.trace import Call
    from paddock.models.endpoint import Endpoint
    from paddock.rollouts.context import RunContext
    from paddock.rollouts.loop.session import ToolSession
    from paddock.store import Store
    from paddock.store.record import RolloutRecord

PARALLEL = 8
NOT_FOR_PROMPTS = ("n", "resume", "batch_id", "env", "seed", "engine")
"""Fields of `RunConfig` that the prompts decide, or that need a whole batch."""


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """One rollout, and what can be trained on of it."""

    record: RolloutRecord
    calls: list[Call]
    samples: list[Sample]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What the model said."""
        return [call.message for call in self.calls if call.ok]


class PromptRollouts:
    """Rolls out prompts. `environment` is a URL or a class, or a function that makes the session of a task; without
    it, the config's agent works on the tasks in a sandbox. `silent` is what an episode is worth in which no step gave
    a reward, say because the model called no tool; None leaves it out. `fields` are fields of `RunConfig`."""

    def __init__(
        self,
        model: str | Endpoint | RunConfig,
        *,
        environment: str | type | Callable[[Task], ToolSession] | None = None,
        make_task: Callable[[Any], Task] | None = None,
        silent: float | None = None,
        policy: Policy | None = None,
        **fields: Any,
    ) -> None:
        if unused := next((name for name in NOT_FOR_PROMPTS if name in fields), None):
            raise ConfigError(f"{unused} has no effect: each prompt is one rollout", hint="leave it out")
        if isinstance(model, RunConfig):
            self._config = make_config(model, fields)
        else:
            agent = "opencode" if environment is None else LoopAgent.name
            self._config = make_config(None, {"model": model, "agent": agent, "parallel": PARALLEL, **fields})
        if environment is not None and not isinstance(make_agent(self._config), LoopAgent):
            raise ConfigError("an agent works in a sandbox, not in an environment", hint="give one of the two")
        self._environment = environment
        self._make_task = make_task or make_prompt_task
        self._silent = silent
        self._policy = policy or Policy()
        self._thread = LoopThread("paddock-rollouts")
        self._stack = AsyncExitStack()
        self._context: RunContext | None = None
        self._running: asyncio.Task[Any] | None = None

    def run(self, prompts: Sequence[Any]) -> list[SampledRollout]:
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
        if self._context is not None:
            self._context = None
            self._thread.call(self._stack.aclose)
        self._thread.close()

    async def _run(self, prompts: Sequence[Any]) -> list[SampledRollout]:
        self._running = asyncio.current_task()
        try:
            return await self._roll_out(prompts, await self._open())
        finally:
            self._running = None

    async def _open(self) -> RunContext:
        if self._context is None:
            sessions = None
            if self._environment is not None:
                sessions = ToolSessions(self._make_session, "environment")
            self._context = await self._stack.enter_async_context(open_run(self._config, sessions=sessions))
            # A trainer does not say when it is done.
            atexit.register(self.close)
        return self._context

    async def _roll_out(self, prompts: Sequence[Any], context: RunContext) -> list[SampledRollout]:
        tasks = [self._make_task(prompt) for prompt in prompts]
        counts: dict[Task, int] = {}
        for task in tasks:
            counts[task] = counts.get(task, 0) + 1
        records: dict[Task, list[RolloutRecord]] = {task: [] for task in counts}
        for n in sorted(set(counts.values())):
            group = [task for task, count in counts.items() if count == n]
            by_id = {task.id: task for task in group}
            batch = Batch(group, replace(context, config=replace(context.config, n=n)))
            for record in (await batch.run()).records:
                records[by_id[record.task_id]].append(record)
        unread = {task: iter(of_task) for task, of_task in records.items()}
        store = context.store
        return [await store.run(self._read, store, next(unread[task])) for task in tasks]

    def _read(self, store: Store, record: RolloutRecord) -> SampledRollout:
        calls = store.calls(record.rollout_id)
        return SampledRollout(record, calls, list(samples(record, calls, self._policy)))

    def _make_session(self, task: Task) -> ToolSession:
        environment = self._environment
        if isinstance(environment, str | type):
            seed = task.metadata.get("seed", derive_seed({"prompt": task.instruction}))
            return EnvironmentSession(environment, task.instruction, seed=seed, default_reward=self._silent)
        assert environment is not None
        return environment(task)


def make_prompt_task(prompt: Any) -> Task:
    """A prompt as a task: a text, or the texts of the user in a conversation."""
    if isinstance(prompt, str):
        return Task(prompt)
    texts = [message_text(message.get("content")) for message in prompt if message.get("role") == "user"]
    return Task("\n\n".join(texts))


def message_text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return str(content or "")
