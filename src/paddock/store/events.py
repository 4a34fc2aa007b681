"""The events of a rollout, numbered from 1 and never changed.

A fork repeats most events of its source, with the same texts at other times. So its events are compressed against
those of the source with nearby numbers. The number of the source's last event precedes the data: those that are added
later do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paddock.capture.trace import Event
from paddock.store import tree
from paddock.store.packing import WITH_DICTIONARY, compress, compress_against, decode, decompress, encode

if TYPE_CHECKING:
    import sqlite3

NEARBY = 12
"""How many numbers an event of a fork may be away from the same event of its source."""
_NUMBER_BYTES = 4


def add(connection: sqlite3.Connection, rollout: int, event: Event) -> int:
    """The number of the new event."""
    number = _last(connection, rollout) + 1
    data = encode([event.at, event.kind, event.data])
    packed = _compress_against_source(connection, rollout, number, data) or compress(data)
    connection.execute("INSERT INTO events (rollout, number, data) VALUES (?, ?, ?)", (rollout, number, packed))
    return number


def read(connection: sqlite3.Connection, rollout: int, *, after: int, limit: int | None) -> list[tuple[int, Event]]:
    reader = _Reader(connection, rollout)
    rows = connection.execute(
        "SELECT number, data FROM events WHERE rollout = ? AND number > ? ORDER BY number LIMIT ?",
        (rollout, after, -1 if limit is None else limit),
    ).fetchall()
    return [(number, Event(*decode(reader.decompress(number, data)))) for number, data in rows]


def _last(connection: sqlite3.Connection, rollout: int) -> int:
    (last,) = connection.execute("SELECT max(number) FROM events WHERE rollout = ?", (rollout,)).fetchone()
    return int(last or 0)


def _compress_against_source(connection: sqlite3.Connection, rollout: int, number: int, data: bytes) -> bytes | None:
    source = tree.source_of(connection, rollout)
    if source is None:
        return None
    last = _last(connection, source)
    difference = compress_against(_Reader(connection, source).nearby(number, last), data)
    return None if difference is None else difference[:1] + last.to_bytes(_NUMBER_BYTES, "little") + difference[1:]


@dataclass(slots=True)
class _Reader:
    """Decompresses events of one rollout, and keeps those that its forks ask for."""

    connection: sqlite3.Connection
    rollout: int
    _encoded: dict[int, bytes] = field(default_factory=dict)
    _source: _Reader | None = None

    def decompress(self, number: int, data: bytes) -> bytes:
        if not data.startswith(WITH_DICTIONARY):
            return decompress(data)
        if self._source is None:
            source = tree.source_of(self.connection, self.rollout)
            assert source is not None
            self._source = _Reader(self.connection, source)
        last = int.from_bytes(data[1 : 1 + _NUMBER_BYTES], "little")
        return decompress(data[:1] + data[1 + _NUMBER_BYTES :], self._source.nearby(number, last))

    def nearby(self, number: int, last: int) -> bytes:
        """The events around a number, up to `last`, as they were encoded."""
        wanted = range(max(1, number - NEARBY), min(number + NEARBY, last) + 1)
        missing = [each for each in wanted if each not in self._encoded]
        if missing:
            rows = self.connection.execute(
                "SELECT number, data FROM events WHERE rollout = ? AND number BETWEEN ? AND ?",
                (self.rollout, missing[0], missing[-1]),
            ).fetchall()
            for each, data in rows:
                self._encoded[each] = self.decompress(each, data)
        for passed in [each for each in self._encoded if each < number - 2 * NEARBY]:
            del self._encoded[passed]
        return b"".join(self._encoded.get(each, b"") for each in wanted)
