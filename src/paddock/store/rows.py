"""Rows of a rollout beside its calls and events: the record, its long texts and its later scores.

The head of a record holds all small values as JSON and is what is read back; the columns beside it are only
searched. Long texts ("bodies") have rows of their own, so that lists need not read them. Those of a fork are
compressed against those of its source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

from paddock.errors import StoreError
from paddock.store import blobs, replayed, search, tree
from paddock.store.outcome import Outcome
from paddock.store.packing import WITH_DICTIONARY, compress, compress_against, decode, decompress, encode
from paddock.store.record import RolloutRecord

if TYPE_CHECKING:
    import sqlite3
    from array import array
    from collections.abc import Callable, Iterator

    from paddock.store.sequences import WriteCache

LOGS = (
    "agent_log",
    "verifier_stdout",
    "verifier_stderr",
    "install_log",
    "build_log",
    "verifier_build_log",
    "artifacts",
    "proxy_log",
    "transcript",
    "workdir_files",
    "connections",
)
"""Left out where records are listed."""
BODIES = ("instruction", "config", *LOGS)
_HEAD_FIELDS = tuple(
    field.name for field in fields(RolloutRecord) if field.name not in (*BODIES, "call_count", "store_folder")
)
MIN_PREFIX_CHARACTERS = 4
"""Fewer characters of an id are not looked up."""
LATEST = "latest"
"""In place of an id: the rollout that began last."""
_CANDIDATES = 5
PAGE_ROWS = 100
_COLUMNS = ("task_id", "agent", "model", "batch_id", "started_at")


def key_of(connection: sqlite3.Connection, rollout_id: str) -> int | None:
    row = connection.execute("SELECT id FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    return None if row is None else int(row[0])


def insert(connection: sqlite3.Connection, record: RolloutRecord, owner: str) -> int:
    """Store a running rollout. Raises sqlite3.IntegrityError if its id exists."""
    values = _head_values(record, running=True)
    key = connection.execute(
        f"INSERT INTO rollouts (rollout_id, owner, head, {', '.join(_COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (record.rollout_id, owner, compress(encode(values)), *(values[name] for name in _COLUMNS)),
    ).lastrowid
    assert key is not None
    search.save(connection, key, values)
    tree.add(connection, key, record)
    return key


def update(connection: sqlite3.Connection, key: int, record: RolloutRecord) -> bool:
    """Write the record of a running rollout. False, with nothing changed, if the rollout has an outcome."""
    return _update(connection, key, record, outcome=None, finished_at=None)


def finish(connection: sqlite3.Connection, key: int, record: RolloutRecord) -> bool:
    """Write the record with its outcome. False, with nothing changed, if the rollout has an outcome already."""
    assert record.outcome is not None
    return _update(connection, key, record, outcome=str(record.outcome), finished_at=record.finished_at)


def _update(
    connection: sqlite3.Connection, key: int, record: RolloutRecord, *, outcome: str | None, finished_at: float | None
) -> bool:
    values = _head_values(record, running=outcome is None)
    changes = ", ".join(f"{name} = ?" for name in ("head", "outcome", "finished_at", *_COLUMNS))
    columns = (values[name] for name in _COLUMNS)
    changed = connection.execute(
        f"UPDATE rollouts SET {changes} WHERE id = ? AND outcome IS NULL",
        (compress(encode(values)), outcome, finished_at, *columns, key),
    ).rowcount
    if changed:
        search.save(connection, key, values)
    return bool(changed)


def save_bodies(connection: sqlite3.Connection, cache: WriteCache, record: RolloutRecord) -> None:
    """Write the long texts that changed. An empty one leaves the stored one, so that a record that was read without
    its logs does not delete them."""
    source = tree.source_of(connection, cache.key) if record.fork else None
    for name in BODIES:
        value = getattr(record, name)
        if not value:
            continue
        data = encode(value)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if cache.bodies.get(name) == digest:
            continue
        recorded = b"" if source is None else _read_body(connection, source, name)
        connection.execute(
            "INSERT INTO bodies (rollout, name, data) VALUES (?, ?, ?)"
            " ON CONFLICT (rollout, name) DO UPDATE SET data = excluded.data",
            (cache.key, name, compress_against(recorded, data) or compress(data)),
        )
        cache.bodies[name] = digest
    step_blobs = [step[name] for step in record.steps for name in ("workdir_blob", "artifact_blob")]
    own_blobs = (record.workdir_blob, record.task_blob, record.task_json_blob, record.artifact_blob)
    for blob in (*own_blobs, *step_blobs):
        if blob:
            blobs.add_reference(connection, cache.key, blob)


def head(connection: sqlite3.Connection, key: int) -> dict[str, Any] | None:
    """The small values of a record, by their names; None if the rollout is gone."""
    row = connection.execute("SELECT head FROM rollouts WHERE id = ?", (key,)).fetchone()
    if row is None:
        return None
    values: dict[str, Any] = decode(decompress(row[0]))
    return values


def read(connection: sqlite3.Connection, key: int, names: Sequence[str] = BODIES) -> RolloutRecord:
    values = head(connection, key)
    assert values is not None
    marks = ", ".join("?" * len(names))
    for name, data in connection.execute(
        f"SELECT name, data FROM bodies WHERE rollout = ? AND name IN ({marks})", (key, *names)
    ).fetchall():
        values[name] = decode(_decompress_body(connection, key, name, data))
    return to_record(values)


def to_record(head: Mapping[str, Any]) -> RolloutRecord:
    """The record that a head, perhaps with some of the long texts, was made from."""
    values = dict(head)
    outcome, call_count = values.pop("outcome"), values.pop("calls")
    return RolloutRecord(**values, outcome=None if outcome is None else Outcome(outcome), call_count=call_count)


def _read_body(connection: sqlite3.Connection, key: int, name: str) -> bytes:
    """A long text as it was encoded; empty if there is none."""
    row = connection.execute("SELECT data FROM bodies WHERE rollout = ? AND name = ?", (key, name)).fetchone()
    return b"" if row is None else _decompress_body(connection, key, name, row[0])


def _decompress_body(connection: sqlite3.Connection, key: int, name: str, data: bytes) -> bytes:
    if not data.startswith(WITH_DICTIONARY):
        return decompress(data)
    source = tree.source_of(connection, key)
    assert source is not None
    return decompress(data, _read_body(connection, source, name))


def find(connection: sqlite3.Connection, rollout_id: str) -> int | None:
    """By its id, the first characters of it, or `latest`. Raises StoreError if several begin with them."""
    if rollout_id.startswith(replayed.PRUNED):
        return None
    key = key_of(connection, rollout_id)
    if key is None and rollout_id == LATEST:
        # Rows are added when a rollout begins. `figures` may be missing in a store of an earlier version.
        row = connection.execute(
            "SELECT id FROM rollouts WHERE outcome IS NOT ? ORDER BY id DESC LIMIT 1", (tree.PRUNED_OUTCOME,)
        ).fetchone()
        return None if row is None else int(row[0])
    if key is not None or len(rollout_id) < MIN_PREFIX_CHARACTERS:
        return key
    candidates = connection.execute(
        "SELECT id, rollout_id FROM rollouts WHERE rollout_id >= ? AND rollout_id < ? AND outcome IS NOT ?"
        " ORDER BY rollout_id LIMIT ?",
        (rollout_id, rollout_id + "\U0010ffff", tree.PRUNED_OUTCOME, _CANDIDATES + 1),
    ).fetchall()
    if len(candidates) > 1:
        names = [name for _, name in candidates]
        listed = ", ".join(names[:_CANDIDATES]) + (", …" if len(names) > _CANDIDATES else "")
        raise StoreError(f"{rollout_id} could be {listed}", hint="give more characters of the id", candidates=names)
    return int(candidates[0][0]) if candidates else None


def existing(connection: sqlite3.Connection, keys: Sequence[int]) -> set[int]:
    """Those of a page of keys whose rollouts were not deleted."""
    marks = ", ".join("?" * len(keys))
    return {key for (key,) in connection.execute(f"SELECT id FROM rollouts WHERE id IN ({marks})", (*keys,))}


def _head_values(record: RolloutRecord, *, running: bool) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in _HEAD_FIELDS} | {"calls": record.call_count}
    if running:
        values["outcome"] = None
    return values


# -- lists ----------------------------------------------------------------------------------------


class RecordList(Sequence[RolloutRecord]):
    """The records of a query, read in pages while they are iterated over.

    Which rollouts they are is decided once, by their keys (8 bytes each): rollouts that begin later are not among
    them, and a store of any size is read in little memory. A rollout that was deleted since is left out. Use it while
    the store is open; `list(...)` of it keeps the records.
    """

    def __init__(self, keys: array[int], read: Callable[[Sequence[int]], list[RolloutRecord]]) -> None:
        self._keys = keys
        self._read = read

    def __iter__(self) -> Iterator[RolloutRecord]:
        starts = range(0, len(self._keys), PAGE_ROWS)
        return chain.from_iterable(self._read(self._keys[start : start + PAGE_ROWS]) for start in starts)

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> RolloutRecord: ...
    @overload
    def __getitem__(self, index: slice) -> RecordList: ...
    def __getitem__(self, index: int | slice) -> RolloutRecord | RecordList:
        if isinstance(index, slice):
            return RecordList(self._keys[index], self._read)
        records = self._read([self._keys[index]])
        if not records:
            raise StoreError("that rollout was deleted meanwhile", hint="list them again")
        return records[0]

    def __eq__(self, other: object) -> bool:
        """Compares with another RecordList, or with a list of records."""
        return list(self) == list(other) if isinstance(other, RecordList | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RecordList({len(self)} rollouts)"


# -- scores ---------------------------------------------------------------------------------------


def add_score(connection: sqlite3.Connection, rollout: int, score: dict[str, Any]) -> None:
    connection.execute("INSERT INTO scores (rollout, data) VALUES (?, ?)", (rollout, compress(encode(score))))


def read_scores(connection: sqlite3.Connection, rollout: int) -> list[dict[str, Any]]:
    rows = connection.execute("SELECT data FROM scores WHERE rollout = ? ORDER BY id", (rollout,))
    return [decode(decompress(data)) for (data,) in rows]
