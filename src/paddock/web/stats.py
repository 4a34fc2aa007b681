"""What many rollouts add up to: means with their uncertainty, pass@k, outcomes, tokens and time."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from paddock.store import search

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from paddock.store.search import Search, TaskTotals

Z = 1.959963984540054
"""Of the normal distribution, for 95 %."""
KS = (1, 2, 4, 8)
BUCKETS = 120


def stats(connection: sqlite3.Connection, condition: Search) -> dict[str, Any]:
    tasks = search.by_task(connection, condition)
    outcomes: Counter[str] = Counter()
    for task in tasks:
        outcomes.update(task.outcomes)
    running = outcomes.pop(search.RUNNING, 0)
    scored = sum(task.scored for task in tasks)
    p50, p95 = search.wall_quantiles(connection, condition, (0.5, 0.95))
    listed = tasks[: search.MAX_TASKS]
    rewards = search.latest_rewards(connection, condition)
    return {
        "total": sum(outcomes.values()) + running,
        "running": running,
        "scored": scored,
        "mean_reward": sum(task.reward_sum for task in tasks) / scored if scored else None,
        "ci": confidence(tasks),
        "outcomes": dict(outcomes),
        "prompt_tokens": sum(task.prompt_tokens for task in tasks),
        "completion_tokens": sum(task.completion_tokens for task in tasks),
        "wall": {"mean": _mean_wall(tasks), "p50": p50, "p95": p95},
        "series": [
            {"at": bucket.at, "mean": bucket.total / bucket.scored if bucket.scored else None, "count": bucket.count}
            for bucket in search.over_time(connection, condition, BUCKETS)
        ],
        "tasks": [_task(task, rewards.get(task.task_id, [])) for task in listed],
        "task_count": len(tasks),
    }


def _task(task: TaskTotals, rewards: list[float]) -> dict[str, Any]:
    outcomes = dict(task.outcomes)
    running = outcomes.pop(search.RUNNING, 0)
    return {
        "task_id": task.task_id,
        "count": task.count,
        "running": running,
        "scored": task.scored,
        "mean": task.reward_sum / task.scored if task.scored else None,
        "ci": confidence([task]),
        "pass": {str(k): pass_at(k, task.scored, task.passed) for k in KS},
        "outcomes": outcomes,
        "tokens": task.prompt_tokens + task.completion_tokens,
        "wall_mean": _mean_wall([task]),
        "rewards": rewards,
    }


def pass_at(k: int, total: int, passed: int) -> float | None:
    """The chance that one of `k` samples passes, without bias; None if there are fewer than `k`."""
    if not 0 < k <= total:
        return None
    # A product, since factorials of many thousands have no float.
    failing = 1.0
    for drawn in range(k):
        failing *= max(0, total - passed - drawn) / (total - drawn)
    return 1.0 - failing


def confidence(tasks: Sequence[TaskTotals]) -> list[float] | None:
    """The 95 % interval of the mean reward: Wilson's if every reward is 0 or 1, else the normal one."""
    number = sum(task.scored for task in tasks)
    if not number:
        return None
    total = sum(task.reward_sum for task in tasks)
    mean = total / number
    if all(task.binary == task.scored for task in tasks):
        return wilson(mean, number)
    if number < 2:
        return None
    spread = max(0.0, sum(task.reward_squares for task in tasks) / number - mean * mean) * number / (number - 1)
    half = Z * math.sqrt(spread / number)
    return [mean - half, mean + half]


def wilson(share: float, number: int) -> list[float]:
    scale = 1 + Z * Z / number
    centre = (share + Z * Z / (2 * number)) / scale
    half = Z * math.sqrt(share * (1 - share) / number + Z * Z / (4 * number * number)) / scale
    return [max(0.0, centre - half), min(1.0, centre + half)]


def _mean_wall(tasks: Sequence[TaskTotals]) -> float | None:
    number = sum(task.walls for task in tasks)
    return sum(task.wall_sum for task in tasks) / number if number else None
