"""Prefix-compressed sequences: lists of token ids and of messages, each stored as its difference to an earlier one.

A row holds how many items at the front and at the back it shares with its base row, and the items between them. Rows
are never changed: when a call is replaced by one with another prompt, a row is added, and every row that builds on
the old one stays valid. `WriteCache` remembers the latest sequences of a rollout, so that a save costs its new part.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import orjson

from paddock.store import blobs
from paddock.store.packing import ID_BYTES, compress, decompress

if TYPE_CHECKING:
    import sqlite3

TOKENS = "tokens"
MESSAGES = "messages"
BLOB_BYTES = 1024
"""A message of this size or more is a blob, which other rollouts and edited histories share."""
BASE_CANDIDATES = 8
"""A new prompt is compared with this many; more than the branches that an agent works on at a time."""

Value = TypeVar("Value")
Items = TypeVar("Items", bytes, list[bytes])
LoadedSequences = tuple[dict[int, bytes], dict[int, list[bytes]]]


class LruCache(OrderedDict[int, Value], Generic[Value]):
    """The entries that were used last, the latest at the end."""

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def put(self, key: int, value: Value) -> None:
        """Insert the entry, or make it the latest."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._max_entries:
            self.popitem(last=False)


@dataclass(slots=True)
class WriteCache:
    """What is remembered of a rollout that is being written. The database has all of it too, so it may be dropped."""

    key: int
    tokens: LruCache[bytes] = field(default_factory=lambda: LruCache(BASE_CANDIDATES))
    messages: LruCache[list[bytes]] = field(default_factory=lambda: LruCache(BASE_CANDIDATES))
    blobs: dict[str, int] = field(default_factory=dict)
    """Keys of the blobs that the rollout refers to, by digest."""
    bodies: dict[str, bytes] = field(default_factory=dict)
    """A digest of each long text of the record as it was last written."""


# -- rows -----------------------------------------------------------------------------------------


def save_tokens(connection: sqlite3.Connection, cache: WriteCache, packed: bytes) -> int:
    """Store packed token ids; returns their key."""
    base = _closest(cache.tokens, packed)
    ends = SharedEnds(0, 0) if base is None else shared_ends(cache.tokens[base], packed, width=ID_BYTES)
    if base is None or cache.tokens[base] != packed:
        data = compress(middle(packed, ends))
        base = _insert(
            connection, cache, TOKENS, base, SharedEnds(ends.head // ID_BYTES, ends.tail // ID_BYTES), data
        )
    cache.tokens.put(base, packed)
    return base


def save_messages(connection: sqlite3.Connection, cache: WriteCache, items: list[bytes]) -> int:
    """Store encoded messages; returns their key."""
    base = _closest(cache.messages, items)
    ends = SharedEnds(0, 0) if base is None else shared_ends(cache.messages[base], items)
    if base is not None:
        # The same objects as in the base: the memory of a growing history grows by its new part.
        items = join(cache.messages[base], ends, middle(items, ends))
    if base is None or cache.messages[base] != items:
        data = _encode_items(connection, cache, middle(items, ends))
        base = _insert(connection, cache, MESSAGES, base, ends, data)
    cache.messages.put(base, items)
    return base


def load(connection: sqlite3.Connection, rollout: int, read_blob: blobs.Reader) -> LoadedSequences:
    """All sequences of a rollout, whole, by key and in the order they were stored."""
    tokens: dict[int, bytes] = {}
    messages: dict[int, list[bytes]] = {}
    rows = connection.execute(
        "SELECT id, kind, base, head, tail, middle FROM sequences WHERE rollout = ? ORDER BY id", (rollout,)
    )
    for key, kind, base, head, tail, data in rows:
        if kind == TOKENS:
            ends = SharedEnds(head * ID_BYTES, tail * ID_BYTES)
            tokens[key] = join(b"" if base is None else tokens[base], ends, decompress(data))
        else:
            new = decode_items(decompress(data), read_blob)
            messages[key] = join([] if base is None else messages[base], SharedEnds(head, tail), new)
    return tokens, messages


def load_cache(connection: sqlite3.Connection, rollout: int) -> WriteCache:
    """The cache of a rollout that another process, or an earlier one, has written to."""
    cache = WriteCache(rollout)
    tokens, messages = load(connection, rollout, blobs.Reader(connection))
    for key, packed in tokens.items():
        cache.tokens.put(key, packed)
    for key, items in messages.items():
        cache.messages.put(key, items)
    return cache


def _closest(candidates: LruCache[Items], items: Items) -> int | None:
    """The latest of those that share the longest prefix."""
    best, longest = None, -1
    for key, candidate in reversed(candidates.items()):
        prefix = common_prefix(candidate, items)
        if prefix > longest or (prefix == longest and candidate == items):
            best, longest = key, prefix
    return best


def _insert(
    connection: sqlite3.Connection, cache: WriteCache, kind: str, base: int | None, ends: SharedEnds, data: bytes
) -> int:
    key = connection.execute(
        "INSERT INTO sequences (rollout, kind, base, head, tail, middle) VALUES (?, ?, ?, ?, ?, ?)",
        (cache.key, kind, base, ends.head, ends.tail, data),
    ).lastrowid
    assert key is not None
    return key


def _encode_items(connection: sqlite3.Connection, cache: WriteCache, items: list[bytes]) -> bytes:
    """A line of numbers (a length, or the negated key of a blob), then the messages that are no blobs."""
    numbers: list[int] = []
    inline: list[bytes] = []
    for item in items:
        if len(item) >= BLOB_BYTES:
            numbers.append(-blobs.intern(connection, cache, item))
        else:
            numbers.append(len(item))
            inline.append(item)
    return compress(orjson.dumps(numbers) + b"\n" + b"".join(inline))


def decode_items(data: bytes, read_blob: blobs.Reader) -> list[bytes]:
    """The encoded messages of one row."""
    line, _, rest = data.partition(b"\n")
    items: list[bytes] = []
    start = 0
    for number in orjson.loads(line):
        if number < 0:
            items.append(read_blob(-number))
        else:
            items.append(rest[start : start + number])
            start += number
    return items


# -- differences ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SharedEnds:
    """How many items at the front and at the back are those of the base."""

    head: int
    tail: int


def shared_ends(base: Items, items: Items, *, width: int = 1) -> SharedEnds:
    """What `items` have in common with `base`, in whole units of `width` items."""
    head = common_prefix(base, items)
    head -= head % width
    tail = _common_suffix(base, items, limit=min(len(base), len(items)) - head)
    return SharedEnds(head, tail - tail % width)


def middle(items: Items, ends: SharedEnds) -> Items:
    """What has to be stored of `items` beside the base."""
    return items[ends.head : len(items) - ends.tail]


def join(base: Items, ends: SharedEnds, new: Items) -> Items:
    """The sequence whose middle is `new`."""
    return base[: ends.head] + new + base[len(base) - ends.tail :]


def common_prefix(first: Items, second: Items) -> int:
    """Its length, by binary search over slices: comparing slices runs in C."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        half = (low + high + 1) // 2
        if first[low:half] == second[low:half]:
            low = half
        else:
            high = half - 1
    return low


def _common_suffix(first: Items, second: Items, *, limit: int) -> int:
    low, high = 0, limit
    while low < high:
        half = (low + high + 1) // 2
        if first[len(first) - half : len(first) - low] == second[len(second) - half : len(second) - low]:
            low = half
        else:
            high = half - 1
    return low
