"""Disk space: deleting rollouts shrinks the file; a reserve serves a full disk.

`prune` deletes those that finished first, `delete` those that are named. Running rollouts are never deleted.
What forks need of a rollout stays until they are deleted: see `tree`.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paddock.errors import StoreError
from paddock.sqlite import read_pragma
from paddock.store import blobs, recovery, snapshots, transcripts, tree

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paddock.sqlite import Database

RESERVE_BYTES = 1024 * 1024
_MIN_FREE_RATIO = 16
"""The reserve is written only while the disk has this many times its size."""

logger = logging.getLogger(__name__)


class Reserve:
    """A file of `RESERVE_BYTES` in the store's folder. Deleting it makes room for an outcome on a full disk."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "reserve"

    def allocate(self) -> bool:
        """Write the file unless it exists; False if there is too little space."""
        try:
            if self.path.exists():
                return True
            if shutil.disk_usage(self.path.parent).free < _MIN_FREE_RATIO * RESERVE_BYTES:
                return False
            # Random bytes: a sparse or compressed file would reserve nothing.
            building = self.path.with_name(f"reserve.{os.getpid()}")
            try:
                building.write_bytes(os.urandom(RESERVE_BYTES))
                building.replace(self.path)
            finally:
                building.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("no space was reserved at %s: %s", self.path, error)
            return False
        return True

    def release(self) -> bool:
        """Delete the file; False if it was gone already."""
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        logger.warning("the disk is full: the reserve at %s was used", self.path)
        return True


@dataclass(slots=True)
class Pruned:
    """The result of a prune."""

    rollouts: list[str] = field(default_factory=list)
    blobs: int = 0
    bytes_freed: int = 0
    """By how much the files got smaller."""


@dataclass(frozen=True, slots=True)
class _Batching:
    """How long one write transaction may last, and how many pages are freed between two checkpoints."""

    seconds: float
    pages: int


_NORMAL = _Batching(seconds=0.2, pages=2000)
_DISK_FULL = _Batching(seconds=0.0, pages=32)
"""A deletion is first written to the write-ahead log, for which only the reserve is left: small steps."""


Choose = Callable[["sqlite3.Connection"], "Iterator[tuple[int, str]]"]
"""Yields the key and the id of each rollout to delete. Called again for each transaction."""


def prune(database: Database, reserve: Reserve, *, max_age_seconds: float | None, max_bytes: int | None) -> Pruned:
    """Delete the oldest finished rollouts, until none is too old and the rest is small enough."""
    oldest_kept = None if max_age_seconds is None else time.time() - max_age_seconds

    def choose(connection: sqlite3.Connection) -> Iterator[tuple[int, str]]:
        while (oldest := _next_to_prune(connection, oldest_kept, max_bytes)) is not None:
            yield oldest

    return _delete_chosen(database, reserve, choose)


def delete(database: Database, reserve: Reserve, rollout_ids: Sequence[str]) -> Pruned:
    """Delete these rollouts. The result leaves out those that still run, or do not exist."""

    def choose(connection: sqlite3.Connection) -> Iterator[tuple[int, str]]:
        query = "SELECT id, rollout_id FROM rollouts WHERE rollout_id = ? AND finished_at IS NOT NULL"
        for rollout_id in rollout_ids:
            yield from connection.execute(query, (rollout_id,)).fetchall()

    return _delete_chosen(database, reserve, choose)


def _delete_chosen(database: Database, reserve: Reserve, choose: Choose) -> Pruned:
    before = database.size_bytes()
    pruned = Pruned()
    try:
        _delete_in_batches(database, pruned, choose, _NORMAL)
    except StoreError as error:
        if not error.data.get("full") or not reserve.release():
            raise
        _delete_in_batches(database, pruned, choose, _DISK_FULL)
    reserve.allocate()
    pruned.bytes_freed = max(before - database.size_bytes(), 0)
    return pruned


def _delete_in_batches(database: Database, pruned: Pruned, choose: Choose, batching: _Batching) -> None:
    more = True
    while more:
        batch = Pruned()
        with database.write() as connection:
            until = time.monotonic() + batching.seconds
            for key, rollout_id in choose(connection):
                batch.blobs += _delete(connection, key, rollout_id)
                batch.rollouts.append(rollout_id)
                if time.monotonic() >= until:
                    break
            else:
                more = False
        pruned.rollouts += batch.rollouts
        pruned.blobs += batch.blobs
        _free_pages(database, batching)
    with database.write() as connection:
        unreferenced = connection.execute(f"SELECT id FROM blobs WHERE {blobs.UNREFERENCED}")
        unused = blobs.delete_unused(connection, [key for (key,) in unreferenced])
    pruned.blobs += unused
    _free_pages(database, batching)
    _truncate_wal(database)


def _next_to_prune(
    connection: sqlite3.Connection, oldest_kept: float | None, max_bytes: int | None
) -> tuple[int, str] | None:
    """The key and id of the finished rollout that has to be deleted, if any."""
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
    recovery.delete_ended_sandboxes(connection, rollout_id)
    transcripts.delete(connection, key)
    if tree.is_needed(connection, key):
        return tree.retire(connection, key, rollout_id)
    deleted = 0
    unneeded: int | None = key
    while unneeded is not None:
        source = tree.source_of(connection, unneeded)
        deleted += _delete_rows(connection, unneeded)
        unneeded = tree.next_unneeded(connection, source)
    return deleted


def _delete_rows(connection: sqlite3.Connection, key: int) -> int:
    """Delete a rollout with everything of it; how many blobs went with it."""
    referenced = [
        blob for (blob,) in connection.execute("SELECT blob FROM blob_references WHERE rollout = ?", (key,))
    ]
    referenced += snapshots.referenced(connection, key)
    connection.execute("DELETE FROM rollouts WHERE id = ?", (key,))
    return blobs.delete_unused(connection, referenced)


def _used_bytes(connection: sqlite3.Connection) -> int:
    """The size of the database without its free pages."""
    used = read_pragma(connection, "page_count") - read_pragma(connection, "freelist_count")
    return used * read_pragma(connection, "page_size")


def _free_pages(database: Database, batching: _Batching) -> None:
    """Give free pages back to the file system, some at a time."""
    with database.autocommit() as connection:
        free = read_pragma(connection, "freelist_count")
    while free > 0:
        with database.autocommit() as connection:
            connection.execute(f"PRAGMA incremental_vacuum({batching.pages})").fetchall()
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            before, free = free, read_pragma(connection, "freelist_count")
        if free >= before:
            break


def _truncate_wal(database: Database) -> None:
    with database.autocommit() as connection:
        # Another process may read from the log; then a later checkpoint truncates it.
        wait = read_pragma(connection, "busy_timeout")
        connection.execute("PRAGMA busy_timeout = 500")
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            connection.execute(f"PRAGMA busy_timeout = {wait}")
