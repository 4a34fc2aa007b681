"""Tinker's cookbook: a group of environments, each a rollout of ours. Importing this imports the cookbook.

    PaddockGroupBuilder(task, {"model_name": name, "tokenizer": "Qwen/Qwen3-8B", "agent": "opencode", "n": 8})

Tinker samples: the observation of an environment is the prompt of the agent's next model call, as token ids (token
mode), and the action is what the agent gets. The reward comes with the last action. A builder holds values only, so
it can be pickled.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import tinker
from tinker_cookbook.rl.types import ActionExtra, Env, EnvGroupBuilder, StepResult, StopReason

from paddock.capture.gate import CallGate
from paddock.errors import RolloutError
from paddock.models.weight_version import Weights
from paddock.train.policy_server import PolicyServer, PromptCall, PromptQueue
from paddock.train.sources import OpenSource, Source, open_sources

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paddock.models.endpoint import Endpoint
    from paddock.tasks.task import Task
    from paddock.train.sampled import SampledRollout

_OPEN: dict[tuple[asyncio.AbstractEventLoop, str], OpenGroups] = {}
"""Groups with the same options share a store and connections, one set for each event loop."""


class PaddockGroupBuilder(EnvGroupBuilder):  # type: ignore[misc]
    """The options are those of `Source.create`: `model_name`, `tokenizer`, `renderer`, `agent` or `environment`, and
    `n`, the size of the group."""

    def __init__(self, task: Task, options: Mapping[str, Any]) -> None:
        self._task = task
        self._options = dict(options)

    async def make_envs(self) -> Sequence[Env]:
        opened = await open_groups(self._options)
        return [RolloutEnv(opened, self._task) for _ in range(opened.source.source.config.n)]

    async def compute_group_rewards(
        self, trajectory_group: list[Any], env_group: Sequence[Any]
    ) -> list[tuple[float, dict[str, float]]]:
        """The rewards came with the last actions; here is what else is known."""
        return [(0.0, env.metrics()) for env in env_group]

    def logging_tags(self) -> list[str]:
        return [self._task.id]


class RolloutEnv(Env):  # type: ignore[misc]
    """One rollout. It runs while Tinker samples its model calls."""

    def __init__(self, opened: OpenGroups, task: Task) -> None:
        self._opened = opened
        self._task = task
        self._queue: PromptQueue | None = None
        self._call: PromptCall | None = None
        self._running: asyncio.Task[list[SampledRollout]] | None = None

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        """Raises RolloutError if the rollout ended without a model call."""
        self._queue = self._opened.server.add()
        source = self._opened.at(self._queue.endpoint)
        self._running = asyncio.create_task(source.run([self._task], n=1))
        call = await self._next_call()
        if call is None:
            raise RolloutError(f"the agent made no model call: {self._ended().record.error}")
        return tinker.ModelInput.from_ints(call.prompt), call.stop_ids

    async def step(self, action: list[int], *, extra: ActionExtra | None = None) -> StepResult:
        """Raises RolloutError if the rollout ended without a reward: it is unknown, not 0."""
        assert self._call is not None, "initial_observation comes first"
        self._call.reply(action, (extra or {}).get("stop_reason", "stop"))
        call = await self._next_call()
        if call is not None:
            observation = tinker.ModelInput.from_ints(call.prompt)
            return StepResult(0.0, False, observation, call.stop_ids)
        record = self._ended().record
        if record.reward is None:
            raise RolloutError(
                f"rollout {record.rollout_id} has no reward: {record.reward_reason or record.error}",
                hint=f"paddock trace show {record.rollout_id}",
            )
        stop = {f"stop/{StopReason.COMPLETED}": 1.0}
        return StepResult(record.reward, True, tinker.ModelInput.from_ints([]), [], stop)

    def metrics(self) -> dict[str, float]:
        if self._running is None or not self._running.done() or self._running.cancelled():
            return {}
        record = self._ended().record
        parts = {f"reward/{name}": value for name, value in record.reward_parts.items()}
        return {"calls": float(record.call_count), "seconds": record.wall_s or 0.0, **parts}

    async def close(self) -> None:
        """Cancel the rollout, if it still runs."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._queue is not None:
            self._opened.server.remove(self._queue)

    async def _next_call(self) -> PromptCall | None:
        """The agent's next model call; None if the rollout has ended."""
        assert self._queue is not None
        assert self._running is not None
        waiting = asyncio.ensure_future(self._queue.calls.get())
        try:
            await asyncio.wait([waiting, self._running], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            if not waiting.done():
                waiting.cancel()
        self._call = waiting.result() if waiting.done() and not waiting.cancelled() else None
        if self._call is None:
            self._opened.server.remove(self._queue)
        return self._call

    def _ended(self) -> SampledRollout:
        assert self._running is not None
        return self._running.result()[0]


@dataclass(slots=True)
class OpenGroups:
    """What groups with the same options share. `close` ends it; otherwise it ends with the process."""

    source: OpenSource
    server: PolicyServer
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def at(self, endpoint: Endpoint) -> OpenSource:
        """The source, with another endpoint."""
        return OpenSource(self.source.source, replace(self.source.context, endpoint=endpoint))


async def open_groups(options: Mapping[str, Any]) -> OpenGroups:
    key = (asyncio.get_running_loop(), repr(sorted(options.items(), key=str)))
    if key not in _OPEN:
        fields = {"token_mode": True, "parallel": 1024, **options}
        name = str(fields.pop("model_name", "policy"))
        stack = AsyncExitStack()
        server = await stack.enter_async_context(PolicyServer(name))
        source = Source.create(server.add().endpoint, **fields)
        opened = await stack.enter_async_context(open_sources([source], Weights(), CallGate()))
        _OPEN[key] = OpenGroups(opened[source.name], server, stack)
    return _OPEN[key]


async def close_groups() -> None:
    """Close what was opened on this event loop."""
    loop = asyncio.get_running_loop()
    for key in [key for key in _OPEN if key[0] is loop]:
        await _OPEN.pop(key).stack.aclose()
