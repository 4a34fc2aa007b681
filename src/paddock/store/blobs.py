"""Content-addressed, reference-counted data: the same bytes are stored once for all rollouts.

A blob stays as long as a rollout refers to it. One that no record names yet is held for a day, so that a prune
cannot delete it.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from paddock.errors import StoreError
from paddock.store.packing import compress, decompress

if TYPE_CHECKING:
    import sqlite3

    from paddock.sqlite import Database
    from paddock.store.sequences import WriteCache

HELD_SECONDS = 24 * 3600.0
UNREFERENCED = (
    "NOT EXISTS (SELECT 1 FROM blob_references WHERE blob = blobs.id)"
    " AND NOT EXISTS (SELECT 1 FROM snapshot_references WHERE blob = blobs.id)"
)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(database: Database, data: bytes) -> str:
    """Store `data` and hold it until a record names it, for a day at most."""
    digest = digest_of(data)
    with database.read() as connection:
        exists = _find(connection, digest) is not None
    # Compressed outside the write transaction, which blocks all other writers.
    compressed = b"" if exists else compress(data)
    with database.write() as connection:
        if exists and _find(connection, digest) is None:
            compressed = compress(data)
        connection.execute(
            "INSERT INTO blobs (digest, held, held_at, data) VALUES (?, 1, ?, ?)"
            " ON CONFLICT (digest) DO UPDATE SET held = held + 1, held_at = excluded.held_at",
            (digest, time.time(), compressed),
        )
    return digest


def get(database: Database, digest: str) -> bytes:
    with database.read() as connection:
        row = connection.execute("SELECT data FROM blobs WHERE digest = ?", (digest,)).fetchone()
    if row is None:
        raise StoreError(f"the store has no blob {digest}", hint="its rollout may have been pruned")
    data = decompress(row[0])
    if digest_of(data) != digest:
        raise StoreError(f"the blob {digest} is damaged", hint="see whether the disk of the store is healthy")
    return data


def intern(connection: sqlite3.Connection, cache: WriteCache, data: bytes) -> int:
    """The key of `data`. It is stored if it is new, and the rollout of `cache` refers to it from now on."""
    digest = digest_of(data)
    key = cache.blobs.get(digest)
    if key is not None:
        return key
    key = _find(connection, digest)
    if key is None:
        key = connection.execute("INSERT INTO blobs (digest, data) VALUES (?, ?)", (digest, compress(data))).lastrowid
        assert key is not None
    connection.execute("INSERT OR IGNORE INTO blob_references (rollout, blob) VALUES (?, ?)", (cache.key, key))
    cache.blobs[digest] = key
    return key


def add_reference(connection: sqlite3.Connection, rollout: int, digest: str) -> None:
    """Note that the record of a rollout names a blob that `put` stored before."""
    key = _find(connection, digest)
    if key is None:
        return
    is_new = connection.execute(
        "INSERT OR IGNORE INTO blob_references (rollout, blob) VALUES (?, ?)", (rollout, key)
    ).rowcount
    if is_new:
        connection.execute("UPDATE blobs SET held = max(held - 1, 0) WHERE id = ?", (key,))


def delete_unused(connection: sqlite3.Connection, candidates: list[int]) -> int:
    """Delete unreferenced blobs among `candidates` that no process holds; how many."""
    expired = time.time() - HELD_SECONDS
    unused = f"{UNREFERENCED} AND (held = 0 OR held_at < ?)"
    return sum(
        connection.execute(f"DELETE FROM blobs WHERE id = ? AND {unused}", (key, expired)).rowcount
        for key in candidates
    )


class Reader:
    """Reads blobs by key, each once."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._cache: dict[int, bytes] = {}

    def __call__(self, key: int) -> bytes:
        if key not in self._cache:
            row = self._connection.execute("SELECT data FROM blobs WHERE id = ?", (key,)).fetchone()
            self._cache[key] = decompress(row[0])
        return self._cache[key]


def _find(connection: sqlite3.Connection, digest: str) -> int | None:
    row = connection.execute("SELECT id FROM blobs WHERE digest = ?", (digest,)).fetchone()
    return None if row is None else int(row[0])
