"""One rollout without its weight: calls without tokens, messages as they were added, tokens where they are asked for.

A whole trace may hold gigabytes of prompts that are the same but for their ends. Nothing here builds more of
them than a question needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.rollouts.store import blobs, calls, sequences
from paddock.rollouts.store.deltas import Shared, join
from paddock.rollouts.store.live import Recent
from paddock.rollouts.store.packing import ID_BYTES, decode, unpack_floats, unpack_ids, unsqueeze

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator

KEPT = 16
"""Sequences that are remembered whole; a new one nearly always builds on one of the last few."""


@dataclass(slots=True)
class Head:
    """A call without tokens, logprobs, texts and the conversation that it was asked with."""

    values: dict[str, Any]
    """The plain values of a `Call`, by their names."""
    prompt_tokens: int
    completion_tokens: int
    logprob_sum: float | None
    prompt: int | None
    """The key of the prompt's sequence of tokens."""
    request: list[list[Any]] = field(default_factory=list)
    forwarded: list[list[Any]] = field(default_factory=list)

    @property
    def id(self) -> str:
        return str(self.values["id"])

    @property
    def history(self) -> tuple[str, int] | None:
        """Under which name the request has its conversation, and the key of its sequence."""
        return next(((name, value) for name, kind, value in self.request if kind == "sequence"), None)


@dataclass(slots=True)
class Sampled:
    """What one call sampled."""

    ids: list[int]
    logprobs: list[float]
    texts: list[str]
    tops: list[dict[str, float]]


_HEAD = "call_id, head, prompt_tokens, completion_tokens, logprob_sum"


def heads(connection: sqlite3.Connection, rollout: int) -> list[Head]:
    """All calls, in the order in which they began."""
    found = connection.execute(f"SELECT {_HEAD} FROM calls WHERE rollout = ? ORDER BY position, rowid", (rollout,))
    return [_head(connection, rollout, *row) for row in found.fetchall()]


def head(connection: sqlite3.Connection, rollout: int, call_id: str) -> Head | None:
    row = connection.execute(
        f"SELECT {_HEAD} FROM calls WHERE rollout = ? AND call_id = ?", (rollout, call_id)
    ).fetchone()
    return None if row is None else _head(connection, rollout, *row)


def _head(
    connection: sqlite3.Connection,
    rollout: int,
    call_id: str,
    data: bytes,
    prompt_tokens: int | None,
    completion_tokens: int | None,
    logprob_sum: float | None,
) -> Head:
    values = decode(unsqueeze(data))
    prompt, plain = values.pop("prompt", None), values.pop("prompt_token_ids", [])
    for name in ("tokens", "top_logprobs"):
        values.pop(name, None)
    if prompt_tokens is None or completion_tokens is None:
        # Written by version 1, which did not count.
        prompt_tokens = len(plain) if prompt is None else len(token_bytes(connection, rollout, prompt)) // ID_BYTES
        found = sampled(connection, rollout, call_id, texts=False)
        completion_tokens, logprob_sum = len(found.ids), calls.logprob_sum(found.logprobs)
    request, forwarded = values.pop("request"), values.pop("forwarded")
    return Head(values, prompt_tokens, completion_tokens, logprob_sum, prompt, request, forwarded)


def sampled(connection: sqlite3.Connection, rollout: int, call_id: str, *, texts: bool = True) -> Sampled:
    """The completion of one call; without `texts`, only ids and logprobs."""
    completion, logprobs, words, tops = connection.execute(
        "SELECT completion, logprobs, texts, tops FROM calls WHERE rollout = ? AND call_id = ?", (rollout, call_id)
    ).fetchone()
    found = Sampled(calls.unpack(completion, unpack_ids), calls.unpack(logprobs, unpack_floats), [], [])
    if not texts:
        return found
    if words is not None:
        found.texts, found.tops = decode(unsqueeze(words)), decode(unsqueeze(tops))
        return found
    (data,) = connection.execute(
        "SELECT head FROM calls WHERE rollout = ? AND call_id = ?", (rollout, call_id)
    ).fetchone()
    values = decode(unsqueeze(data))
    found.texts, found.tops = values.get("tokens", []), values.get("top_logprobs", [])
    return found


def texts_of(connection: sqlite3.Connection, rollout: int, wanted: set[int]) -> dict[int, str]:
    """The texts of those ids that were sampled somewhere in the rollout. The latest calls are looked at first."""
    missing, known = set(wanted), dict[int, str]()
    names = "SELECT call_id FROM calls WHERE rollout = ? ORDER BY position DESC, rowid DESC"
    for (name,) in connection.execute(names, (rollout,)).fetchall():
        if not missing:
            break
        (completion,) = connection.execute(
            "SELECT completion FROM calls WHERE rollout = ? AND call_id = ?", (rollout, name)
        ).fetchone()
        ids = calls.unpack(completion, unpack_ids)
        if missing.isdisjoint(ids):
            continue
        texts = _texts(connection, rollout, name)
        if len(texts) == len(ids):
            found = {number: text for number, text in zip(ids, texts, strict=True) if number in missing}
            known.update(found)
            missing -= found.keys()
    return known


def _texts(connection: sqlite3.Connection, rollout: int, call_id: str) -> list[str]:
    (texts,) = connection.execute(
        "SELECT texts FROM calls WHERE rollout = ? AND call_id = ?", (rollout, call_id)
    ).fetchone()
    if texts is None:
        return sampled(connection, rollout, call_id).texts
    found: list[str] = decode(unsqueeze(texts))
    return found


def prompt_bytes(connection: sqlite3.Connection, rollout: int, head: Head) -> bytes:
    """The packed ids of a call's prompt."""
    return b"" if head.prompt is None else token_bytes(connection, rollout, head.prompt)


def token_bytes(connection: sqlite3.Connection, rollout: int, key: int) -> bytes:
    """One sequence of packed ids, put together from those that it builds on."""
    tokens = b""
    for _, head, tail, middle in _lineage(connection, rollout, key):
        tokens = join(tokens, Shared(head * ID_BYTES, tail * ID_BYTES), unsqueeze(middle))
    return tokens


def _lineage(connection: sqlite3.Connection, rollout: int, key: int) -> Iterator[tuple[int, int, int, bytes]]:
    """A sequence and all that it builds on, the first of them first."""
    found = connection.execute(
        "WITH RECURSIVE lineage (id, base, head, tail, middle) AS ("
        " SELECT id, base, head, tail, middle FROM sequences WHERE id = ? AND rollout = ?"
        " UNION ALL SELECT each.id, each.base, each.head, each.tail, each.middle"
        " FROM sequences AS each JOIN lineage ON each.id = lineage.base)"
        " SELECT id, head, tail, middle FROM lineage ORDER BY id",
        (key, rollout),
    )
    yield from found


class Prompts:
    """The prompts of one rollout, packed. Asked for in the order of the calls, each costs its new part."""

    def __init__(self, rollout: int) -> None:
        self.rollout = rollout
        self._known: Recent[bytes] = Recent(KEPT)

    def get(self, connection: sqlite3.Connection, key: int | None) -> bytes:
        if key is None:
            return b""
        known = self._known.get(key)
        if known is None:
            base, head, tail, middle = connection.execute(
                "SELECT base, head, tail, middle FROM sequences WHERE id = ?", (key,)
            ).fetchone()
            if base is None or base in self._known:
                before = b"" if base is None else self._known[base]
                known = join(before, Shared(head * ID_BYTES, tail * ID_BYTES), unsqueeze(middle))
            else:
                known = token_bytes(connection, self.rollout, key)
        self._known.use(key, known)
        return known


class Histories:
    """The conversations of one rollout, as encoded messages."""

    def __init__(self, rollout: int) -> None:
        self.rollout = rollout
        self._known: Recent[list[bytes]] = Recent(KEPT)

    def get(self, connection: sqlite3.Connection, key: int) -> tuple[list[bytes], int | None, int]:
        """The messages, the sequence that they build on, and how many messages of it they begin with."""
        base, head, tail, middle = connection.execute(
            "SELECT base, head, tail, middle FROM sequences WHERE id = ?", (key,)
        ).fetchone()
        known = self._known.get(key)
        if known is None:
            read_blob = blobs.Reader(connection)
            if base is None or base in self._known:
                before = [] if base is None else self._known[base]
                known = join(before, Shared(head, tail), sequences.decode_items(unsqueeze(middle), read_blob))
            else:
                known = []
                for _, front, back, new in _lineage(connection, self.rollout, key):
                    known = join(known, Shared(front, back), sequences.decode_items(unsqueeze(new), read_blob))
        self._known.use(key, known)
        return known, base if base in self._known else None, head
