"""What many rollouts add up to: means with their uncertainty, pass@k, outcomes, tokens and time.

Also rewards over time, by batch and by weight version; batches; and the causes of rollouts that broke."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paddock.store import batches, reward_series, search
from paddock.store.reward_sums import RewardSums

if TYPE_CHECKING:
    import sqlite3

    from paddock.store.batches import BatchTotals
    from paddock.store.reward_series import Axis, Split
    from paddock.store.search import Search, TaskTotals

Z = 1.959963984540054
"""Of the normal distribution, for 95 %."""
KS = (1, 2, 4, 8)
BATCH_FIELDS = (
    "batch_id", "began", "last", "tasks", "running", "finished", "cancelled", "tokens", "done", "size", "agents",
    "models",
)  # fmt: skip
INTERVALS, INTERVALS_OF_LINES = 48, 16
"""Of time, in a chart of one line or of several."""


def stats(connection: sqlite3.Connection, condition: Search) -> dict[str, Any]:
    condition = search.find(connection, condition)
    tasks = search.by_task(connection, condition)
    outcomes: Counter[str] = Counter()
    for task in tasks:
        outcomes.update(task.outcomes)
    running = outcomes.pop(search.RUNNING, 0)
    rewards = RewardSums()
    for task in tasks:
        rewards.add(task.rewards)
    p50, p95 = search.wall_quantiles(connection, condition, (0.5, 0.95))
    listed = tasks[: search.MAX_TASKS]
    latest = search.latest_rewards(connection, condition)
    return {
        "total": sum(outcomes.values()) + running,
        "running": running,
        "scored": rewards.scored,
        "passed": rewards.passed,
        "mean_reward": mean(rewards),
        "ci": confidence(rewards),
        "outcomes": dict(outcomes),
        "prompt_tokens": sum(task.prompt_tokens for task in tasks),
        "completion_tokens": sum(task.completion_tokens for task in tasks),
        "wall": {"mean": _mean_wall(tasks), "p50": p50, "p95": p95},
        "tasks": [_task(task, latest.get(task.task_id, [])) for task in listed],
        "task_count": len(tasks),
    }


def _task(task: TaskTotals, rewards: list[float]) -> dict[str, Any]:
    outcomes = dict(task.outcomes)
    running = outcomes.pop(search.RUNNING, 0)
    return {
        "task_id": task.task_id,
        "count": task.count,
        "running": running,
        "scored": task.rewards.scored,
        "mean": mean(task.rewards),
        "ci": confidence(task.rewards),
        "pass": {str(k): pass_at(k, task.rewards.scored, task.rewards.passed) for k in KS},
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


def mean(rewards: RewardSums) -> float | None:
    return rewards.total / rewards.scored if rewards.scored else None


def confidence(rewards: RewardSums) -> list[float] | None:
    """The 95 % interval of the mean reward: Wilson's if every reward is 0 or 1, else the normal one."""
    number = rewards.scored
    if not number:
        return None
    centre = rewards.total / number
    if rewards.binary == number:
        return wilson(centre, number)
    if number < 2:
        return None
    spread = max(0.0, rewards.squares / number - centre * centre) * number / (number - 1)
    half = Z * math.sqrt(spread / number)
    return [centre - half, centre + half]


def wilson(share: float, number: int) -> list[float]:
    scale = 1 + Z * Z / number
    centre = (share + Z * Z / (2 * number)) / scale
    half = Z * math.sqrt(share * (1 - share) / number + Z * Z / (4 * number * number)) / scale
    return [max(0.0, centre - half), min(1.0, centre + half)]


# -- rewards over time, batches, causes ---------------------------------------------------------------


def learning(connection: sqlite3.Connection, condition: Search, axis: Axis, split: Split | None) -> dict[str, Any]:
    """Rewards as lines of points, each with its 95 % interval."""
    series = reward_series.read_series(
        connection,
        search.find(connection, condition),
        axis=axis,
        split=split,
        intervals=INTERVALS if split is None else INTERVALS_OF_LINES,
    )
    lines = [
        {"name": name, "points": [_point(place, sums) for place, sums in sorted(points.items()) if sums.scored]}
        for name, points in series.lines.items()
    ]
    return {
        "by": axis,
        "split": split,
        "places": series.places,
        "width": series.width,
        "lines": lines,
        "line_count": series.line_count,
    }


def _point(place: int, sums: RewardSums) -> dict[str, Any]:
    return {"place": place, "mean": mean(sums), "ci": confidence(sums), "scored": sums.scored, "count": sums.count}


def list_batches(connection: sqlite3.Connection, batch: str | None, offset: int, limit: int) -> dict[str, Any]:
    total, page = batches.read_batches(connection, batch=batch, offset=offset, limit=limit)
    return {"total": total, "offset": offset, "batches": [_batch(each) for each in page]}


def _batch(batch: BatchTotals) -> dict[str, Any]:
    rewards = batch.rewards
    values = {name: getattr(batch, name) for name in BATCH_FIELDS}
    return {
        **values,
        "count": rewards.count,
        "scored": rewards.scored,
        "passed": rewards.passed,
        "mean": mean(rewards),
        "ci": confidence(rewards),
    }


def list_causes(connection: sqlite3.Connection, condition: Search) -> dict[str, Any]:
    total, causes = batches.read_causes(connection, search.find(connection, condition))
    return {"total": total, "causes": [asdict(cause) for cause in causes]}


def _mean_wall(tasks: list[TaskTotals]) -> float | None:
    number = sum(task.walls for task in tasks)
    return sum(task.wall_sum for task in tasks) / number if number else None
