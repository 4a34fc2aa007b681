"""Rollout records as rows: a head with all small values, and the long texts beside it.

The columns are there to search by; the head is what is read back.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from paddock.errors import StoreError
from paddock.rollouts.outcome import Outcome
from paddock.rollouts.record import RolloutRecord
from paddock.rollouts.store import blobs, figures
from paddock.rollouts.store.packing import decode, encode, squeeze, unsqueeze

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from paddock.rollouts.store.live import Live

LOGS = ("agent_log", "verifier_stdout", "verifier_stderr", "install_log", "proxy_log", "transcript", "workdir_files")
"""Left out where records are listed."""
BODIES = ("instruction", "config", *LOGS)
_HEAD = tuple(field.name for field in fields(RolloutRecord) if field.name not in BODIES)
PREFIX_LENGTH = 4
"""Fewer characters than this are no id."""
_CANDIDATES = 5
_COLUMNS = ("task_id", "agent", "model", "batch_id", "started_at")


@dataclass(frozen=True, slots=True)
class Filters:
    """Which rollouts; None leaves a question out."""

    task_id: str | None = None
    agent: str | None = None
    model: str | None = None
    outcome: Outcome | str | None = None
    batch_id: str | None = None
    finished: bool | None = None
    since: float | None = None
    """Begun at that time or later, in seconds since the epoch."""

    def where(self) -> tuple[str, list[Any]]:
        conditions: list[str] = []
        values: list[Any] = []
        for name in ("task_id", "agent", "model", "outcome", "batch_id"):
            value = getattr(self, name)
            if value is not None:
                conditions.append(f"{name} = ?")
                values.append(str(value))
        if self.finished is not None:
            conditions.append("outcome IS NOT NULL" if self.finished else "outcome IS NULL")
        if self.since is not None:
            conditions.append("started_at >= ?")
            values.append(self.since)
        return (f"WHERE {' AND '.join(conditions)}" if conditions else ""), values


def key_of(connection: sqlite3.Connection, rollout_id: str) -> int | None:
    row = connection.execute("SELECT id FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    return None if row is None else int(row[0])


def insert(connection: sqlite3.Connection, record: RolloutRecord, owner: str) -> int:
    """A running rollout. Raises sqlite3.IntegrityError if there is one with its id."""
    values = _values(record, running=True)
    key = connection.execute(
        f"INSERT INTO rollouts (rollout_id, owner, head, {', '.join(_COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (record.rollout_id, owner, squeeze(encode(values)), *(values[name] for name in _COLUMNS)),
    ).lastrowid
    assert key is not None
    figures.save(connection, key, values)
    return key


def update(connection: sqlite3.Connection, key: int, record: RolloutRecord) -> bool:
    """False, with nothing changed, if the rollout has an outcome."""
    values = _values(record, running=True)
    changes = ", ".join(f"{name} = ?" for name in _COLUMNS)
    changed = connection.execute(
        f"UPDATE rollouts SET head = ?, {changes} WHERE id = ? AND outcome IS NULL",
        (squeeze(encode(values)), *(values[name] for name in _COLUMNS), key),
    ).rowcount
    if changed:
        figures.save(connection, key, values)
    return bool(changed)


def finish(connection: sqlite3.Connection, key: int, record: RolloutRecord) -> bool:
    """False, with nothing changed, if the rollout has an outcome already."""
    assert record.outcome is not None
    values = _values(record, running=False)
    changes = ", ".join(f"{name} = ?" for name in _COLUMNS)
    changed = connection.execute(
        f"UPDATE rollouts SET head = ?, outcome = ?, finished_at = ?, {changes} WHERE id = ? AND outcome IS NULL",
        (
            squeeze(encode(values)),
            str(record.outcome),
            record.finished_at,
            *(values[name] for name in _COLUMNS),
            key,
        ),
    ).rowcount
    if changed:
        figures.save(connection, key, values)
    return bool(changed)


def save_bodies(connection: sqlite3.Connection, live: Live, record: RolloutRecord) -> None:
    """Write the long texts that changed. An empty one leaves what is stored, so that a record read
    without its logs cannot take them away."""
    for name in BODIES:
        value = getattr(record, name)
        if not value:
            continue
        data = encode(value)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if live.bodies.get(name) == digest:
            continue
        connection.execute(
            "INSERT INTO bodies (rollout, name, data) VALUES (?, ?, ?)"
            " ON CONFLICT (rollout, name) DO UPDATE SET data = excluded.data",
            (live.key, name, squeeze(data)),
        )
        live.bodies[name] = digest
    for named in (record.workdir_blob, record.task_blob):
        if named:
            blobs.refer(connection, live.key, named)


def head(connection: sqlite3.Connection, key: int) -> dict[str, Any] | None:
    """The small values of a record, by their names; None if the rollout is gone."""
    row = connection.execute("SELECT head FROM rollouts WHERE id = ?", (key,)).fetchone()
    if row is None:
        return None
    values: dict[str, Any] = decode(unsqueeze(row[0]))
    return values


def read(connection: sqlite3.Connection, key: int, names: Sequence[str] = BODIES) -> RolloutRecord:
    values = head(connection, key)
    assert values is not None
    wanted = ", ".join("?" * len(names))
    for name, data in connection.execute(
        f"SELECT name, data FROM bodies WHERE rollout = ? AND name IN ({wanted})", (key, *names)
    ):
        values[name] = decode(unsqueeze(data))
    if values["outcome"] is not None:
        values["outcome"] = Outcome(values["outcome"])
    return RolloutRecord(**values)


def find(connection: sqlite3.Connection, rollout_id: str) -> int | None:
    """By its id, or by the first characters of it. Raises StoreError if several begin with them."""
    key = key_of(connection, rollout_id)
    if key is not None or len(rollout_id) < PREFIX_LENGTH:
        return key
    found = connection.execute(
        "SELECT id, rollout_id FROM rollouts WHERE rollout_id >= ? AND rollout_id < ? ORDER BY rollout_id LIMIT ?",
        (rollout_id, rollout_id + "\U0010ffff", _CANDIDATES + 1),
    ).fetchall()
    if len(found) > 1:
        names = [name for _, name in found]
        told = ", ".join(names[:_CANDIDATES]) + (", …" if len(names) > _CANDIDATES else "")
        raise StoreError(f"{rollout_id} could be {told}", hint="give more characters of the id", candidates=names)
    return int(found[0][0]) if found else None


def keys(
    connection: sqlite3.Connection,
    filters: Filters,
    *,
    limit: int | None = None,
    offset: int = 0,
    newest_first: bool = True,
) -> array[int]:
    """All of them, unless a limit is given."""
    where, values = filters.where()
    direction = "DESC" if newest_first else "ASC"
    found = connection.execute(
        f"SELECT id FROM rollouts {where} ORDER BY started_at {direction}, id {direction} LIMIT ? OFFSET ?",
        (*values, -1 if limit is None else limit, offset),
    )
    return array("q", (key for (key,) in found))


def existing(connection: sqlite3.Connection, wanted: Sequence[int]) -> set[int]:
    """Those of a page of keys whose rollouts were not deleted."""
    marks = ", ".join("?" * len(wanted))
    return {key for (key,) in connection.execute(f"SELECT id FROM rollouts WHERE id IN ({marks})", (*wanted,))}


def count(connection: sqlite3.Connection, filters: Filters) -> int:
    where, values = filters.where()
    return int(connection.execute(f"SELECT count(*) FROM rollouts {where}", values).fetchone()[0])


def recent_batches(connection: sqlite3.Connection, limit: int) -> list[str]:
    found = connection.execute(
        "SELECT batch_id FROM rollouts WHERE batch_id IS NOT NULL"
        " GROUP BY batch_id ORDER BY min(started_at) DESC LIMIT ?",
        (limit,),
    )
    return [name for (name,) in found]


def _values(record: RolloutRecord, *, running: bool) -> dict[str, Any]:
    """What goes into the head."""
    values = {name: getattr(record, name) for name in _HEAD}
    if running:
        values["outcome"] = None
    return values
