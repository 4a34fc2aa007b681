"""The events of a rollout, numbered from 1, and what later verifications said about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.store.packing import decode, encode, squeeze, unsqueeze
from paddock.rollouts.trace import Event

if TYPE_CHECKING:
    import sqlite3


def add(connection: sqlite3.Connection, rollout: int, event: Event) -> int:
    found = connection.execute("SELECT max(number) FROM events WHERE rollout = ?", (rollout,)).fetchone()
    number = int(found[0] or 0) + 1
    data = squeeze(encode([event.at, event.kind, event.data]))
    connection.execute("INSERT INTO events (rollout, number, data) VALUES (?, ?, ?)", (rollout, number, data))
    return number


def read(connection: sqlite3.Connection, rollout: int, *, after: int, limit: int | None) -> list[tuple[int, Event]]:
    found = connection.execute(
        "SELECT number, data FROM events WHERE rollout = ? AND number > ? ORDER BY number LIMIT ?",
        (rollout, after, -1 if limit is None else limit),
    )
    return [(number, Event(*decode(unsqueeze(data)))) for number, data in found]


def add_score(connection: sqlite3.Connection, rollout: int, score: dict[str, Any]) -> None:
    connection.execute("INSERT INTO scores (rollout, data) VALUES (?, ?)", (rollout, squeeze(encode(score))))


def scores(connection: sqlite3.Connection, rollout: int) -> list[dict[str, Any]]:
    found = connection.execute("SELECT data FROM scores WHERE rollout = ? ORDER BY id", (rollout,))
    return [decode(unsqueeze(data)) for (data,) in found]
