"""Figures of a stream for people: rewards by weight version and by task, staleness, rates, and what was left out.

Read from `streams.db`; the page and the examples show them. Whatever is unknown is None.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from paddock.errors import StoreError
from paddock.sqlite import Database
from paddock.train.stream_state import FILE, SCHEMA

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable
    from pathlib import Path

CONFIDENT = 1.96
"""Standard errors on each side of a mean: 95 %."""
FEWEST = 3
"""Fewer values say too little of their spread for an interval."""
RECENT_VERSIONS = 10
"""Rewards of tasks are shown for the last of them."""
VERSION = "coalesce(rollouts.oldest, units.oldest)"
JOINED = "rollouts JOIN units ON units.stream = rollouts.stream AND units.number = rollouts.unit"


@dataclass(frozen=True, slots=True)
class MeanReward:
    """A mean with its 95 % confidence interval, which is None for one or two values."""

    count: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, count: int, total: float | None, squares: float | None) -> MeanReward:
        if not count or total is None or squares is None:
            return cls(count)
        mean = total / count
        if count < FEWEST:
            return cls(count, mean)
        variance = max(squares - count * mean * mean, 0.0) / (count - 1)
        margin = CONFIDENT * math.sqrt(variance / count)
        return cls(count, mean, mean - margin, mean + margin)


@dataclass(slots=True)
class VersionFigures:
    """What was sampled from one weight version, and what the trainer reported about it."""

    version: int
    reward: MeanReward = field(default_factory=lambda: MeanReward(0))
    rollouts: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    """Rollouts by the reason for leaving them out."""
    entropy: float | None = None
    """An estimate: the mean of -logprob of the sampled tokens, in nats."""
    staleness_mean: float | None = None
    """Of the units that the trainer took at this version."""
    staleness_max: int | None = None
    seconds: float | None = None
    """How long this was the trainer's version."""
    tokens_per_second: float | None = None
    """Trainable tokens of the rollouts that ended in this time."""
    reported: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskFigures:
    source: str
    task_id: str
    reward: MeanReward
    """Of the last versions."""
    first: MeanReward
    """Of the first versions."""


@dataclass(frozen=True, slots=True)
class TrainingView:
    name: str
    created_at: float
    version: int
    units: dict[str, int]
    """How many are in each state."""
    versions: list[VersionFigures]
    sources: dict[str, dict[int, MeanReward]]
    """For each source, the reward of each version."""
    tasks: list[TaskFigures]


def list_streams(folder: Path) -> list[dict[str, Any]]:
    """Name, time, version and number of units of each stream in a store's folder, the newest first."""
    if not (folder / FILE).exists():
        return []
    with _Reading(folder) as connection:
        rows = connection.execute(
            "SELECT name, created_at, version, (SELECT count(*) FROM units WHERE stream = name) AS units"
            " FROM streams ORDER BY created_at DESC"
        )
        return [dict(row) for row in rows]


def read_training(folder: Path, name: str) -> TrainingView:
    """Raises StoreError if there is no such stream."""
    with _Reading(folder) as connection:
        row = connection.execute("SELECT * FROM streams WHERE name = ?", [name]).fetchone()
        if row is None:
            raise StoreError(
                f"there is no stream {name!r} in {folder}", hint="see `paddock view` for those that are", missing=True
            )
        states = connection.execute("SELECT state, count(*) FROM units WHERE stream = ? GROUP BY state", [name])
        versions = _read_versions(connection, name)
        return TrainingView(
            name=name,
            created_at=row["created_at"],
            version=row["version"],
            units=dict(map(tuple, states)),
            versions=versions,
            sources=_read_sources(connection, name),
            tasks=_read_tasks(connection, name, [each.version for each in versions if each.rollouts]),
        )


class _Reading:
    """A read-only connection for as long as it is entered."""

    def __init__(self, folder: Path) -> None:
        if not (folder / FILE).exists():
            raise StoreError(f"there are no streams in {folder}", hint="a Stream writes them", missing=True)
        self._database = Database(
            folder / FILE, SCHEMA, name=f"the streams of {folder}", read_only=True, named_rows=True
        )

    def __enter__(self) -> sqlite3.Connection:
        self._read = self._database.read()
        return self._read.__enter__()

    def __exit__(self, *problem: Any) -> None:
        self._read.__exit__(*problem)
        self._database.close()


def _read_versions(connection: sqlite3.Connection, name: str) -> list[VersionFigures]:
    figures: dict[int, VersionFigures] = {}

    def of(version: int) -> VersionFigures:
        return figures.setdefault(version, VersionFigures(version))

    for row in connection.execute(
        f"SELECT {VERSION} AS version, count(*) AS rollouts, count(reward) AS scored, sum(reward) AS total,"
        f" sum(reward * reward) AS squares, sum(tokens) AS tokens, sum(logprob_sum) AS logprobs FROM {JOINED}"
        " WHERE rollouts.stream = ? GROUP BY 1",
        [name],
    ):
        each = of(row["version"])
        each.rollouts = row["rollouts"]
        each.reward = MeanReward.of(row["scored"], row["total"], row["squares"])
        each.entropy = -row["logprobs"] / row["tokens"] if row["tokens"] else None
    for row in connection.execute(
        f"SELECT {VERSION} AS version, left_out, count(*) AS count FROM {JOINED}"
        " WHERE rollouts.stream = ? AND left_out IS NOT NULL GROUP BY 1, 2",
        [name],
    ):
        of(row["version"]).left_out[row["left_out"]] = row["count"]
    for row in connection.execute(
        "SELECT version, avg(staleness) AS mean, max(staleness) AS most FROM units"
        " WHERE stream = ? AND version IS NOT NULL GROUP BY version",
        [name],
    ):
        each = of(row["version"])
        each.staleness_mean, each.staleness_max = row["mean"], row["most"]
    for row in connection.execute("SELECT version, figures FROM reports WHERE stream = ? ORDER BY at", [name]):
        of(row["version"]).reported |= json.loads(row["figures"])
    _add_rates(connection, name, figures)
    return [figures[version] for version in sorted(figures)]


def _add_rates(connection: sqlite3.Connection, name: str, figures: dict[int, VersionFigures]) -> None:
    times = connection.execute("SELECT version, at FROM versions WHERE stream = ? ORDER BY at", [name]).fetchall()
    for (version, began), (_, ended) in pairwise(times):
        (tokens,) = connection.execute(
            "SELECT sum(tokens) FROM rollouts WHERE stream = ? AND ended_at >= ? AND ended_at < ?",
            [name, began, ended],
        ).fetchone()
        if version in figures and ended > began:
            figures[version].seconds = ended - began
            figures[version].tokens_per_second = (tokens or 0) / (ended - began)


def _read_sources(connection: sqlite3.Connection, name: str) -> dict[str, dict[int, MeanReward]]:
    sources: dict[str, dict[int, MeanReward]] = defaultdict(dict)
    for row in connection.execute(
        f"SELECT source, {VERSION} AS version, count(reward) AS count, sum(reward) AS total,"
        f" sum(reward * reward) AS squares FROM {JOINED} WHERE rollouts.stream = ? GROUP BY 1, 2 ORDER BY 1, 2",
        [name],
    ):
        sources[row["source"]][row["version"]] = MeanReward.of(row["count"], row["total"], row["squares"])
    return dict(sources)


def _read_tasks(connection: sqlite3.Connection, name: str, versions: list[int]) -> list[TaskFigures]:
    if not versions:
        return []
    first = _task_rewards(connection, name, versions[0], versions[:RECENT_VERSIONS][-1])
    last = _task_rewards(connection, name, versions[-RECENT_VERSIONS:][0], versions[-1])
    return [
        TaskFigures(*key, reward=last.get(key, MeanReward(0)), first=first.get(key, MeanReward(0)))
        for key in sorted({*first, *last})
    ]


def _task_rewards(
    connection: sqlite3.Connection, name: str, low: int, high: int
) -> dict[tuple[str, str], MeanReward]:
    rows: Iterable[Any] = connection.execute(
        f"SELECT source, task_id, count(reward), sum(reward), sum(reward * reward) FROM {JOINED}"
        f" WHERE rollouts.stream = ? AND {VERSION} BETWEEN ? AND ? GROUP BY 1, 2",
        [name, low, high],
    )
    return {(source, task): MeanReward.of(*values) for source, task, *values in rows}
