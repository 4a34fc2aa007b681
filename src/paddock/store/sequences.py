"""Prefix-compressed sequences: lists of token ids and of messages, each stored as its difference to an earlier one.

A row holds how many items at the front and at the back it shares with its base row, and the items between them. Rows
are never changed: when a call is replaced by one with another prompt, a row is added, and every row that builds on
the old one stays valid. `WriteCache` remembers the latest sequences of a rollout, so that a save costs its new part.

A fork repeats the calls of its source, but outputs of its tools may differ at many places, for example in times. Then
the items between are compressed against the sequence of the recorded call, whose key precedes the data.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import orjson

from paddock.store import blobs
from paddock.store.packing import ID_BYTES, WITH_DICTIONARY, compress, compress_against, decompress

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable

    from paddock.store.replayed import ForkState

TOKENS = "tokens"
MESSAGES = "messages"
BLOB_BYTES = 1024
"""A message of this size or more is a blob, which other rollouts and edited histories share."""
BASE_CANDIDATES = 8
"""A new prompt is compared with this many; more than the branches that an agent works on at a time."""

CACHED_SEQUENCES = 16
"""Sequences that a reader caches whole; a new one nearly always builds on one of the last few."""

MAX_KEYS = 500
"""Keys that one query may name."""
_ROW = "id, kind, base, head, tail, middle"
_KEY_BYTES = 8

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
    fork: ForkState | None = None
    """What `replayed` remembers of the rollout; None until it is needed."""
    counterparts: dict[str, int] = field(default_factory=dict)
    """The sequences of the recorded call that the call being saved repeats, by their kinds. They are cached too."""


# -- rows -----------------------------------------------------------------------------------------


def save_tokens(connection: sqlite3.Connection, cache: WriteCache, packed: bytes) -> int:
    """Store packed token ids; returns their key."""
    base = _closest(cache.tokens, packed)
    ends = SharedEnds(0, 0) if base is None else shared_ends(cache.tokens[base], packed, width=ID_BYTES)
    if base is None or cache.tokens[base] != packed:
        new = middle(packed, ends)
        data = _compress_against_counterpart(cache, TOKENS, new) or compress(new)
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
        new = middle(items, ends)
        data = _compress_against_counterpart(cache, MESSAGES, _join_items(new)) or compress(
            _encode_items(connection, cache, new)
        )
        base = _insert(connection, cache, MESSAGES, base, ends, data)
    cache.messages.put(base, items)
    return base


def load(
    connection: sqlite3.Connection, rollout: int, read_blob: blobs.Reader, others: Iterable[int] = ()
) -> LoadedSequences:
    """All sequences of a rollout, whole, by key and in the order they were stored; and those with the keys `others`.

    Those of other rollouts that they build on are there too."""
    tokens: dict[int, bytes] = {}
    messages: dict[int, list[bytes]] = {}
    rows = connection.execute(f"SELECT {_ROW} FROM sequences WHERE rollout = ? ORDER BY id", (rollout,)).fetchall()
    for key, kind, base, head, tail, data in with_bases(connection, rows, others):
        if kind == TOKENS:
            ends = SharedEnds(head * ID_BYTES, tail * ID_BYTES)
            added = decompress_middle(data, tokens.__getitem__)
            tokens[key] = join(b"" if base is None else tokens[base], ends, added)
        else:
            new = decode_items(decompress_middle(data, messages.__getitem__), read_blob)
            messages[key] = join([] if base is None else messages[base], SharedEnds(head, tail), new)
    return tokens, messages


def with_bases(
    connection: sqlite3.Connection, rows: list[tuple[Any, ...]], others: Iterable[int] = ()
) -> list[tuple[Any, ...]]:
    """The rows, those with the keys `others`, and all that they build on: a fork builds on rows of its source. A row
    comes after its base."""
    keys = {row[0] for row in rows}
    missing = (_needed(rows) | set(others)) - keys
    if not missing:
        return rows
    while missing:
        chunk = sorted(missing)[:MAX_KEYS]
        marks = ", ".join("?" * len(chunk))
        added = connection.execute(f"SELECT {_ROW} FROM sequences WHERE id IN ({marks})", chunk).fetchall()
        rows = rows + added
        keys.update(chunk)
        missing = (missing | _needed(added)) - keys
    return sorted(rows)


def _needed(rows: Iterable[tuple[Any, ...]]) -> set[int]:
    """The keys of the sequences that rows build on."""
    named = {key for row in rows for key in (row[2], dictionary_of(row[5]))}
    return {key for key in named if key is not None}


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
    return orjson.dumps(numbers) + b"\n" + b"".join(inline)


def _join_items(items: list[bytes]) -> bytes:
    """The same without blobs."""
    return orjson.dumps([len(item) for item in items]) + b"\n" + b"".join(items)


def _compress_against_counterpart(cache: WriteCache, kind: str, data: bytes) -> bytes | None:
    """None if there is no recorded sequence, or if it is not alike."""
    key = cache.counterparts.get(kind)
    if key is None:
        return None
    dictionary = cache.tokens[key] if kind == TOKENS else b"".join(cache.messages[key])
    difference = compress_against(dictionary, data)
    return None if difference is None else difference[:1] + key.to_bytes(_KEY_BYTES, "little") + difference[1:]


def dictionary_of(data: bytes) -> int | None:
    """The key of the sequence that is needed to decompress the middle of a row."""
    return int.from_bytes(data[1 : 1 + _KEY_BYTES], "little") if data.startswith(WITH_DICTIONARY) else None


def decompress_middle(data: bytes, read: Callable[[int], Items]) -> bytes:
    """The middle of a row; `read` returns the sequence with a key."""
    key = dictionary_of(data)
    if key is None:
        return decompress(data)
    dictionary = read(key)
    return decompress(
        data[:1] + data[1 + _KEY_BYTES :], dictionary if isinstance(dictionary, bytes) else b"".join(dictionary)
    )


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


# -- single sequences -----------------------------------------------------------------------------


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
            added = decompress_middle(middle, lambda key: self._read(connection, key))
            items = join(items, ends, self._decode(connection, added))
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
