"""Lists of token ids and of messages, each stored as what it adds to an earlier one.

A stored sequence is never changed. When a call is replaced by one with another prompt, a new
sequence is added, and whatever builds on the old one still finds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from paddock.rollouts.store import blobs
from paddock.rollouts.store.deltas import Items, Shared, common_prefix, join, middle, shared
from paddock.rollouts.store.packing import ID_BYTES, squeeze, unsqueeze

if TYPE_CHECKING:
    import sqlite3

    from paddock.rollouts.store.live import Live, Recent

TOKENS = "tokens"
MESSAGES = "messages"
BLOB_BYTES = 1024
"""A message of this size or more is a blob, found again by other rollouts and after edits of the history."""

Loaded = tuple[dict[int, bytes], dict[int, list[bytes]]]


def save_tokens(connection: sqlite3.Connection, live: Live, packed: bytes) -> int:
    """Store packed token ids; the key to find them by."""
    base = _closest(live.tokens, packed)
    kept = Shared(0, 0) if base is None else shared(live.tokens[base], packed, width=ID_BYTES)
    if base is None or live.tokens[base] != packed:
        data = squeeze(middle(packed, kept))
        base = _insert(connection, live, TOKENS, base, Shared(kept.head // ID_BYTES, kept.tail // ID_BYTES), data)
    live.tokens.use(base, packed)
    return base


def save_messages(connection: sqlite3.Connection, live: Live, items: list[bytes]) -> int:
    """Store encoded messages; the key to find them by."""
    base = _closest(live.messages, items)
    kept = Shared(0, 0) if base is None else shared(live.messages[base], items)
    if base is not None:
        # The same objects as in the base: what is remembered of a growing history grows by its new part.
        items = join(live.messages[base], kept, middle(items, kept))
    if base is None or live.messages[base] != items:
        data = _encode(connection, live, middle(items, kept))
        base = _insert(connection, live, MESSAGES, base, kept, data)
    live.messages.use(base, items)
    return base


def load(connection: sqlite3.Connection, rollout: int, read_blob: blobs.Reader) -> Loaded:
    """All sequences of a rollout, whole, by key and in the order they were stored."""
    tokens: dict[int, bytes] = {}
    messages: dict[int, list[bytes]] = {}
    rows = connection.execute(
        "SELECT id, kind, base, head, tail, middle FROM sequences WHERE rollout = ? ORDER BY id", (rollout,)
    )
    for key, kind, base, head, tail, data in rows:
        if kind == TOKENS:
            kept = Shared(head * ID_BYTES, tail * ID_BYTES)
            tokens[key] = join(b"" if base is None else tokens[base], kept, unsqueeze(data))
        else:
            new = decode_items(unsqueeze(data), read_blob)
            messages[key] = join([] if base is None else messages[base], Shared(head, tail), new)
    return tokens, messages


def recall(connection: sqlite3.Connection, live: Live) -> None:
    """Remember the latest sequences of a rollout that another process, or an earlier one, has written."""
    tokens, messages = load(connection, live.key, blobs.Reader(connection))
    for key, packed in tokens.items():
        live.tokens.use(key, packed)
    for key, items in messages.items():
        live.messages.use(key, items)


def _closest(recent: Recent[Items], items: Items) -> int | None:
    """The latest of those that share the longest front."""
    best, longest = None, -1
    for key, candidate in reversed(recent.items()):
        front = common_prefix(candidate, items)
        if front > longest or (front == longest and candidate == items):
            best, longest = key, front
    return best


def _insert(
    connection: sqlite3.Connection, live: Live, kind: str, base: int | None, kept: Shared, data: bytes
) -> int:
    key = connection.execute(
        "INSERT INTO sequences (rollout, kind, base, head, tail, middle) VALUES (?, ?, ?, ?, ?, ?)",
        (live.key, kind, base, kept.head, kept.tail, data),
    ).lastrowid
    assert key is not None
    return key


def _encode(connection: sqlite3.Connection, live: Live, items: list[bytes]) -> bytes:
    """A line of numbers (a length, or a blob's key made negative), then the messages that are no blobs."""
    numbers: list[int] = []
    inline: list[bytes] = []
    for item in items:
        if len(item) >= BLOB_BYTES:
            numbers.append(-blobs.keep(connection, live, item))
        else:
            numbers.append(len(item))
            inline.append(item)
    return squeeze(orjson.dumps(numbers) + b"\n" + b"".join(inline))


def decode_items(data: bytes, read_blob: blobs.Reader) -> list[bytes]:
    """The encoded messages of one row."""
    line, _, rest = data.partition(b"\n")
    items: list[bytes] = []
    at = 0
    for number in orjson.loads(line):
        if number < 0:
            items.append(read_blob(-number))
        else:
            items.append(rest[at : at + number])
            at += number
    return items
