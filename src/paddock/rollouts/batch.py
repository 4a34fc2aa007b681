"""A batch: `n` rollouts of each task, `parallel` at a time.

Each task has a group of `n` members. A member that broke for reasons outside the policy is run again, alone, as a new
rollout; the rest of its group is left as it is. When a shared dependency is down, one of them retries for all (see
`circuit_breaker`). A batch that was stopped goes on where it was (see `resume`): members that have an outcome of
their own are not run again.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError, StoreError
from paddock.retry import Backoff
from paddock.rollouts.circuit_breaker import CircuitBreaker
from paddock.rollouts.fork import ForkPoint
from paddock.rollouts.resume import (
    check_is_its_task,
    check_same_fork,
    check_unchanged,
    has_diverged,
    has_larger_limits,
    is_settled,
)
from paddock.rollouts.rollout import Rollout, new_rollout_id
from paddock.rollouts.scene import AGENT_STAGE
from paddock.sandbox import choose_backend
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from paddock.capture.gate import InFlight, PauseReport
    from paddock.models.weight_version import Version
    from paddock.rollouts.context import RunContext
    from paddock.rollouts.scene import RemoteRun
    from paddock.tasks.task import Task

MemberKey = tuple[str, str, int]
"""The hash and the id of the task, and the member's number."""
RETRIES = 2
"""How often a member is run again after a failure that was not the policy's."""
PAUSE_SECONDS = 0.5
"""Before the first retry; doubled each time."""
LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Member:
    """One of the `n` rollouts that a task's group consists of."""

    task: Task
    number: int

    @property
    def key(self) -> MemberKey:
        """What identifies the member when a batch is resumed."""
        return (self.task.hash, self.task.id, self.number)


@dataclass(slots=True, repr=False)
class BatchGroup:
    """The records of one task's members."""

    task_id: str
    records: list[RolloutRecord] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<BatchGroup {self.task_id} records={len(self.records)} mean={self.mean}>"

    @property
    def rewards(self) -> list[float]:
        """The known rewards. Unknown ones are left out."""
        return [record.reward for record in self.records if record.reward is not None]

    @property
    def mean(self) -> float | None:
        """The mean of the known rewards; None if no reward is known."""
        rewards = self.rewards
        return sum(rewards) / len(rewards) if rewards else None

    def pass_at(self, k: int, *, passing: float = 1.0) -> float | None:
        """The chance that one of `k` samples passes, without bias; None if too few have a reward."""
        total = len(self.rewards)
        if not 0 < k <= total:
            return None
        failed = total - sum(reward >= passing for reward in self.rewards)
        return 1.0 - math.comb(failed, k) / math.comb(total, k)


@dataclass(frozen=True, slots=True, repr=False)
class BatchResult:
    """What a batch gave: the last rollout of each member, and the counts over them."""

    batch_id: str
    """The name of the batch in the store."""
    records: list[RolloutRecord]
    """The last rollout of each member, in the order of tasks and members."""

    def __repr__(self) -> str:
        summary = self.summary()
        outcomes = ", ".join(f"{count} {name}" for name, count in summary["outcomes"].items())
        return f"<BatchResult {self.batch_id} {outcomes or 'empty'} mean_reward={summary['mean_reward']}>"

    @property
    def groups(self) -> list[BatchGroup]:
        """The records by task."""
        groups: dict[str, BatchGroup] = {}
        for record in self.records:
            groups.setdefault(record.task_id, BatchGroup(record.task_id)).records.append(record)
        return list(groups.values())

    def summary(self) -> dict[str, Any]:
        """Counts that balance: every member has one outcome."""
        outcomes: dict[str, int] = defaultdict(int)
        for record in self.records:
            outcomes[str(record.outcome)] += 1
        rewards = [record.reward for record in self.records if record.reward is not None]
        return {
            "batch_id": self.batch_id,
            "rollouts": len(self.records),
            "outcomes": dict(outcomes),
            "rewarded": len(rewards),
            "mean_reward": sum(rewards) / len(rewards) if rewards else None,
            "trainable": sum(record.trainable for record in self.records),
        }


class Batch:
    """Runs the members of a batch. `on_change` is called with each rollout that changes, `on_settled` with the record
    that a member ends up with. `make_remote` makes the `RemoteRun` of each rollout; None runs them here. Batches that
    share their dependencies may share a `breaker`."""

    def __init__(
        self,
        tasks: Sequence[Task],
        context: RunContext,
        *,
        default_retries: int = RETRIES,
        on_change: Callable[[Rollout], None] | None = None,
        on_settled: Callable[[RolloutRecord], None] | None = None,
        make_remote: Callable[[], RemoteRun] | None = None,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        config = context.config
        if len({task.id for task in tasks}) < len(tasks):
            raise ConfigError("two tasks of the batch have the same id", hint="give each task an id of its own")
        if any(task.is_scored for task in tasks):
            choose_backend(config.sandbox, consent=config.consent)
        self.batch_id = config.resume or config.batch_id or new_batch_id()
        self.context = context
        self.members = [Member(task, number) for task in tasks for number in range(config.n)]
        self._store = context.store
        self._retries = default_retries if config.retries is None else config.retries
        self._on_change = on_change
        self._on_settled = on_settled
        self._make_remote = make_remote
        self._breaker = breaker or CircuitBreaker()
        self._sources: dict[MemberKey, RolloutRecord] = {}
        """The recorded rollout that a member of a resumed batch continues."""

    async def run(self) -> BatchResult:
        """Run every member to its outcome. Cancelling it cancels the running rollouts."""
        slots = asyncio.Semaphore(self.context.config.parallel)
        return BatchResult(self.batch_id, await self.run_members(self.members, slots))

    async def run_members(self, members: Sequence[Member], slots: asyncio.Semaphore) -> list[RolloutRecord]:
        """Run some members, as many at a time as `slots` has, which several batches may share. Returns their last
        records, in order."""
        settled = await self._store.run(self._settled_members)

        async def settle(member: Member) -> RolloutRecord:
            earlier = settled.get(member.key)
            record = earlier or await self._run_member(member, slots)
            if self._on_settled is not None:
                self._on_settled(record)
            return record

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(settle(member)) for member in members]
        return [task.result() for task in running]

    def set_weight_version(self, version: Version) -> None:
        """The model has other weights from now on: calls that begin keep this version."""
        self.context.weights.set(version)

    # -- pauses -------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Whether model calls are held back."""
        return self.context.gate.is_paused

    async def pause(self, in_flight: InFlight = "finish", timeout: float | None = None) -> PauseReport:
        """Hold back model calls until `resume`, and wait until none is at the inference engine, at most `timeout`
        seconds. Agents keep waiting for their answers, and no deadline counts the time.

        Calls at the engine finish. With `abort`, those of which the agent has received nothing are cut off, and asked
        again after `resume`. Pauses can be nested: each needs its own `resume`."""
        return await self.context.gate.pause(in_flight, timeout)

    def resume(self, weight_version: Version = None) -> None:
        """End a pause: set the weight version, unless it is None, then release the calls that wait."""
        if weight_version is not None:
            self.context.weights.set(weight_version)
        self.context.gate.resume()

    @asynccontextmanager
    async def paused(
        self, in_flight: InFlight = "finish", timeout: float | None = None, *, weight_version: Version = None
    ) -> AsyncIterator[PauseReport]:
        """A pause for the length of a block. The calls after it have the weight version, unless the block raises."""
        report = await self.pause(in_flight, timeout)
        try:
            yield report
        except BaseException:
            self.resume()
            raise
        self.resume(weight_version)

    # -- members ------------------------------------------------------------------------------------

    def _settled_members(self) -> dict[MemberKey, RolloutRecord]:
        """Members of an earlier run of this batch that need not be run again. Others continue where they ended.

        Raises ConfigError if that run had another agent, model, sampling, fork or task."""
        earlier = self._store.list(batch_id=self.batch_id, newest_first=False)
        tasks = list({member.task.id: member.task for member in self.members}.values())
        config, settled = self.context.config, {}
        check_unchanged(self.batch_id, earlier, tasks, self.context.describe())
        check_same_fork(self.batch_id, earlier, config.fork)
        if config.resume is not None:
            check_is_its_task(self.batch_id, earlier, tasks)
        by_id = {task.id: task for task in tasks}
        for record in earlier:
            key = (record.task_hash, record.task_id, record.member)
            if is_settled(record) and not has_larger_limits(record, config, by_id.get(record.task_id)):
                settled[key] = record
            else:
                self._offer_source(key, record)
        return settled

    def _offer_source(self, key: MemberKey, record: RolloutRecord) -> None:
        """Continue a member from this record if it has more calls than what it would continue from otherwise."""
        fork = self.context.config.fork
        replayed = 0 if fork is None or fork.at is None else fork.at
        current = self._sources.get(key)
        most = replayed + 1 if current is None else current.call_count
        if self._can_continue(record) and record.call_count >= most:
            self._sources[key] = record

    def _can_continue(self, record: RolloutRecord) -> bool:
        """Whether the calls of a record can be replayed in the next rollout of its member."""
        is_chosen = self.context.config.resume is not None and not self.context.config.from_start
        return is_chosen and record.call_count > 0 and not has_diverged(record)

    async def _run_member(self, member: Member, slots: asyncio.Semaphore) -> RolloutRecord:
        attempt = 0
        while True:
            async with slots:
                record = await self._run_unless_open(member, attempt)
            is_final = record.outcome is None or is_settled(record) or has_diverged(record)
            if is_final or record.attempt >= self._retries:
                return record
            if self._breaker.failure is not None:
                return record
            await asyncio.sleep(pause(record.attempt))
            attempt = record.attempt + 1

    async def _run_unless_open(self, member: Member, attempt: int) -> RolloutRecord:
        """Run it, unless the circuit breaker is open. The first that finds a dependency down retries for all."""
        breaker = self._breaker
        await breaker.wait_until_decided()
        if breaker.failure is not None:
            return (await self._run_once(member, attempt, like=breaker.failure))[0]
        record, is_down = await self._run_once(member, attempt)
        if not is_down:
            return record
        if not breaker.claim_retry():
            await breaker.wait_until_decided()
            return record
        try:
            while is_down and record.attempt < self._retries and not breaker.has_succeeded:
                await asyncio.sleep(pause(record.attempt))
                record, is_down = await self._run_once(member, record.attempt + 1)
        finally:
            breaker.decide(record if is_down else None)
        return record

    async def _run_once(
        self, member: Member, attempt: int, like: RolloutRecord | None = None
    ) -> tuple[RolloutRecord, bool]:
        """Run it to its outcome, or end it `like` another. Also: whether a shared dependency was down."""
        record = RolloutRecord(
            rollout_id=new_rollout_id(),
            task_id=member.task.id,
            batch_id=self.batch_id,
            batch_size=len(self.members),
            member=member.number,
            attempt=attempt,
        )
        remote = None if self._make_remote is None else self._make_remote()
        source = self._sources.get(member.key)
        point = None if source is None else ForkPoint(source=source.rollout_id, at=None)
        rollout = Rollout(member.task, self.context, record=record, on_change=self._follow, remote=remote, fork=point)
        try:
            ended = await (rollout.run() if like is None else rollout.end_like(like))
        except StoreError as error:
            # The store refused this record. Other members may still be stored, so the batch continues.
            record.outcome, record.error = Outcome.ENVIRONMENT, error.message
            return record, False
        if not is_settled(ended):
            self._offer_source(member.key, ended)
        return ended, rollout.is_dependency_down

    def _follow(self, rollout: Rollout) -> None:
        if rollout.record.stage == AGENT_STAGE:
            self._breaker.record_success()
        if self._on_change is not None:
            self._on_change(rollout)


def pause(attempt: int) -> float:
    """Seconds to wait before the retry that follows this attempt."""
    return Backoff(PAUSE_SECONDS, LONGEST_PAUSE_SECONDS).pause(attempt)


def new_batch_id() -> str:
    """An id that sorts by time."""
    return f"b{int(time.time()):08x}{secrets.token_hex(4)}"
