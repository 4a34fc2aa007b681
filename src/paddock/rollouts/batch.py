"""Many rollouts: so many of each task, so many at a time, none of them in the way of another.

Each task has a group of `n` members. A member that broke for reasons outside the policy is run again
as a new rollout, alone; the rest of its group is left as it is. What keeps all of them out is tried
again by one of them only. A batch that was stopped goes on where it was (see `resume`): members that have
an outcome of their own are not run again.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from paddock.errors import ConfigError, StoreError
from paddock.rollouts.entrance import Entrance
from paddock.rollouts.outcome import Outcome
from paddock.rollouts.record import RolloutRecord
from paddock.rollouts.resume import check_same, is_settled
from paddock.rollouts.rollout import WORKING, Rollout, new_rollout_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paddock.rollouts.capture import Upstream
    from paddock.rollouts.plan import Plan
    from paddock.rollouts.store import Store
    from paddock.rollouts.task import Task

    Place: TypeAlias = Callable[..., Rollout]

RETRIES = 2
"""How often a member is run again after a failure that was not the policy's."""
PAUSE = 0.5
"""Seconds before the first of them; doubled each time."""
LONGEST_PAUSE = 30.0


@dataclass(frozen=True, slots=True)
class Member:
    """One of the `n` rollouts that a task's group consists of."""

    task: Task
    number: int


@dataclass(slots=True)
class Group:
    """What became of the members of one task."""

    task_id: str
    records: list[RolloutRecord] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        return [record.reward for record in self.records if record.reward is not None]

    @property
    def mean(self) -> float | None:
        rewards = self.rewards
        return sum(rewards) / len(rewards) if rewards else None

    def pass_at(self, k: int, *, passing: float = 1.0) -> float | None:
        """The chance that one of `k` samples passes, without bias; None if too few have a reward."""
        total = len(self.rewards)
        if not 0 < k <= total:
            return None
        failed = total - sum(reward >= passing for reward in self.rewards)
        return 1.0 - math.comb(failed, k) / math.comb(total, k)


@dataclass(frozen=True, slots=True)
class BatchResult:
    batch_id: str
    records: list[RolloutRecord]
    """The last rollout of each member, in the order of tasks and members."""

    @property
    def groups(self) -> list[Group]:
        groups: dict[str, Group] = {}
        for record in self.records:
            groups.setdefault(record.task_id, Group(record.task_id)).records.append(record)
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
    """Runs the members of a batch. `on_change` hears of every move of every rollout, `on_settled` of the
    record that a member ends up with. `place` takes what `Rollout` takes, and makes one that runs elsewhere."""

    def __init__(
        self,
        tasks: Sequence[Task],
        plan: Plan,
        *,
        store: Store,
        upstream: Upstream,
        n: int = 1,
        parallel: int = 1,
        retries: int = RETRIES,
        batch_id: str | None = None,
        on_change: Callable[[Rollout], None] | None = None,
        on_settled: Callable[[RolloutRecord], None] | None = None,
        place: Place | None = None,
    ) -> None:
        if n < 1 or parallel < 1 or retries < 0:
            raise ConfigError(
                f"n is {n}, parallel is {parallel}, retries is {retries}",
                hint="n and parallel start at 1, retries at 0",
            )
        if len({task.id for task in tasks}) < len(tasks):
            raise ConfigError("two tasks of the batch have the same id", hint="give each task an id of its own")
        self.batch_id = batch_id or new_batch_id()
        self.plan = plan
        self.members = [Member(task, number) for task in tasks for number in range(n)]
        self._store = store
        self._upstream = upstream
        self._parallel = parallel
        self._retries = retries
        self._watcher = on_change
        self._on_change = self._moved
        self._on_settled = on_settled
        self._place = place
        self._entrance = Entrance()

    async def run(self) -> BatchResult:
        """Every member to its outcome. Cancelling it cancels the rollouts that are under way."""
        settled = await self._store.run(self._settled)
        slots = asyncio.Semaphore(self._parallel)

        async def settle(member: Member) -> RolloutRecord:
            known = settled.get((member.task.hash, member.task.id, member.number))
            record = known or await self._run_member(member, slots)
            if self._on_settled is not None:
                self._on_settled(record)
            return record

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(settle(member)) for member in self.members]
        return BatchResult(self.batch_id, [task.result() for task in running])

    def set_weight_version(self, version: str | int | None) -> None:
        """The model has other weights from now on: calls that begin keep this version."""
        self.plan.weights.set(version)

    def _settled(self) -> dict[tuple[str, str, int], RolloutRecord]:
        """Members of an earlier run of this batch that need not be run again.

        Raises ConfigError if that run had another agent, model, sampling or task."""
        earlier = self._store.list(batch_id=self.batch_id, newest_first=False)
        tasks = list({member.task.id: member.task for member in self.members}.values())
        check_same(self.batch_id, earlier, tasks, self.plan.describe())
        settled = (record for record in earlier if is_settled(record))
        return {(record.task_hash, record.task_id, record.member): record for record in settled}

    async def _run_member(self, member: Member, slots: asyncio.Semaphore) -> RolloutRecord:
        attempt = 0
        while True:
            async with slots:
                record = await self._admit(member, attempt)
            if record.outcome is None or is_settled(record) or record.attempt >= self._retries:
                return record
            if self._entrance.refused is not None:
                return record
            await asyncio.sleep(pause(record.attempt))
            attempt = record.attempt + 1

    async def _admit(self, member: Member, attempt: int) -> RolloutRecord:
        """Run it, unless nobody can be: who is the first to be kept out tries again for all."""
        entrance = self._entrance
        await entrance.decided()
        if entrance.refused is not None:
            return (await self._run_once(member, attempt, like=entrance.refused))[0]
        record, kept_out = await self._run_once(member, attempt)
        if not kept_out:
            return record
        if not entrance.claim():
            await entrance.decided()
            return record
        try:
            while kept_out and record.attempt < self._retries and not entrance.is_open:
                await asyncio.sleep(pause(record.attempt))
                record, kept_out = await self._run_once(member, record.attempt + 1)
        finally:
            entrance.decide(record if kept_out else None)
        return record

    async def _run_once(
        self, member: Member, attempt: int, like: RolloutRecord | None = None
    ) -> tuple[RolloutRecord, bool]:
        """Run it to its outcome, or end it `like` another. Also: whether it was kept out."""
        record = RolloutRecord(
            rollout_id=new_rollout_id(),
            task_id=member.task.id,
            batch_id=self.batch_id,
            member=member.number,
            attempt=attempt,
        )
        rollout = self.rollout(member.task, record)
        try:
            ended = await (rollout.run() if like is None else rollout.end_like(like))
        except StoreError as error:
            # It could not be written down; the others may still have more luck.
            record.outcome, record.error = Outcome.ENVIRONMENT, error.message
            return record, False
        return ended, rollout.kept_out

    def _moved(self, rollout: Rollout) -> None:
        if rollout.record.stage == WORKING:
            self._entrance.enter()
        if self._watcher is not None:
            self._watcher(rollout)

    def rollout(self, task: Task, record: RolloutRecord) -> Rollout:
        """One that has not begun, of this process or wherever it is placed."""
        if self._place is None:
            return self._make_rollout(task, record)
        return self._place(
            task,
            self.plan,
            store=self._store,
            upstream=self._upstream,
            record=record,
            on_change=self._on_change,
        )

    def _make_rollout(self, task: Task, record: RolloutRecord) -> Rollout:
        return Rollout(
            task,
            self.plan,
            store=self._store,
            upstream=self._upstream,
            record=record,
            on_change=self._on_change,
        )


def pause(attempt: int) -> float:
    """Seconds to wait after a try that broke."""
    return min(LONGEST_PAUSE, PAUSE * 2.0**attempt)


def new_batch_id() -> str:
    return f"b{int(time.time()):08x}{secrets.token_hex(4)}"
