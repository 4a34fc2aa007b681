"""Where rollouts of a trainer come from: tasks with the config of their runs, opened once and kept open.

A source is one agent in one kind of place: sandboxes, an environment, a fleet. All sources of a trainer share the
store and the weight version. `OpenSource` runs groups; it limits how many rollouts of the source run at a time, and
its circuit breaker counts for all of them.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError
from paddock.export.samples import Policy, samples
from paddock.field_types import check_types
from paddock.rollouts.api import find_placement
from paddock.rollouts.batch import RETRIES, Batch
from paddock.rollouts.circuit_breaker import CircuitBreaker
from paddock.rollouts.config import RunConfig, make_config
from paddock.rollouts.context import make_agent, open_run, open_store
from paddock.rollouts.loop.agent import LoopAgent
from paddock.rollouts.loop.environment import EnvironmentSession
from paddock.rollouts.loop.session import ToolSessions
from paddock.train.episode import derive_seed
from paddock.train.sampled import SampledRollout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Sequence

    from paddock.capture.gate import CallGate
    from paddock.models.endpoint import Endpoint
    from paddock.models.weight_version import Weights
    from paddock.rollouts.context import RunContext
    from paddock.rollouts.loop.session import ToolSession
    from paddock.rollouts.scene import RemoteRun
    from paddock.store import Store
    from paddock.store.record import RolloutRecord
    from paddock.tasks.task import Task

    SessionTarget = str | type | Callable[[Task], ToolSession]
    """A URL or a class of an environment, or a function that makes the session of a task."""

PARALLEL = 8
logger = logging.getLogger("paddock.train")
NOT_FOR_SOURCES = ("resume", "batch_id", "fork")
"""Fields of `RunConfig` that name one batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Tasks, and how they are run. `Source.create` takes the fields of `RunConfig` as keywords."""

    name: str = "main"
    config: RunConfig
    """`n` is the size of a group, `parallel` the number of rollouts at a time."""
    tasks: Sequence[Task] = ()
    weight: float = 1.0
    """Its share of all groups, relative to the other sources."""
    environment: SessionTarget | None = None
    """Where the agent loop works, in place of the config's `env`."""
    silent: float | None = None
    """The reward of an episode of `environment` in which no step gave one. None leaves it out."""
    policy: Policy = field(default_factory=Policy)
    """What of a rollout may be trained on."""

    def __post_init__(self) -> None:
        check_types(self, "name", "config", "weight", "silent", "policy")
        for name in NOT_FOR_SOURCES:
            if getattr(self.config, name) is not None:
                raise ConfigError(f"{name} has no effect in the source {self.name!r}", hint="leave it out")
        if self.environment is not None and not isinstance(make_agent(self.config), LoopAgent):
            raise ConfigError("an agent works in a sandbox, not in an environment", hint="give one of the two")
        if not self.weight > 0:
            raise ConfigError(f"the weight of the source {self.name!r} is {self.weight}", hint="give more than 0")
        if len({task.id for task in self.tasks}) < len(self.tasks):
            hint = "give each task an id of its own"
            raise ConfigError(f"two tasks of the source {self.name!r} have the same id", hint=hint)

    @classmethod
    def create(
        cls,
        model: str | Endpoint | RunConfig,
        tasks: Sequence[Task] = (),
        *,
        name: str = "main",
        weight: float = 1.0,
        environment: SessionTarget | None = None,
        silent: float | None = None,
        policy: Policy | None = None,
        **fields: Any,
    ) -> Source:
        """`fields` are fields of `RunConfig`. The agent is OpenCode in a sandbox, or Paddock's loop if there is an
        environment."""
        if isinstance(model, RunConfig):
            config = make_config(model, fields)
        else:
            in_sandbox = environment is None and fields.get("env") is None
            agent = "opencode" if in_sandbox else LoopAgent.name
            config = make_config(None, {"model": model, "agent": agent, "parallel": PARALLEL, **fields})
        return cls(
            name=name,
            config=config,
            tasks=tasks,
            weight=weight,
            environment=environment,
            silent=silent,
            policy=policy or Policy(),
        )

    def sessions(self) -> ToolSessions | None:
        """What makes the sessions of an environment; None for tasks in sandboxes."""
        return None if self.environment is None else ToolSessions(self._make_session, "environment")

    def _make_session(self, task: Task) -> ToolSession:
        environment = self.environment
        if isinstance(environment, str | type):
            seed = task.metadata.get("seed", derive_seed({"prompt": task.instruction}))
            return EnvironmentSession(environment, task.instruction, seed=seed, default_reward=self.silent)
        assert environment is not None
        return environment(task)


class OpenSource:
    """A source whose store, model and connections are open. Made by `open_sources`."""

    def __init__(
        self, source: Source, context: RunContext, make_remote: Callable[[], RemoteRun] | None = None
    ) -> None:
        self.source = source
        self.context = context
        self.breaker = CircuitBreaker()
        self._make_remote = make_remote
        self._slots = asyncio.Semaphore(context.config.parallel)
        self._unsettled = 0

    @property
    def store(self) -> Store:
        """The store of the source's rollouts."""
        return self.context.store

    @property
    def has_free_slot(self) -> bool:
        """Whether fewer than `parallel` rollouts run or wait for their end."""
        return self._unsettled < self.context.config.parallel

    async def run(
        self,
        tasks: Sequence[Task],
        *,
        n: int,
        batch_id: str | None = None,
        members: Collection[int] | None = None,
        on_settled: Callable[[], None] | None = None,
    ) -> list[SampledRollout]:
        """Run `n` rollouts of each task, or those with the numbers `members`, and read what can be trained on.

        A batch with the id of an earlier one goes on where that one was. `on_settled` is called when a rollout has
        ended. Raises ConfigError if the earlier one was run with other settings.
        """
        context = replace(self.context, config=replace(self.context.config, n=n, batch_id=batch_id))
        batch = Batch(
            tasks,
            context,
            default_retries=RETRIES,
            on_settled=lambda _: settle(),
            make_remote=self._make_remote,
            breaker=self.breaker,
        )
        chosen = [member for member in batch.members if members is None or member.number in members]
        unsettled = len(chosen)
        self._unsettled += unsettled

        def settle() -> None:
            nonlocal unsettled
            unsettled, self._unsettled = unsettled - 1, self._unsettled - 1
            if on_settled is not None:
                on_settled()

        try:
            records = await batch.run_members(chosen, self._slots)
        finally:
            self._unsettled -= unsettled
        return [await self.store.run(self.read, record) for record in records]

    def read(self, record: RolloutRecord) -> SampledRollout:
        """A finished rollout with its calls and samples, read from the store."""
        calls = self.store.calls(record.rollout_id)
        return SampledRollout(record, calls, list(samples(record, calls, self.source.policy)))


@asynccontextmanager
async def open_sources(
    sources: Sequence[Source], weights: Weights, gate: CallGate
) -> AsyncIterator[dict[str, OpenSource]]:
    """Open all sources, by name. They share the gate, and the store of the first unless they name another one.

    Raises ConfigError for two sources of one name, and what `run_batch` raises.
    """
    if not sources:
        raise ConfigError("there is no source", hint="give one Source at least")
    if len({source.name for source in sources}) < len(sources):
        raise ConfigError("two sources have the same name", hint="Source(name=…)")
    first = sources[0].config.store
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(first))
        opened = {}
        for source in sources:
            shared = store if source.config.store in (None, first) else source.config.store
            config = replace(source.config, store=shared, weight_version=weights)
            context = await stack.enter_async_context(open_run(config, sessions=source.sessions()))
            context = replace(context, gate=gate)
            placement = find_placement(config.engine)
            make_remote = None
            if placement is not None:
                make_remote = await stack.enter_async_context(placement.open(context, logger.info))
            opened[source.name] = OpenSource(source, context, make_remote)
        yield opened
