"""Rewards of many rollouts as lines of a chart: over time, by batch or by weight version; one line, or one for each
task, model or agent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from paddock.store.reward_sums import SUMS, RewardSums

if TYPE_CHECKING:
    import sqlite3

    from paddock.store.search import Search

Axis = Literal["time", "batch", "weights"]
Split = Literal["task", "model", "agent"]
AXES: tuple[Axis, ...] = ("time", "batch", "weights")
SPLITS: tuple[Split, ...] = ("task", "model", "agent")
_AXIS_COLUMNS = {"batch": "batch_id", "weights": "weights"}
_SPLIT_COLUMNS = {"task": "task_id", "model": "model", "agent": "agent"}
MAX_LINES = 6
MAX_PLACES = 200
"""Of batches and weight versions, the latest."""


@dataclass(slots=True)
class Series:
    """The lines of a chart."""

    places: list[str | float] = field(default_factory=list)
    """From left to right: the names of batches or versions, or when each interval of time begins."""
    width: float = 0.0
    """Of an interval of time, in seconds."""
    lines: dict[str, dict[int, RewardSums]] = field(default_factory=dict)
    """By the name of the line, the sums at places, by the index of the place. Without a split, the name is empty."""
    line_count: int = 0
    """How many lines there are; only those with the most rollouts are in `lines`."""


def read_series(
    connection: sqlite3.Connection, search: Search, *, axis: Axis, split: Split | None, intervals: int
) -> Series:
    where, values = search.where()
    series = Series()
    column = "''" if split is None else _SPLIT_COLUMNS[split]
    names, series.line_count = _line_names(connection, where, values, column)
    if not names:
        return series
    if split is not None:
        where = f"{where} {'AND' if where else 'WHERE'} {column} IN ({', '.join('?' * len(names))})"
        values = [*values, *names]
    series.lines = {name: {} for name in names}
    if axis == "time":
        _read_times(connection, series, where, values, column, intervals)
    else:
        _read_names(connection, series, where, values, column, _AXIS_COLUMNS[axis])
    return series


def _line_names(connection: sqlite3.Connection, where: str, values: list[Any], column: str) -> tuple[list[str], int]:
    counts = connection.execute(f"SELECT {column}, count(*) FROM figures {where} GROUP BY 1", values).fetchall()
    counts.sort(key=lambda row: (-row[1], row[0]))
    return [name for name, _ in counts[:MAX_LINES]], len(counts)


def _read_times(
    connection: sqlite3.Connection, series: Series, where: str, values: list[Any], column: str, intervals: int
) -> None:
    first, last = connection.execute(
        f"SELECT min(started_at), max(started_at) FROM figures {where}", values
    ).fetchone()
    series.width = (last - first) / intervals or 1.0
    series.places = [first + number * series.width for number in range(intervals)]
    rows = connection.execute(
        f"SELECT min(?, CAST((started_at - ?) / ? AS INTEGER)), {column}, {SUMS} FROM figures {where} GROUP BY 1, 2",
        (intervals - 1, first, series.width, *values),
    )
    for place, line, *sums in rows:
        series.lines[line][place] = RewardSums(*sums)


def _read_names(
    connection: sqlite3.Connection, series: Series, where: str, values: list[Any], column: str, axis: str
) -> None:
    where = f"{where} {'AND' if where else 'WHERE'} {axis} <> ''"
    rows = connection.execute(
        f"SELECT {axis}, {column}, min(started_at), {SUMS} FROM figures {where} GROUP BY 1, 2", values
    ).fetchall()
    began: dict[str, float] = {}
    for place, _, at, *_ in rows:
        began[place] = min(at, began.get(place, at))
    are_numbers = axis == "weights" and all(name.isdecimal() for name in began)
    ordered = sorted(began, key=lambda name: (int(name) if are_numbers else began[name], name))[-MAX_PLACES:]
    series.places = [*ordered]
    index = {name: number for number, name in enumerate(ordered)}
    for place, line, _, *sums in rows:
        if place in index:
            series.lines[line][index[place]] = RewardSums(*sums)
