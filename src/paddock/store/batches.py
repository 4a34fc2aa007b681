"""Batches: how far each is and what its rollouts add up to, and the causes of rollouts that broke."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddock.store import rows
from paddock.store.reward_sums import SUMS, RewardSums

if TYPE_CHECKING:
    import sqlite3

    from paddock.store.search import Search

MAX_CAUSES = 100
EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTotals:
    """One batch. Members count once, however often they were tried again."""

    batch_id: str
    began: float
    last: float
    """When its last rollout ended, or began if that still runs."""
    rewards: RewardSums
    tasks: int
    running: int
    finished: int
    """Rollouts with the outcome `ok`."""
    cancelled: int
    tokens: int
    done: int
    """Members that have another outcome than `cancelled`, and do not run again."""
    size: int | None
    """How many members it has in all; None where that was not recorded."""
    agents: list[str]
    models: list[str]


@dataclass(frozen=True, slots=True)
class Cause:
    """Rollouts that broke in the same way."""

    outcome: str
    cause: str
    count: int
    tasks: int
    error: str | None
    """Of the latest of them, whole."""
    rollouts: list[str]
    """The ids of the latest."""


def read_batches(
    connection: sqlite3.Connection, *, batch: str | None = None, offset: int = 0, limit: int
) -> tuple[int, list[BatchTotals]]:
    """How many batches there are, and some of them, those that began last first; or only the one named."""
    chosen = ["batch_id <> ''"] if batch is None else ["batch_id = ?"]
    names = connection.execute(
        f"SELECT batch_id FROM figures WHERE {chosen[0]} GROUP BY batch_id ORDER BY min(started_at) DESC, batch_id",
        () if batch is None else (batch,),
    ).fetchall()
    return len(names), [_read_batch(connection, name) for (name,) in names[offset : offset + limit]]


def _read_batch(connection: sqlite3.Connection, batch: str) -> BatchTotals:
    began, last, newest, tasks, running, finished, cancelled, tokens, *sums = connection.execute(
        "SELECT min(started_at), max(started_at + coalesce(wall, 0)), max(rollout), count(DISTINCT task_id),"
        " count(CASE WHEN outcome = '' THEN 1 END), count(CASE WHEN outcome = 'ok' THEN 1 END),"
        " count(CASE WHEN outcome = 'cancelled' THEN 1 END), sum(tokens),"
        f" {SUMS} FROM figures WHERE batch_id = ?",
        (batch,),
    ).fetchone()
    (done,) = connection.execute(
        "SELECT count(*) FROM (SELECT 1 FROM figures WHERE batch_id = ? GROUP BY task_id, member"
        " HAVING max(outcome = '') = 0 AND min(outcome = 'cancelled') = 0)",
        (batch,),
    ).fetchone()
    head = rows.head(connection, newest) or {}
    return BatchTotals(
        batch_id=batch,
        began=began,
        last=last,
        rewards=RewardSums(*sums),
        tasks=tasks,
        running=running,
        finished=finished,
        cancelled=cancelled,
        tokens=tokens,
        done=done,
        size=head.get("batch_size"),
        agents=_names(connection, batch, "agent"),
        models=_names(connection, batch, "model"),
    )


def _names(connection: sqlite3.Connection, batch: str, column: str) -> list[str]:
    names = connection.execute(f"SELECT DISTINCT {column} FROM figures WHERE batch_id = ? ORDER BY 1", (batch,))
    return [name for (name,) in names]


def read_causes(connection: sqlite3.Connection, search: Search) -> tuple[int, list[Cause]]:
    """How many rollouts broke, and why: the most frequent causes first."""
    where, values = search.where()
    broken = f"FROM figures {where} {'AND' if where else 'WHERE'} outcome NOT IN ('', 'ok')"
    total = connection.execute(f"SELECT count(*) {broken}", values).fetchone()[0]
    groups = connection.execute(
        f"SELECT outcome, cause, count(*), count(DISTINCT task_id) {broken} GROUP BY outcome, cause"
        " ORDER BY 3 DESC, 1, 2 LIMIT ?",
        (*values, MAX_CAUSES),
    ).fetchall()
    causes = []
    for outcome, cause, number, tasks in groups:
        latest = connection.execute(
            f"SELECT rollout, rollout_id {broken} AND outcome = ? AND cause = ? ORDER BY rollout DESC LIMIT ?",
            (*values, outcome, cause, EXAMPLES),
        ).fetchall()
        head = rows.head(connection, latest[0][0]) or {}
        causes.append(Cause(outcome, cause, number, tasks, head.get("error"), [name for _, name in latest]))
    return total, causes
