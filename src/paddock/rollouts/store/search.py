"""Questions about many rollouts at once: pages of a table, what there is to filter by, counts and sums.

Everything is answered by SQLite from the slim `figures`; heads are read only for the rows of a page.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from paddock.rollouts.store import figures

if TYPE_CHECKING:
    import sqlite3

Order = Literal["asc", "desc"]
SORTS = {
    "started": "started_at",
    "reward": "reward",
    "wall": "wall",
    "tokens": "tokens",
    "calls": "calls",
    "task": "task_id",
    "outcome": "outcome",
}
MOST_FACETS = 200
MOST_WORDS = 8
MOST_TASKS = 500
LATEST_REWARDS = 40
LATEST = 20_000


@dataclass(frozen=True, slots=True)
class Search:
    """Which rollouts; what is left out is not asked for."""

    task: str | None = None
    agent: str | None = None
    model: str | None = None
    batch: str | None = None
    outcomes: tuple[str, ...] = ()
    min_reward: float | None = None
    max_reward: float | None = None
    since: float | None = None
    until: float | None = None
    """Both in seconds since the epoch, by when a rollout began."""
    words: str | None = None
    """All of them, anywhere in id, task, model, agent, batch or error."""
    running: bool | None = None

    def where(self) -> tuple[str, list[Any]]:
        conditions: list[str] = []
        values: list[Any] = []

        def add(condition: str, *given: Any) -> None:
            conditions.append(condition)
            values.extend(given)

        for column, value in (
            ("task_id", self.task),
            ("agent", self.agent),
            ("model", self.model),
            ("batch_id", self.batch),
        ):
            if value is not None:
                add(f"{column} = ?", value)
        if self.outcomes:
            add(f"outcome IN ({', '.join('?' * len(self.outcomes))})", *self.outcomes)
        if self.running is not None:
            add("outcome = ''" if self.running else "outcome <> ''")
        for condition, number in (
            ("reward >= ?", self.min_reward),
            ("reward <= ?", self.max_reward),
            ("started_at >= ?", self.since),
            ("started_at <= ?", self.until),
        ):
            if number is not None:
                add(condition, number)
        for word in (self.words or "").lower().split()[:MOST_WORDS]:
            add("instr(words, ?) > 0", word)
        return (f"WHERE {' AND '.join(conditions)}" if conditions else ""), values


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """What the rollouts of one task add up to."""

    task_id: str
    outcomes: dict[str, int]
    scored: int
    passed: int
    binary: int
    """Rewards that are 0 or 1."""
    reward_sum: float
    reward_squares: float
    prompt_tokens: int
    completion_tokens: int
    wall_sum: float
    walls: int

    @property
    def count(self) -> int:
        return sum(self.outcomes.values())


@dataclass(frozen=True, slots=True)
class Span:
    """The rewards of the rollouts that began in one stretch of time."""

    at: float
    total: float
    scored: int
    count: int


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task in one batch."""

    batch_id: str
    task_id: str
    count: int
    scored: int
    mean: float | None
    members: list[int]


def page(
    connection: sqlite3.Connection, search: Search, *, sort: str, order: Order, offset: int, limit: int
) -> list[int]:
    """Keys of rollouts. Those without the value that is sorted by come last, whichever the order."""
    where, values = search.where()
    direction = "ASC" if order == "asc" else "DESC"
    # SQLite holds NULL for the smallest, which is last only if the largest comes first.
    nulls = " NULLS LAST" if order == "asc" else ""
    found = connection.execute(
        f"SELECT rollout FROM figures {where} ORDER BY {SORTS[sort]} {direction}{nulls}, rollout {direction}"
        " LIMIT ? OFFSET ?",
        (*values, limit, offset),
    )
    return [key for (key,) in found]


def count(connection: sqlite3.Connection, search: Search) -> int:
    where, values = search.where()
    return int(connection.execute(f"SELECT count(*) FROM figures {where}", values).fetchone()[0])


def facets(connection: sqlite3.Connection) -> dict[str, list[dict[str, Any]]]:
    """The values there are to filter by, each with how many rollouts have it, the most frequent first."""
    kinds: dict[str, Counter[str]] = {"agents": Counter(), "models": Counter(), "outcomes": Counter()}
    for *names, number in connection.execute(
        "SELECT agent, model, outcome, count(*) FROM figures GROUP BY agent, model, outcome"
    ):
        for counter, name in zip(kinds.values(), names, strict=True):
            counter[name] += number
    counted = {
        "tasks": _counted(connection, "task_id"),
        **kinds,
        "batches": _counted(connection, "batch_id"),
    }
    return {
        name: [
            {"name": value, "count": number}
            for value, number in sorted(counter.items(), key=lambda each: (-each[1], each[0]))
            if value
        ][:MOST_FACETS]
        for name, counter in counted.items()
    }


def _counted(connection: sqlite3.Connection, column: str) -> dict[str, int]:
    return dict(connection.execute(f"SELECT {column}, count(*) FROM figures GROUP BY {column}"))


def by_task(connection: sqlite3.Connection, search: Search) -> list[TaskFigures]:
    """Sums for each task, those with the most rollouts first."""
    where, values = search.where()
    found = connection.execute(
        "SELECT task_id, outcome, count(*), count(reward), count(CASE WHEN reward >= 1 THEN 1 END),"
        " count(CASE WHEN reward IN (0, 1) THEN 1 END),"
        " total(reward), total(reward * reward), sum(prompt_tokens), sum(completion_tokens), total(wall), count(wall)"
        f" FROM figures {where} GROUP BY task_id, outcome",
        values,
    )
    tasks: dict[str, list[Any]] = {}
    for task, outcome, number, *sums in found:
        known = tasks.setdefault(task, [{}, *[0] * len(sums)])
        known[0][outcome] = number
        known[1:] = [before + new for before, new in zip(known[1:], sums, strict=True)]
    result = [
        TaskFigures(
            task, outcomes, int(scored), int(passed), int(binary), total, squares, prompt, completion, wall, n
        )
        for task, (outcomes, scored, passed, binary, total, squares, prompt, completion, wall, n) in tasks.items()
    ]
    return sorted(result, key=lambda each: (-each.count, each.task_id))


def wall_quantiles(
    connection: sqlite3.Connection, search: Search, fractions: tuple[float, ...]
) -> list[float | None]:
    """How long that share of the finished rollouts took at most."""
    where, values = search.where()
    known = f"FROM figures {where} {'AND' if where else 'WHERE'} wall IS NOT NULL"
    if where:
        # The index by time taken would look into every row.
        walls = sorted(wall for (wall,) in connection.execute(f"SELECT wall {known}", values))
        return [walls[min(len(walls) - 1, int(fraction * len(walls)))] if walls else None for fraction in fractions]
    number = connection.execute(f"SELECT count(*) {known}", values).fetchone()[0]

    def quantile(fraction: float) -> float:
        place = min(number - 1, int(fraction * number))
        # From the nearer end.
        order, offset = ("ASC", place) if place <= number // 2 else ("DESC", number - 1 - place)
        found = connection.execute(f"SELECT wall {known} ORDER BY wall {order} LIMIT 1 OFFSET ?", (*values, offset))
        return float(found.fetchone()[0])

    return [quantile(fraction) if number else None for fraction in fractions]


def over_time(connection: sqlite3.Connection, search: Search, buckets: int) -> list[Span]:
    """Rewards by when rollouts began, in at most so many stretches of the same length; empty ones are left out."""
    where, values = search.where()
    first, last = connection.execute(
        f"SELECT min(started_at), max(started_at) FROM figures {where}", values
    ).fetchone()
    if first is None:
        return []
    width = (last - first) / buckets or 1.0
    # A question for each stretch: they follow the index, and nothing has to be sorted.
    sums = (
        f"SELECT total(reward), count(reward), count(*) FROM figures {where} {'AND' if where else 'WHERE'}"
        " started_at >= ? AND started_at < ?"
    )
    spans = []
    for bucket in range(buckets):
        at = first + bucket * width
        until = math.inf if bucket == buckets - 1 else first + (bucket + 1) * width
        total, scored, number = connection.execute(sums, (*values, at, until)).fetchone()
        if number:
            spans.append(Span(at, total, scored, number))
    return spans


def latest_rewards(connection: sqlite3.Connection, search: Search) -> dict[str, list[float]]:
    """The last rewards of each task that has any among the latest rollouts, in the order of time."""
    where, values = search.where()
    found: dict[str, list[float]] = {}
    for task, reward in connection.execute(
        f"SELECT task_id, reward FROM figures {where} {'AND' if where else 'WHERE'} reward IS NOT NULL"
        " ORDER BY started_at DESC LIMIT ?",
        (*values, LATEST),
    ):
        known = found.setdefault(task, [])
        if len(known) < LATEST_REWARDS:
            known.append(reward)
    return {task: rewards[::-1] for task, rewards in found.items()}


def groups(
    connection: sqlite3.Connection, *, task: str | None, batch: str | None, offset: int, limit: int, most_members: int
) -> tuple[int, list[Group]]:
    """How many groups there are, and some of them with their members, the latest first."""
    where, values = Search(task=task, batch=batch).where()
    where = f"{where} {'AND' if where else 'WHERE'} batch_id <> ''"
    found = connection.execute(
        "SELECT batch_id, task_id, count(*), count(reward), avg(reward), max(started_at)"
        f" FROM figures {where} GROUP BY batch_id, task_id",
        values,
    ).fetchall()
    found.sort(key=lambda row: (-row[5], row[1]))
    return len(found), [
        Group(each, name, number, scored, mean, members(connection, each, name, most_members))
        for each, name, number, scored, mean, _ in found[offset : offset + limit]
    ]


def members(connection: sqlite3.Connection, batch: str, task: str, most: int) -> list[int]:
    """Keys of the rollouts of a group, in the order in which they began."""
    found = connection.execute(
        "SELECT rollout FROM figures WHERE batch_id = ? AND task_id = ? ORDER BY started_at, rollout LIMIT ?",
        (batch, task, most),
    )
    return [key for (key,) in found]


RUNNING = figures.RUNNING
