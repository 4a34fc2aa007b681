"""Snapshots of a work folder: one for each model call, stored as a difference to the one before.

A difference is a list of the entries that changed, and each content is a blob, which all rollouts share. A rollout
refers to them in a table of its own, so that they can be deleted before the rollout is (`expire`).
"""

from __future__ import annotations

import time
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any

from paddock.sandbox.folder_scan import FileState
from paddock.store import blobs
from paddock.store.packing import compress, decode, encode

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Mapping

    from paddock.sqlite import Database

TABLES = (
    """CREATE TABLE IF NOT EXISTS snapshot_references (
        rollout INTEGER NOT NULL REFERENCES rollouts (id) ON DELETE CASCADE,
        blob INTEGER NOT NULL REFERENCES blobs (id),
        PRIMARY KEY (rollout, blob)
    ) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS snapshots_of_blob ON snapshot_references (blob)",
)

Folder = dict[str, FileState]
"""What a folder held, by the paths below it."""


@dataclass(frozen=True, slots=True)
class CallSnapshot:
    """What a call has in its field `snapshot`."""

    since: str | None = None
    """The call, or the end of a step, whose snapshot this one is a difference to. None: the first one."""
    changes: str | None = None
    """The digest of the list of changes; None if nothing changed."""
    count: int = 0
    """How many entries changed."""
    problem: str | None = None
    """Why there is no snapshot."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CallSnapshot:
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# -- writing --------------------------------------------------------------------------------------


def encode_changes(changes: Mapping[str, FileState | None]) -> bytes:
    """The changed entries, sorted by path; None for one that is gone."""
    return encode([[path] if state is None else [path, *astuple(state)] for path, state in sorted(changes.items())])


def put(database: Database, rollout: int, contents: Mapping[str, bytes]) -> None:
    """Store blobs by their digests. The rollout refers to them from now on."""
    with database.read() as connection:
        existing = {digest for digest in contents if _find(connection, digest) is not None}
    # Compressed outside the write transaction, which blocks all other writers.
    compressed = {digest: compress(data) for digest, data in contents.items() if digest not in existing}
    with database.write() as connection:
        for digest, data in contents.items():
            key = _find(connection, digest)
            if key is None:
                packed = compressed[digest] if digest in compressed else compress(data)
                row = connection.execute("INSERT INTO blobs (digest, data) VALUES (?, ?)", (digest, packed))
                key = row.lastrowid
            connection.execute(
                "INSERT OR IGNORE INTO snapshot_references (rollout, blob) VALUES (?, ?)", (rollout, key)
            )


def _find(connection: sqlite3.Connection, digest: str) -> int | None:
    row = connection.execute("SELECT id FROM blobs WHERE digest = ?", (digest,)).fetchone()
    return None if row is None else int(row[0])


def expire(database: Database, max_age_seconds: float) -> int:
    """Delete the snapshots of rollouts that ended longer ago; of how many rollouts."""
    with database.read() as connection:
        rows = connection.execute(
            "SELECT DISTINCT rollout FROM snapshot_references JOIN rollouts ON rollouts.id = rollout"
            " WHERE finished_at < ?",
            (time.time() - max_age_seconds,),
        ).fetchall()
    for (key,) in rows:
        # A transaction for each, so that other writers need not wait for all.
        with database.write() as connection:
            candidates = referenced(connection, key)
            connection.execute("DELETE FROM snapshot_references WHERE rollout = ?", (key,))
            blobs.delete_unused(connection, candidates)
    return len(rows)


def referenced(connection: sqlite3.Connection, rollout: int) -> list[int]:
    """The keys of the blobs that the snapshots of a rollout refer to."""
    rows = connection.execute("SELECT blob FROM snapshot_references WHERE rollout = ?", (rollout,))
    return [key for (key,) in rows]


# -- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileChange:
    """One entry that differs between two snapshots."""

    path: str
    before: FileState | None
    after: FileState | None

    @property
    def kind(self) -> str:
        """`added`, `removed` or `changed`."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"


class SnapshotHistory:
    """The snapshots of one rollout, in the order in which they were taken."""

    def __init__(self, snapshots: Iterable[tuple[str, Mapping[str, Any]]], read_blob: Callable[[str], bytes]) -> None:
        """`snapshots` are the ids of calls, and of ends of steps, with what they have stored; empty without one.

        `read_blob` raises StoreError for a digest that is not there."""
        self._snapshots = {name: CallSnapshot.from_json(values) for name, values in snapshots if values}
        self._read_blob = read_blob
        self._following = {each.since: name for name, each in self._snapshots.items() if each.problem is None}
        self._latest: tuple[str | None, Folder] = (None, {})
        """The folder that was read last."""

    def __bool__(self) -> bool:
        return bool(self._snapshots)

    def get(self, name: str) -> CallSnapshot | None:
        return self._snapshots.get(name)

    def folder(self, name: str) -> Folder | None:
        """What the folder held when a call began; None if it was not saved. Raises StoreError if it was deleted."""
        snapshot = self._snapshots.get(name)
        if snapshot is None or snapshot.problem is not None:
            return None
        for reached, folder in (self._latest, (None, {})):
            folder = dict(folder)
            while reached != name and reached in self._following:
                reached = self._following[reached]
                self._apply(self._snapshots[reached], folder)
            if reached == name:
                self._latest = (name, folder)
                return folder
        return None

    def changes(self, name: str) -> list[FileChange] | None:
        """What changed between the beginning of a call and the next snapshot; None if there is none."""
        following = self._following.get(name)
        before = self.folder(name)
        if following is None or before is None:
            return None
        changed = self._read(self._snapshots[following])
        return [FileChange(path, before.get(path), state) for path, state in changed]

    def _apply(self, snapshot: CallSnapshot, folder: Folder) -> None:
        for path, state in self._read(snapshot):
            if state is None:
                folder.pop(path, None)
            else:
                folder[path] = state

    def _read(self, snapshot: CallSnapshot) -> list[tuple[str, FileState | None]]:
        if snapshot.changes is None:
            return []
        rows = decode(self._read_blob(snapshot.changes))
        return [(path, FileState(*values) if values else None) for path, *values in rows]


def compare_folders(one: Folder, other: Folder) -> list[FileChange]:
    """The entries that differ, sorted. Files whose contents were not read are compared by their sizes."""
    paths = sorted(path for path in one.keys() | other.keys() if not is_same(one.get(path), other.get(path)))
    return [FileChange(path, one.get(path), other.get(path)) for path in paths]


def is_same(one: FileState | None, other: FileState | None) -> bool:
    if one is None or other is None or one == other:
        return one is other or one == other
    if None not in (one.digest, other.digest) or one.kind != "file":
        return (one.kind, one.mode, one.digest, one.target) == (other.kind, other.mode, other.digest, other.target)
    return (one.kind, one.mode, one.size) == (other.kind, other.mode, other.size)
