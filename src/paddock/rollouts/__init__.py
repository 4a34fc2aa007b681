"""Run coding agents on tasks in sandboxes, with every token captured and a verifier that gives the reward.

    config = RunConfig(model="http://127.0.0.1:8000/v1", n=4, parallel=2)
    record = await run_rollout(Task(instruction="…", verifier="…"), config)
    result = await run_batch(load_tasks("tasks/"), config)

Names are imported when they are first used, so that a light part does not pay for a heavy one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.lazy import lazy_exports

if TYPE_CHECKING:
    from paddock.capture.trace import Call as Call
    from paddock.limits import Budget as Budget
    from paddock.limits import RolloutTimeouts as RolloutTimeouts
    from paddock.limits import SandboxLimits as SandboxLimits
    from paddock.rollouts.api import reverify as reverify
    from paddock.rollouts.api import run_batch as run_batch
    from paddock.rollouts.api import run_rollout as run_rollout
    from paddock.rollouts.batch import BatchResult as BatchResult
    from paddock.rollouts.config import RunConfig as RunConfig
    from paddock.rollouts.fork import fork as fork
    from paddock.store import Store as Store
    from paddock.store.outcome import Outcome as Outcome
    from paddock.store.record import RolloutRecord as RolloutRecord
    from paddock.tasks.task import Task as Task
    from paddock.tasks.taskset import TaskSet as TaskSet
    from paddock.tasks.taskset import load_tasks as load_tasks

_MODULES = {
    "BatchResult": "paddock.rollouts.batch",
    "Budget": "paddock.limits",
    "Call": "paddock.capture.trace",
    "Outcome": "paddock.store.outcome",
    "RolloutRecord": "paddock.store.record",
    "RolloutTimeouts": "paddock.limits",
    "RunConfig": "paddock.rollouts.config",
    "SandboxLimits": "paddock.limits",
    "Store": "paddock.store",
    "Task": "paddock.tasks.task",
    "TaskSet": "paddock.tasks.taskset",
    "fork": "paddock.rollouts.fork",
    "load_tasks": "paddock.tasks.taskset",
    "reverify": "paddock.rollouts.api",
    "run_batch": "paddock.rollouts.api",
    "run_rollout": "paddock.rollouts.api",
}
__all__ = list(_MODULES)
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
