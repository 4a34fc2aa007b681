"""Checks all tasks of a set, some at a time, and reports each task on its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddock.testing.checks import Result
from paddock.testing.task import TaskCheck

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.tasks.task import Task
    from paddock.testing.checks import Announce

NO_FAULT = "other"
"""Counts failures that no common fault explains."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What the checks say about one task."""

    id: str
    hash: str
    results: tuple[Result, ...]

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if result.outcome == "failed"]

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def faults(self) -> set[str]:
        return {result.fault or NO_FAULT for result in self.failures}


async def check_tasks(tasks: Sequence[Task], *, parallel: int, announce: Announce) -> list[TaskReport]:
    """The reports in the order of the tasks. An exception in one check is the failure of that task."""
    slots = asyncio.Semaphore(parallel)
    done = 0

    async def check(task: Task) -> TaskReport:
        nonlocal done
        async with slots:
            announce(task.id, done, len(tasks))
            try:
                results = await TaskCheck(task).run()
            except Exception as error:
                results = [Result("the task can be checked", "failed", f"{type(error).__name__}: {error}")]
            done += 1
            announce(task.id, done, len(tasks))
        return TaskReport(task.id, task.hash, tuple(results))

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(check(task)) for task in tasks]
    return [each.result() for each in running]
