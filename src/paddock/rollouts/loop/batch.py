"""Many rollouts of the loop, as any batch: groups, retries, resumption."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.errors import StoreError
from paddock.rollouts.batch import Batch, Member
from paddock.rollouts.loop.rollout import LoopRollout
from paddock.rollouts.outcome import Outcome
from paddock.rollouts.record import RolloutRecord
from paddock.rollouts.rollout import new_rollout_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paddock.rollouts.loop.plan import LoopPlan
    from paddock.rollouts.loop.scene import Scene
    from paddock.rollouts.task import Task


class LoopBatch(Batch):
    """`make_scene` is called for each rollout, with its task."""

    def __init__(
        self, tasks: Sequence[Task], plan: LoopPlan, make_scene: Callable[[Task], Scene], **options: Any
    ) -> None:
        super().__init__(tasks, plan, **options)
        self._loop_plan = plan
        self._make_scene = make_scene

    async def _run_once(self, member: Member, attempt: int) -> RolloutRecord:
        record = RolloutRecord(
            rollout_id=new_rollout_id(),
            task_id=member.task.id,
            batch_id=self.batch_id,
            member=member.number,
            attempt=attempt,
        )
        rollout = LoopRollout(
            member.task,
            self._loop_plan,
            self._make_scene(member.task),
            store=self._store,
            upstream=self._upstream,
            record=record,
            on_change=self._on_change,
        )
        try:
            return await rollout.run()
        except StoreError as error:
            # It could not be written down; the others may still have more luck.
            record.outcome, record.error = Outcome.ENVIRONMENT, error.message
            return record
