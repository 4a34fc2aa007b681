"""Content-addressed, reference-counted data: the same bytes are stored once for all rollouts.

A blob stays as long as a rollout refers to it. One that no record names yet is held for a day, so that a prune
cannot delete it.
"""

from __future__ import annotations

import hashlib
import time
from functools import partial
from typing import TYPE_CHECKING

from paddock.errors import StoreError
from paddock.store import archives
from paddock.store.packing import compress, decompress

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator

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
    """Store `data` and hold it until a record names it, for a day at most. See `archives` for large ones."""
    digest = digest_of(data)
    with database.read() as connection:
        exists = _find(connection, digest) is not None
    if exists and _hold(database, digest):
        return digest
    # Compressed outside the write transaction, which blocks all other writers.
    parts = archives.split(data)
    files = {} if parts is None else parts.files
    stored = {digest: compress(data) if parts is None else parts.rest}
    with database.read() as connection:
        existing = {name for name in files if _find(connection, name) is not None}
    stored |= {name: b"" if name in existing else compress(content) for name, content in files.items()}
    with database.write() as connection:
        for name, packed in stored.items():
            if name in existing and _find(connection, name) is None:
                packed = compress(files[name])
            connection.execute(
                "INSERT INTO blobs (digest, held, held_at, data) VALUES (?, 1, ?, ?)"
                " ON CONFLICT (digest) DO UPDATE SET held = held + 1, held_at = excluded.held_at",
                (name, time.time(), packed),
            )
    return digest


def _hold(database: Database, digest: str) -> bool:
    """Hold a blob that is stored, with its parts. False if it was deleted meanwhile."""
    with database.write() as connection:
        names = list(_with_parts(connection, digest))
        for name in names:
            connection.execute("UPDATE blobs SET held = held + 1, held_at = ? WHERE digest = ?", (time.time(), name))
        return bool(names)


def _with_parts(connection: sqlite3.Connection, digest: str) -> Iterator[str]:
    """The digest of a blob, and those of the parts that it needs. Nothing if it is not stored."""
    row = connection.execute("SELECT data FROM blobs WHERE digest = ?", (digest,)).fetchone()
    if row is not None:
        yield digest
        for part in archives.digests(row[0]):
            yield from _with_parts(connection, part)


def stored_bytes(connection: sqlite3.Connection, digest: str) -> int:
    """How large a blob is in the store, with its parts; 0 if it is not there."""
    query = "SELECT length(data) FROM blobs WHERE digest = ?"
    return sum(connection.execute(query, (name,)).fetchone()[0] for name in _with_parts(connection, digest))


def get(database: Database, digest: str) -> bytes:
    with database.read() as connection:
        data = read(connection, digest)
    if digest_of(data) != digest:
        raise StoreError(f"the blob {digest} is damaged", hint="see whether the disk of the store is healthy")
    return data


def read(connection: sqlite3.Connection, digest: str) -> bytes:
    """A blob, unchecked. Raises StoreError if it is not there."""
    row = connection.execute("SELECT data FROM blobs WHERE digest = ?", (digest,)).fetchone()
    if row is None:
        raise StoreError(f"the store has no blob {digest}", hint="its rollout may have been pruned")
    return archives.join(row[0], partial(read, connection))


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
    """Note that the record of a rollout names a blob that `put` stored before, and so needs its parts too."""
    key = _find(connection, digest)
    query = "SELECT 1 FROM blob_references WHERE rollout = ? AND blob = ?"
    if key is None or connection.execute(query, (rollout, key)).fetchone() is not None:
        return
    # `put` held each of them once, also a part that the rollout has in another archive.
    for name in list(_with_parts(connection, digest)):
        part = _find(connection, name)
        connection.execute("INSERT OR IGNORE INTO blob_references (rollout, blob) VALUES (?, ?)", (rollout, part))
        connection.execute("UPDATE blobs SET held = max(held - 1, 0) WHERE id = ?", (part,))


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
