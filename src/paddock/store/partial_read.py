"""Partial reads of one rollout: calls without tokens, single prompts, conversations and completions.

The prompts of a long rollout, written out, may be gigabytes that differ only at their ends. Nothing here expands more
of them than the caller needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

from paddock.store import blobs, calls
from paddock.store.packing import ID_BYTES, decode, decompress, unpack_floats, unpack_ids
from paddock.store.sequences import Items, LruCache, SharedEnds, decode_items, join

if TYPE_CHECKING:
    import sqlite3

CACHED_SEQUENCES = 16
"""Sequences that are cached whole; a new one nearly always builds on one of the last few."""


@dataclass(slots=True)
class CallHead:
    """A call without tokens, logprobs, texts and conversation."""

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
    def conversation(self) -> tuple[str, int] | None:
        """The field of the request that has the conversation, and the key of its sequence."""
        return next(((name, value) for name, kind, value in self.request if kind == "sequence"), None)


@dataclass(slots=True)
class StoredCompletion:
    """What one call sampled."""

    ids: list[int]
    logprobs: list[float]
    texts: list[str]
    tops: list[dict[str, float]]


_HEAD = "call_id, head, prompt_tokens, completion_tokens, logprob_sum"


def heads(connection: sqlite3.Connection, rollout: int) -> list[CallHead]:
    """All calls, in the order in which they began."""
    rows = connection.execute(f"SELECT {_HEAD} FROM calls WHERE rollout = ? ORDER BY position, rowid", (rollout,))
    return [_head(connection, rollout, *row) for row in rows.fetchall()]


def head(connection: sqlite3.Connection, rollout: int, call_id: str) -> CallHead | None:
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
) -> CallHead:
    values = decode(decompress(data))
    prompt, plain = values.pop("prompt", None), values.pop("prompt_token_ids", [])
    for name in ("tokens", "top_logprobs"):
        values.pop(name, None)
    if prompt_tokens is None or completion_tokens is None:
        # Written by version 1, which did not count.
        prompt_tokens = len(plain) if prompt is None else len(PromptReader().get(connection, prompt)) // ID_BYTES
        sampled = completion(connection, rollout, call_id, texts=False)
        completion_tokens, logprob_sum = len(sampled.ids), calls.logprob_sum(sampled.logprobs)
    request, forwarded = values.pop("request"), values.pop("forwarded")
    return CallHead(values, prompt_tokens, completion_tokens, logprob_sum, prompt, request, forwarded)


def completion(connection: sqlite3.Connection, rollout: int, call_id: str, *, texts: bool = True) -> StoredCompletion:
    """The completion of one call; without `texts`, only ids and logprobs."""
    ids, logprobs, packed_texts, packed_tops = connection.execute(
        "SELECT completion, logprobs, texts, tops FROM calls WHERE rollout = ? AND call_id = ?", (rollout, call_id)
    ).fetchone()
    sampled = StoredCompletion(calls.unpack(ids, unpack_ids), calls.unpack(logprobs, unpack_floats), [], [])
    if not texts:
        return sampled
    if packed_texts is not None:
        sampled.texts, sampled.tops = decode(decompress(packed_texts)), decode(decompress(packed_tops))
        return sampled
    # Written by version 1, whose head holds the texts.
    (data,) = connection.execute(
        "SELECT head FROM calls WHERE rollout = ? AND call_id = ?", (rollout, call_id)
    ).fetchone()
    values = decode(decompress(data))
    sampled.texts, sampled.tops = values.get("tokens", []), values.get("top_logprobs", [])
    return sampled


def find_texts(connection: sqlite3.Connection, rollout: int, token_ids: set[int]) -> dict[int, str]:
    """The texts of those ids that were sampled somewhere in the rollout. The latest calls are read first."""
    missing, texts_by_id = set(token_ids), dict[int, str]()
    names = "SELECT call_id FROM calls WHERE rollout = ? ORDER BY position DESC, rowid DESC"
    for (name,) in connection.execute(names, (rollout,)).fetchall():
        if not missing:
            break
        (packed,) = connection.execute(
            "SELECT completion FROM calls WHERE rollout = ? AND call_id = ?", (rollout, name)
        ).fetchone()
        ids = calls.unpack(packed, unpack_ids)
        if missing.isdisjoint(ids):
            continue
        texts = _texts(connection, rollout, name)
        if len(texts) == len(ids):
            new = {number: text for number, text in zip(ids, texts, strict=True) if number in missing}
            texts_by_id.update(new)
            missing -= new.keys()
    return texts_by_id


def _texts(connection: sqlite3.Connection, rollout: int, call_id: str) -> list[str]:
    (packed,) = connection.execute(
        "SELECT texts FROM calls WHERE rollout = ? AND call_id = ?", (rollout, call_id)
    ).fetchone()
    if packed is None:
        return completion(connection, rollout, call_id).texts
    texts: list[str] = decode(decompress(packed))
    return texts


class _SequenceReader(Generic[Items]):
    """Sequences of one rollout, expanded. Read in the order of the calls, each costs its new part."""

    def __init__(self, empty: Items, width: int) -> None:
        self._empty: Items = empty
        self._width = width
        self._cache: LruCache[Items] = LruCache(CACHED_SEQUENCES)

    def _read(self, connection: sqlite3.Connection, key: int) -> Items:
        rows = []
        base: int | None = key
        while base is not None and base not in self._cache:
            query = "SELECT base, head, tail, middle FROM sequences WHERE id = ?"
            base, *row = connection.execute(query, (base,)).fetchone()
            rows.append(row)
        items = self._empty if base is None else self._cache[base]
        for head, tail, middle in reversed(rows):
            ends = SharedEnds(head * self._width, tail * self._width)
            items = join(items, ends, self._decode(connection, decompress(middle)))
        self._cache.put(key, items)
        return items

    def _decode(self, connection: sqlite3.Connection, data: bytes) -> Items:
        raise NotImplementedError


class PromptReader(_SequenceReader[bytes]):
    """The prompts of one rollout, as packed ids."""

    def __init__(self) -> None:
        super().__init__(b"", ID_BYTES)

    def get(self, connection: sqlite3.Connection, key: int | None) -> bytes:
        return b"" if key is None else self._read(connection, key)

    def _decode(self, connection: sqlite3.Connection, data: bytes) -> bytes:
        return data


class ConversationReader(_SequenceReader[list[bytes]]):
    """The conversations of one rollout, as encoded messages."""

    def __init__(self) -> None:
        super().__init__([], 1)

    def get(self, connection: sqlite3.Connection, key: int) -> tuple[list[bytes], int | None, int]:
        """The messages, the key of a cached sequence that they build on, and how many messages they share with it."""
        base, shared = connection.execute("SELECT base, head FROM sequences WHERE id = ?", (key,)).fetchone()
        messages = self._read(connection, key)
        return messages, base if base in self._cache else None, shared

    def _decode(self, connection: sqlite3.Connection, data: bytes) -> list[bytes]:
        return decode_items(data, blobs.Reader(connection))
