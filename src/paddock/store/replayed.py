"""Replayed calls of forks: stored as a reference to the recorded call, and what differs from it.

A fork repeats the answers of its source, so its replayed calls have no rows of their own in `calls`. All of them are
one value in `forks.replayed`: for each call the rollout and the call that have the data, and the fields of its head
that differ. A reference always names the rollout that sampled the call, so that it never leads to another reference.
`tree` keeps that rollout's rows as long as anything refers to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.store import sequences
from paddock.store.packing import compress, decode, decompress, encode

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Mapping

    from paddock.capture.trace import Call
    from paddock.store.sequences import WriteCache


@dataclass(frozen=True, slots=True)
class CallReference:
    """Where the data of a replayed call is."""

    rollout: int
    """The key of the rollout that sampled it."""
    call_id: str
    """Its id there."""
    changes: dict[str, Any]
    """Fields of the head of a call, in place of the recorded ones."""


@dataclass(slots=True)
class ForkState:
    """What is remembered of a fork that is being written. Of any other rollout, `source` is None."""

    source: int | None = None
    """The key of the rollout that it was forked from."""
    at: int | None = None
    sources: dict[str, int] = field(default_factory=dict)
    """The keys of the rollouts that it descends from, by their ids."""
    references: dict[str, CallReference] = field(default_factory=dict)
    prompts: sequences.PromptReader = field(default_factory=sequences.PromptReader)
    conversations: sequences.ConversationReader = field(default_factory=sequences.ConversationReader)


PRUNED = "pruned/"
"""Begins the id of a rollout that was pruned, and whose rows others need. Then its key and its own id follow."""


# -- reading --------------------------------------------------------------------------------------


def load(connection: sqlite3.Connection, rollout: int) -> dict[str, CallReference]:
    """The replayed calls of a rollout by their ids; empty if it is no fork."""
    return load_many(connection, [rollout]).get(rollout, {})


def load_many(connection: sqlite3.Connection, rollouts: Iterable[int]) -> dict[int, dict[str, CallReference]]:
    """The same for several rollouts; those without replayed calls are left out."""
    keys = list(rollouts)
    marks = ", ".join("?" * len(keys))
    rows = connection.execute(
        f"SELECT rollout, replayed FROM forks WHERE rollout IN ({marks}) AND replayed IS NOT NULL", keys
    )
    return {
        rollout: {name: CallReference(*values) for name, values in decode(decompress(data)).items()}
        for rollout, data in rows
    }


def name_of(key: int, rollout_id: str) -> str:
    """The id of a rollout, also of one that was pruned."""
    return rollout_id.removeprefix(f"{PRUNED}{key}/")


def locate(connection: sqlite3.Connection, rollout: int, call_id: str) -> CallReference | None:
    """Where the row of a call is; None if there is no such call."""
    query = "SELECT 1 FROM calls WHERE rollout = ? AND call_id = ?"
    if connection.execute(query, (rollout, call_id)).fetchone() is not None:
        return CallReference(rollout, call_id, {})
    return load(connection, rollout).get(call_id)


# -- writing --------------------------------------------------------------------------------------


def state_of(connection: sqlite3.Connection, cache: WriteCache) -> ForkState:
    """The state of the rollout of a cache; read from the store when it is needed for the first time."""
    if cache.fork is None:
        row = connection.execute("SELECT source, at FROM forks WHERE rollout = ?", (cache.key,)).fetchone()
        source, at = row or (None, None)
        cache.fork = ForkState(source, at, _find_sources(connection, cache.key), load(connection, cache.key))
    return cache.fork


def find_source_row(
    connection: sqlite3.Connection, cache: WriteCache, call: Call
) -> tuple[CallReference, tuple[Any, ...]] | None:
    """The row that a replayed call can refer to: head, completion, logprobs, texts, tops. None if there is none.

    The prompt and the conversation of that row, or of the call in whose place the fork begins, become bases for what
    is saved next."""
    state = state_of(connection, cache)
    cache.counterparts.clear()
    if state.source is None:
        return None
    place = _place_of(connection, state, call)
    if place is None:
        return None
    row = connection.execute(
        "SELECT head, completion, logprobs, texts, tops FROM calls WHERE rollout = ? AND call_id = ?", place
    ).fetchone()
    if row is None or row[3] is None:
        return None
    head = decode(decompress(row[0]))
    _share_sequences(connection, cache, head)
    return None if call.replayed_from is None else (CallReference(*place, {}), (head, *row[1:]))


def _place_of(connection: sqlite3.Connection, state: ForkState, call: Call) -> tuple[int, str] | None:
    """The rollout and the id of the recorded call: the replayed one, or the one that the first live call replaces."""
    if call.replayed_from is not None:
        rollout_id, _, call_id = call.replayed_from.rpartition("/")
        return (state.sources[rollout_id], call_id) if rollout_id in state.sources else None
    if call.index != state.at or state.source is None:
        return None
    query = "SELECT call_id FROM calls WHERE rollout = ? AND position = ?"
    row = connection.execute(query, (state.source, call.index)).fetchone()
    return None if row is None else (state.source, row[0])


def save(
    connection: sqlite3.Connection,
    cache: WriteCache,
    call_id: str,
    reference: CallReference,
    source_head: Mapping[str, Any],
    head: Mapping[str, Any],
) -> None:
    """Store a call as a reference to a row whose head is `source_head`."""
    changes = {
        name: value
        for name, value in head.items()
        if name not in source_head or encode(source_head[name]) != encode(value)
    }
    state = state_of(connection, cache)
    state.references[call_id] = CallReference(reference.rollout, reference.call_id, changes)
    connection.execute("DELETE FROM calls WHERE rollout = ? AND call_id = ?", (cache.key, call_id))
    _write(connection, cache.key, state)


def forget(connection: sqlite3.Connection, cache: WriteCache, call_id: str) -> None:
    """The call has a row of its own from now on."""
    state = state_of(connection, cache)
    if state.references.pop(call_id, None) is not None:
        _write(connection, cache.key, state)


def _write(connection: sqlite3.Connection, rollout: int, state: ForkState) -> None:
    values = {name: [each.rollout, each.call_id, each.changes] for name, each in state.references.items()}
    data = compress(encode(values)) if values else None
    connection.execute("UPDATE forks SET replayed = ? WHERE rollout = ?", (data, rollout))


def _find_sources(connection: sqlite3.Connection, rollout: int) -> dict[str, int]:
    rows = connection.execute(
        "WITH RECURSIVE above (key) AS (SELECT source FROM forks WHERE rollout = ? AND source IS NOT NULL"
        " UNION SELECT source FROM forks JOIN above ON rollout = key WHERE source IS NOT NULL)"
        " SELECT id, rollout_id FROM rollouts JOIN above ON rollouts.id = above.key",
        (rollout,),
    )
    return {name_of(key, name): key for key, name in rows}


def _share_sequences(connection: sqlite3.Connection, cache: WriteCache, head: Mapping[str, Any]) -> None:
    """Make the sequences of a recorded call bases, and counterparts, for those of the fork."""
    assert cache.fork is not None
    prompt = head.get("prompt")
    if prompt is not None:
        cache.tokens.put(prompt, cache.fork.prompts.get(connection, prompt))
        cache.counterparts[sequences.TOKENS] = prompt
    for body in ("request", "forwarded"):
        for _, kind, value in head[body]:
            if kind == "sequence":
                cache.messages.put(value, cache.fork.conversations.get(connection, value)[0])
                cache.counterparts[sequences.MESSAGES] = value
