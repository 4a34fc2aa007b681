"""Many rollouts of the loop, as any batch: groups, retries, resumption."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.batch import Batch
from paddock.rollouts.loop.rollout import LoopRollout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paddock.rollouts.loop.plan import LoopPlan
    from paddock.rollouts.loop.scene import Scene
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.task import Task


class LoopBatch(Batch):
    """`make_scene` is called for each rollout, with its task."""

    def __init__(
        self, tasks: Sequence[Task], plan: LoopPlan, make_scene: Callable[[Task], Scene], **options: Any
    ) -> None:
        super().__init__(tasks, plan, **options)
        self._loop_plan = plan
        self._make_scene = make_scene

    def _make_rollout(self, task: Task, record: RolloutRecord) -> LoopRollout:
        return LoopRollout(
            task,
            self._loop_plan,
            self._make_scene(task),
            store=self._store,
            upstream=self._upstream,
            record=record,
            on_change=self._on_change,
        )
