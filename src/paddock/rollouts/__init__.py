"""Run coding agents on tasks in sandboxes, with every token captured and a verifier that gives the reward.

    result = await run_rollout(Task(instruction="…", verifier="…"), model="http://127.0.0.1:8000/v1")
    batch = await run_batch(load_tasks("tasks/"), model="replay:script.json", n=4, parallel=2)

Names are imported when they are first used, so that a light part does not pay for a heavy one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddock.rollouts.batch import BatchResult as BatchResult
    from paddock.rollouts.limits import Budget as Budget
    from paddock.rollouts.limits import SandboxLimits as SandboxLimits
    from paddock.rollouts.limits import Timeouts as Timeouts
    from paddock.rollouts.outcome import Outcome as Outcome
    from paddock.rollouts.record import RolloutRecord as RolloutRecord
    from paddock.rollouts.runs import reverify as reverify
    from paddock.rollouts.runs import run_batch as run_batch
    from paddock.rollouts.runs import run_rollout as run_rollout
    from paddock.rollouts.store import Store as Store
    from paddock.rollouts.task import Task as Task
    from paddock.rollouts.taskset import TaskSet as TaskSet
    from paddock.rollouts.taskset import load_tasks as load_tasks
    from paddock.rollouts.trace import Call as Call

_HOMES = {
    "BatchResult": "batch",
    "Budget": "limits",
    "Call": "trace",
    "Outcome": "outcome",
    "RolloutRecord": "record",
    "SandboxLimits": "limits",
    "Store": "store",
    "Task": "task",
    "TaskSet": "taskset",
    "Timeouts": "limits",
    "load_tasks": "taskset",
    "reverify": "runs",
    "run_batch": "runs",
    "run_rollout": "runs",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"paddock.rollouts.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
