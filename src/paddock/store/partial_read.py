"""Partial reads of one rollout: calls without tokens, single prompts, conversations and completions.

The prompts of a long rollout, written out, may be gigabytes that differ only at their ends. Nothing here expands more
of them than the caller needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.store import calls, replayed
from paddock.store.packing import ID_BYTES, decode, decompress, unpack_floats, unpack_ids
from paddock.store.sequences import PromptReader

if TYPE_CHECKING:
    import sqlite3

    from paddock.store.replayed import CallReference


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
    stored = [_head(connection, rollout, *row) for row in rows.fetchall()]
    references = replayed.load(connection, rollout)
    if references:
        stored += [_referenced_head(connection, reference) for reference in references.values()]
        stored.sort(key=lambda each: int(each.values["index"]))
    return stored


def head(connection: sqlite3.Connection, rollout: int, call_id: str) -> CallHead | None:
    reference = replayed.locate(connection, rollout, call_id)
    return None if reference is None else _referenced_head(connection, reference)


def _referenced_head(connection: sqlite3.Connection, reference: CallReference) -> CallHead:
    row = connection.execute(
        f"SELECT {_HEAD} FROM calls WHERE rollout = ? AND call_id = ?", (reference.rollout, reference.call_id)
    ).fetchone()
    return _head(connection, reference.rollout, *row, changes=reference.changes)


def _head(
    connection: sqlite3.Connection,
    rollout: int,
    call_id: str,
    data: bytes,
    prompt_tokens: int | None,
    completion_tokens: int | None,
    logprob_sum: float | None,
    *,
    changes: dict[str, Any] | None = None,
) -> CallHead:
    values = decode(decompress(data))
    values.update(changes or {})
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
    reference = replayed.locate(connection, rollout, call_id)
    assert reference is not None
    place = (reference.rollout, reference.call_id)
    ids, logprobs, packed_texts, packed_tops = connection.execute(
        "SELECT completion, logprobs, texts, tops FROM calls WHERE rollout = ? AND call_id = ?", place
    ).fetchone()
    sampled = StoredCompletion(calls.unpack(ids, unpack_ids), calls.unpack(logprobs, unpack_floats), [], [])
    if not texts:
        return sampled
    if packed_texts is not None:
        sampled.texts, sampled.tops = decode(decompress(packed_texts)), decode(decompress(packed_tops))
        return sampled
    # Written by version 1, whose head holds the texts.
    (data,) = connection.execute("SELECT head FROM calls WHERE rollout = ? AND call_id = ?", place).fetchone()
    values = decode(decompress(data))
    sampled.texts, sampled.tops = values.get("tokens", []), values.get("top_logprobs", [])
    return sampled


def find_texts(connection: sqlite3.Connection, rollout: int, token_ids: set[int]) -> dict[int, str]:
    """The texts of those ids that were sampled somewhere in the rollout. The latest calls are read first."""
    missing, texts_by_id = set(token_ids), dict[int, str]()
    names = "SELECT rollout, call_id FROM calls WHERE rollout = ? ORDER BY position DESC, rowid DESC"
    places = connection.execute(names, (rollout,)).fetchall()
    places += [(each.rollout, each.call_id) for each in reversed(replayed.load(connection, rollout).values())]
    for place in places:
        if not missing:
            break
        (packed,) = connection.execute(
            "SELECT completion FROM calls WHERE rollout = ? AND call_id = ?", place
        ).fetchone()
        ids = calls.unpack(packed, unpack_ids)
        if missing.isdisjoint(ids):
            continue
        texts = _texts(connection, *place)
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
