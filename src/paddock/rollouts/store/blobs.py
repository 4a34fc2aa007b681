"""Content-addressed data, stored once whoever uses it.

A blob stays as long as a rollout refers to it. One that was put and is not named by a record yet is
held for a while, so that making room elsewhere cannot take it away.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from paddock.errors import StoreError
from paddock.rollouts.store.packing import squeeze, unsqueeze

if TYPE_CHECKING:
    import sqlite3

    from paddock.rollouts.store.database import Database
    from paddock.rollouts.store.live import Live

HELD_SECONDS = 24 * 3600.0


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(database: Database, data: bytes) -> str:
    """Store `data` and hold it until a record names it, for a day at most."""
    digest = digest_of(data)
    with database.read() as connection:
        known = _find(connection, digest) is not None
    squeezed = b"" if known else squeeze(data)
    with database.write() as connection:
        if known and _find(connection, digest) is None:
            squeezed = squeeze(data)
        connection.execute(
            "INSERT INTO blobs (digest, held, held_at, data) VALUES (?, 1, ?, ?)"
            " ON CONFLICT (digest) DO UPDATE SET held = held + 1, held_at = excluded.held_at",
            (digest, time.time(), squeezed),
        )
    return digest


def get(database: Database, digest: str) -> bytes:
    with database.read() as connection:
        row = connection.execute("SELECT data FROM blobs WHERE digest = ?", (digest,)).fetchone()
    if row is None:
        raise StoreError(f"the store has no blob {digest}", hint="its rollout may have been pruned")
    data = unsqueeze(row[0])
    if digest_of(data) != digest:
        raise StoreError(f"the blob {digest} is damaged", hint="see whether the disk of the store is healthy")
    return data


def keep(connection: sqlite3.Connection, live: Live, data: bytes) -> int:
    """The key of `data`, stored if it is new, and referred to by the rollout."""
    digest = digest_of(data)
    key = live.blobs.get(digest)
    if key is not None:
        return key
    key = _find(connection, digest)
    if key is None:
        key = connection.execute("INSERT INTO blobs (digest, data) VALUES (?, ?)", (digest, squeeze(data))).lastrowid
        assert key is not None
    connection.execute("INSERT OR IGNORE INTO blob_references (rollout, blob) VALUES (?, ?)", (live.key, key))
    live.blobs[digest] = key
    return key


def refer(connection: sqlite3.Connection, rollout: int, digest: str) -> None:
    """Note that a record names a blob that was put before."""
    key = _find(connection, digest)
    if key is None:
        return
    new = connection.execute(
        "INSERT OR IGNORE INTO blob_references (rollout, blob) VALUES (?, ?)", (rollout, key)
    ).rowcount
    if new:
        connection.execute("UPDATE blobs SET held = max(held - 1, 0) WHERE id = ?", (key,))


def delete_unused(connection: sqlite3.Connection, candidates: list[int]) -> int:
    """Delete those of `candidates` that nobody refers to or holds; how many."""
    expired = time.time() - HELD_SECONDS
    unused = "NOT EXISTS (SELECT 1 FROM blob_references WHERE blob = blobs.id) AND (held = 0 OR held_at < ?)"
    return sum(
        connection.execute(f"DELETE FROM blobs WHERE id = ? AND {unused}", (key, expired)).rowcount
        for key in candidates
    )


class Reader:
    """Blobs by key; each is read once."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._read: dict[int, bytes] = {}

    def __call__(self, key: int) -> bytes:
        if key not in self._read:
            row = self._connection.execute("SELECT data FROM blobs WHERE id = ?", (key,)).fetchone()
            self._read[key] = unsqueeze(row[0])
        return self._read[key]


def _find(connection: sqlite3.Connection, digest: str) -> int | None:
    row = connection.execute("SELECT id FROM blobs WHERE digest = ?", (digest,)).fetchone()
    return None if row is None else int(row[0])
