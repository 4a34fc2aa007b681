"""Making room: the rollouts that finished first go first, and the file gets smaller. Running ones stay."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paddock.errors import StoreError
from paddock.rollouts.store import blobs, ledger

if TYPE_CHECKING:
    import sqlite3

    from paddock.rollouts.store.database import Database
    from paddock.rollouts.store.reserve import Reserve


@dataclass(slots=True)
class Pruned:
    """What went."""

    rollouts: list[str] = field(default_factory=list)
    blobs: int = 0
    bytes_freed: int = 0
    """By how much the files got smaller."""


@dataclass(frozen=True, slots=True)
class _Pace:
    """How much is done before others may write, and before the log is emptied into the file."""

    seconds: float
    pages: int


_BRISK = _Pace(seconds=0.2, pages=2000)
_SPARING = _Pace(seconds=0.0, pages=32)
"""For a full disk: what is deleted has to be written down first, and there is only the reserve for it."""


def prune(database: Database, reserve: Reserve, *, max_age_seconds: float | None, max_bytes: int | None) -> Pruned:
    before = database.size()
    oldest_kept = None if max_age_seconds is None else time.time() - max_age_seconds
    pruned = Pruned()
    try:
        _prune(database, pruned, oldest_kept, max_bytes, _BRISK)
    except StoreError as error:
        if not error.data.get("full") or not reserve.free():
            raise
        _prune(database, pruned, oldest_kept, max_bytes, _SPARING)
    reserve.take()
    pruned.bytes_freed = max(before - database.size(), 0)
    return pruned


def _prune(database: Database, pruned: Pruned, oldest_kept: float | None, max_bytes: int | None, pace: _Pace) -> None:
    more = True
    while more:
        turn = Pruned()
        with database.write() as connection:
            until = time.monotonic() + pace.seconds
            while more:
                found = _next(connection, oldest_kept, max_bytes)
                if found is None:
                    more = False
                else:
                    turn.blobs += _delete(connection, *found)
                    turn.rollouts.append(found[1])
                if time.monotonic() >= until:
                    break
        pruned.rollouts += turn.rollouts
        pruned.blobs += turn.blobs
        _shrink(database, pace)
    with database.write() as connection:
        unnamed = "SELECT id FROM blobs WHERE NOT EXISTS (SELECT 1 FROM blob_references WHERE blob = blobs.id)"
        unused = blobs.delete_unused(connection, [key for (key,) in connection.execute(unnamed)])
    pruned.blobs += unused
    _shrink(database, pace)
    _empty_log(database)


def _next(connection: sqlite3.Connection, oldest_kept: float | None, max_bytes: int | None) -> tuple[int, str] | None:
    """The finished rollout that has to go now, if one has."""
    row = connection.execute(
        "SELECT id, rollout_id, finished_at FROM rollouts"
        " WHERE finished_at IS NOT NULL ORDER BY finished_at, id LIMIT 1"
    ).fetchone()
    if row is None:
        return None
    key, rollout_id, finished_at = row
    too_old = oldest_kept is not None and finished_at < oldest_kept
    too_much = max_bytes is not None and _used_bytes(connection) > max_bytes
    return (key, rollout_id) if too_old or too_much else None


def _delete(connection: sqlite3.Connection, key: int, rollout_id: str) -> int:
    named = [blob for (blob,) in connection.execute("SELECT blob FROM blob_references WHERE rollout = ?", (key,))]
    connection.execute("DELETE FROM rollouts WHERE id = ?", (key,))
    ledger.forget_ended(connection, rollout_id)
    return blobs.delete_unused(connection, named)


def _used_bytes(connection: sqlite3.Connection) -> int:
    """Of the database, without the pages that are free already."""
    used = _pragma(connection, "page_count") - _pragma(connection, "freelist_count")
    return used * _pragma(connection, "page_size")


def _shrink(database: Database, pace: _Pace) -> None:
    """Give free pages back, a few at a time."""
    with database.outside() as connection:
        free = _pragma(connection, "freelist_count")
    while free > 0:
        with database.outside() as connection:
            connection.execute(f"PRAGMA incremental_vacuum({pace.pages})").fetchall()
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            before, free = free, _pragma(connection, "freelist_count")
        if free >= before:
            break


def _empty_log(database: Database) -> None:
    with database.outside() as connection:
        # A reader elsewhere may hold the log; then it shrinks with a later checkpoint.
        wait = _pragma(connection, "busy_timeout")
        connection.execute("PRAGMA busy_timeout = 500")
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            connection.execute(f"PRAGMA busy_timeout = {wait}")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
