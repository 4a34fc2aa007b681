"""Which rollout was forked from which, and what stays of a rollout that is pruned before its forks.

A fork refers to rows of its source (see `replayed` and `sequences`). So a rollout with forks that is pruned is
*retired*: its record and all that no fork needs are deleted, and nothing lists it any more. The rest of
it goes with the last of those forks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from paddock.store import blobs, replayed, snapshots
from paddock.store.packing import WITH_DICTIONARY, decode, decompress
from paddock.store.sequences import MESSAGES, dictionary_of

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from paddock.store.record import RolloutRecord

PRUNED_OUTCOME = "pruned"
_BELOW = (
    "WITH RECURSIVE below (key) AS (SELECT rollout FROM forks WHERE source = ?"
    " UNION SELECT forks.rollout FROM forks JOIN below ON forks.source = below.key) "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One rollout of a tree."""

    rollout_id: str
    parent: str | None
    """The rollout that it was forked from or that it continues; None for the first one."""
    at: int | None
    """The index of the first call that is its own. None: it continues its parent after the last answer."""
    key: int | None
    """None if it was pruned. Then its outcome and its reward are unknown."""
    outcome: str | None = None
    reward: float | None = None


def add(connection: sqlite3.Connection, key: int, record: RolloutRecord) -> None:
    """Note where a new rollout comes from."""
    parent = record.fork.get("source")
    if not parent:
        return
    # The rows of a rollout that still runs may change.
    source = connection.execute(
        "SELECT id FROM rollouts WHERE rollout_id = ? AND outcome IS NOT NULL", (parent,)
    ).fetchone()
    connection.execute(
        "INSERT INTO forks (rollout, parent, at, source) VALUES (?, ?, ?, ?)",
        (key, parent, record.fork.get("at"), None if source is None else source[0]),
    )


def read(connection: sqlite3.Connection, rollout_id: str) -> list[Branch]:
    """The whole tree of a rollout: a parent comes before its forks, and those in the order in which they began."""
    by_id = {rollout_id: _read_branch(connection, rollout_id)}
    top = rollout_id
    while (parent := by_id[top].parent) is not None and parent not in by_id:
        top = parent
        by_id[top] = _read_branch(connection, top)
    branches: list[Branch] = []
    pending = [by_id[top]]
    seen: set[str] = set()
    while pending:
        branch = pending.pop()
        if branch.rollout_id in seen:
            continue
        seen.add(branch.rollout_id)
        branches.append(branch)
        pending += reversed(children(connection, branch.rollout_id))
    return branches


def children(connection: sqlite3.Connection, rollout_id: str) -> list[Branch]:
    """The forks of a rollout, in the order in which they began. One that was pruned is there if forks of it are."""
    names = connection.execute(
        "SELECT rollouts.id, rollout_id FROM forks JOIN rollouts ON rollouts.id = forks.rollout"
        " WHERE forks.parent = ? ORDER BY rollouts.started_at, rollouts.id",
        (rollout_id,),
    ).fetchall()
    return [_read_branch(connection, replayed.name_of(key, name)) for key, name in names]


def parents(connection: sqlite3.Connection) -> set[str]:
    """The ids of all rollouts that were forked."""
    return {name for (name,) in connection.execute("SELECT DISTINCT parent FROM forks")}


def families(connection: sqlite3.Connection, keys: Sequence[int]) -> list[tuple[str, list[int]]]:
    """The rollouts with these keys by their trees: the id of the first rollout of each tree, and its keys here."""
    rows = connection.execute("SELECT id, rollout_id, parent FROM forks JOIN rollouts ON rollouts.id = forks.rollout")
    parents_of = {replayed.name_of(key, name): parent for key, name, parent in rows}
    trees: dict[str, list[int]] = {}
    for key in keys:
        row = connection.execute("SELECT rollout_id FROM rollouts WHERE id = ?", (key,)).fetchone()
        if row is None:
            continue
        top, below = row[0], {row[0]}
        while (parent := parents_of.get(top)) is not None and parent not in below:
            below.add(parent)
            top = parent
        trees.setdefault(top, []).append(key)
    return list(trees.items())


def _read_branch(connection: sqlite3.Connection, rollout_id: str) -> Branch:
    row = connection.execute(
        "SELECT rollouts.id, parent, at, figures.outcome, reward FROM rollouts"
        " JOIN figures ON figures.rollout = rollouts.id LEFT JOIN forks ON forks.rollout = rollouts.id"
        " WHERE rollouts.rollout_id = ?",
        (rollout_id,),
    ).fetchone()
    if row is not None:
        key, parent, at, outcome, reward = row
        return Branch(rollout_id=rollout_id, parent=parent, at=at, key=key, outcome=outcome or None, reward=reward)
    for key, name, parent, at in connection.execute(
        "SELECT id, rollout_id, parent, at FROM rollouts LEFT JOIN forks ON forks.rollout = id WHERE outcome = ?"
        " AND rollout_id >= 'pruned/' AND rollout_id < 'pruned0'",
        (PRUNED_OUTCOME,),
    ):
        if replayed.name_of(key, name) == rollout_id:
            return Branch(rollout_id=rollout_id, parent=parent, at=at, key=None)
    return Branch(rollout_id=rollout_id, parent=None, at=None, key=None)


# -- pruning --------------------------------------------------------------------------------------


def is_needed(connection: sqlite3.Connection, key: int) -> bool:
    """Whether a fork refers to rows of this rollout."""
    return connection.execute("SELECT 1 FROM forks WHERE source = ? LIMIT 1", (key,)).fetchone() is not None


def retire(connection: sqlite3.Connection, key: int, rollout_id: str) -> int:
    """Delete all of a rollout except for what its forks refer to; how many blobs went with it."""
    for table in ("scores", "figures", "tags"):
        connection.execute(f"DELETE FROM {table} WHERE rollout = ?", (key,))
    connection.execute(
        "DELETE FROM events WHERE rollout = ? AND NOT EXISTS (SELECT 1 FROM events JOIN forks USING (rollout)"
        " WHERE source = ? AND substr(data, 1, 1) = ?)",
        (key, key, WITH_DICTIONARY),
    )
    connection.execute(
        "DELETE FROM bodies WHERE rollout = ? AND name NOT IN (SELECT name FROM bodies JOIN forks USING (rollout)"
        " WHERE source = ? AND substr(data, 1, 1) = ?)",
        (key, key, WITH_DICTIONARY),
    )
    connection.execute(
        "UPDATE rollouts SET rollout_id = ?, head = X'', outcome = ?, finished_at = NULL WHERE id = ?",
        (f"{replayed.PRUNED}{key}/{rollout_id}", PRUNED_OUTCOME, key),
    )
    return _trim(connection, key)


def next_unneeded(connection: sqlite3.Connection, source: int | None) -> int | None:
    """`source`, if it is a retired rollout that nothing refers to any more."""
    if source is None or is_needed(connection, source):
        return None
    row = connection.execute("SELECT outcome FROM rollouts WHERE id = ?", (source,)).fetchone()
    return source if row is not None and row[0] == PRUNED_OUTCOME else None


def source_of(connection: sqlite3.Connection, key: int) -> int | None:
    row = connection.execute("SELECT source FROM forks WHERE rollout = ?", (key,)).fetchone()
    return None if row is None else row[0]


def _trim(connection: sqlite3.Connection, key: int) -> int:
    """Delete the calls and sequences of a retired rollout that no fork refers to, and its snapshots; how many blobs
    went with them.

    A fork that still runs may refer to any of them."""
    running = f"{_BELOW} SELECT 1 FROM below JOIN rollouts ON rollouts.id = below.key WHERE outcome IS NULL LIMIT 1"
    if connection.execute(running, (key,)).fetchone() is not None:
        return 0
    below = [fork for (fork,) in connection.execute(f"{_BELOW} SELECT key FROM below", (key,))]
    references = [each for fork in below for each in replayed.load(connection, fork).values()]
    kept_calls = {each.call_id for each in references if each.rollout == key}
    for (call_id,) in connection.execute("SELECT call_id FROM calls WHERE rollout = ?", (key,)).fetchall():
        if call_id not in kept_calls:
            connection.execute("DELETE FROM calls WHERE rollout = ? AND call_id = ?", (key, call_id))
    heads = [
        decode(decompress(head))
        for rollout in (key, *below)
        for (head,) in connection.execute("SELECT head FROM calls WHERE rollout = ?", (rollout,))
    ]
    changes = [each.changes for each in references]
    sequences, kept_blobs = _named_by([*heads, *changes])
    kept_blobs |= _trim_sequences(connection, key, below, sequences)
    return _release_blobs(connection, key, kept_blobs)


def _named_by(heads: Sequence[dict[str, Any]]) -> tuple[set[int], set[int]]:
    """The keys of the sequences and of the blobs that heads of calls name."""
    parts = [part for head in heads for body in ("request", "forwarded") for part in head.get(body, ())]
    sequences = {value for _, kind, value in parts if kind == "sequence"}
    sequences |= {head["prompt"] for head in heads if head.get("prompt") is not None}
    return sequences, {value for _, kind, value in parts if kind == "blob"}


def _trim_sequences(connection: sqlite3.Connection, key: int, below: Sequence[int], named: set[int]) -> set[int]:
    """Delete what neither a named sequence nor one of a fork builds on. Returns the blobs of those that stay."""
    query = "SELECT id, kind, base, middle FROM sequences WHERE rollout = ?"
    own = {row[0]: row for row in connection.execute(query, (key,))}
    named |= {each for fork in below for row in connection.execute(query, (fork,)) for each in _builds_on(row)}
    needed: set[int] = set()
    pending = [each for each in named if each in own]
    while pending:
        current = pending.pop()
        if current not in needed:
            needed.add(current)
            pending += [each for each in _builds_on(own[current]) if each in own]
    for sequence in own.keys() - needed:
        connection.execute("DELETE FROM sequences WHERE id = ?", (sequence,))
    middles = [own[each][3] for each in needed if own[each][1] == MESSAGES and dictionary_of(own[each][3]) is None]
    numbers = [number for data in middles for number in orjson.loads(decompress(data).partition(b"\n")[0])]
    return {-number for number in numbers if number < 0}


def _builds_on(row: tuple[int, str, int | None, bytes]) -> set[int]:
    """The keys of the sequences that a row builds on."""
    return {key for key in (row[2], dictionary_of(row[3])) if key is not None}


def _release_blobs(connection: sqlite3.Connection, key: int, kept: set[int]) -> int:
    rows = connection.execute("SELECT blob FROM blob_references WHERE rollout = ?", (key,)).fetchall()
    unused = [blob for (blob,) in rows if blob not in kept]
    snapshot_blobs = snapshots.referenced(connection, key)
    connection.execute("DELETE FROM snapshot_references WHERE rollout = ?", (key,))
    for blob in unused:
        connection.execute("DELETE FROM blob_references WHERE rollout = ? AND blob = ?", (key, blob))
    return blobs.delete_unused(connection, [*unused, *snapshot_blobs])
