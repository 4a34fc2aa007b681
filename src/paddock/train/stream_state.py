"""What a stream remembers in `streams.db` beside the store: its units, their rollouts, the weight versions, and what
the trainer reported.

A unit is written before its first rollout starts, so a stream that was killed knows which units to go on with. The
page reads the same tables.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

from paddock.errors import StoreError
from paddock.sqlite import Database, Schema
from paddock.train.sampled import ZERO_ADVANTAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from paddock.train.sampled import SampledRollout

FILE = "streams.db"
UnitState = Literal["started", "ready", "delivered", "acknowledged", "dropped"]
TABLES = (
    """CREATE TABLE streams (
        name TEXT PRIMARY KEY,
        created_at REAL NOT NULL,
        settings TEXT NOT NULL,
        version INTEGER NOT NULL
    )""",
    """CREATE TABLE units (
        stream TEXT NOT NULL REFERENCES streams (name) ON DELETE CASCADE,
        number INTEGER NOT NULL,
        source TEXT NOT NULL,
        place INTEGER NOT NULL,
        task_id TEXT NOT NULL,
        batch_id TEXT NOT NULL,
        member INTEGER,
        attempt INTEGER NOT NULL,
        state TEXT NOT NULL,
        oldest INTEGER,
        newest INTEGER,
        version INTEGER,
        staleness INTEGER,
        started_at REAL NOT NULL,
        changed_at REAL NOT NULL,
        PRIMARY KEY (stream, number)
    ) WITHOUT ROWID""",
    "CREATE INDEX units_open ON units (stream, state) WHERE state NOT IN ('acknowledged', 'dropped')",
    """CREATE TABLE rollouts (
        stream TEXT NOT NULL REFERENCES streams (name) ON DELETE CASCADE,
        unit INTEGER NOT NULL,
        rollout_id TEXT NOT NULL,
        reward REAL,
        left_out TEXT,
        oldest INTEGER,
        newest INTEGER,
        samples INTEGER NOT NULL,
        tokens INTEGER NOT NULL,
        logprob_sum REAL NOT NULL,
        seconds REAL,
        ended_at REAL NOT NULL,
        PRIMARY KEY (stream, unit, rollout_id)
    ) WITHOUT ROWID""",
    """CREATE TABLE versions (
        stream TEXT NOT NULL REFERENCES streams (name) ON DELETE CASCADE,
        version INTEGER NOT NULL,
        at REAL NOT NULL
    )""",
    "CREATE INDEX versions_of_stream ON versions (stream, at)",
    """CREATE TABLE reports (
        stream TEXT NOT NULL REFERENCES streams (name) ON DELETE CASCADE,
        version INTEGER NOT NULL,
        at REAL NOT NULL,
        figures TEXT NOT NULL
    )""",
    "CREATE INDEX reports_of_stream ON reports (stream, version)",
)
WITHOUT_SIGNAL = """
    SELECT * FROM units AS unit WHERE stream = ? AND state = 'dropped'
    AND EXISTS (SELECT 1 FROM rollouts
        WHERE stream = unit.stream AND rollouts.unit = unit.number AND left_out = ?)
    AND NOT EXISTS (SELECT 1 FROM units AS later
        WHERE later.stream = unit.stream AND source = unit.source AND place = unit.place AND attempt > unit.attempt)
    ORDER BY number"""
SCHEMA = Schema(TABLES, application_id=0x5061_5374, hint="move streams.db away to begin anew")


@dataclass(frozen=True, slots=True)
class StreamUnit:
    """What the trainer takes at once: a group, or one member of it. It is written when it starts."""

    number: int
    source: str
    place: int
    """Its position among the units of the source; the task follows from it. A unit that is resampled keeps it."""
    task_id: str
    batch_id: str
    member: int | None = None
    """None: the whole group."""
    attempt: int = 0
    """How many units at this place had no signal."""


@dataclass(frozen=True, slots=True)
class OpenUnit:
    """A unit that an earlier process started and nobody acknowledged."""

    unit: StreamUnit
    oldest: int | None


@dataclass(frozen=True, slots=True)
class UnitRollout:
    """One rollout of a unit, as the state keeps it."""

    rollout_id: str
    reward: float | None
    left_out: str | None
    oldest: int | None
    newest: int | None
    samples: int
    tokens: int
    logprob_sum: float
    seconds: float | None

    @classmethod
    def of(cls, rollout: SampledRollout, left_out: str | None) -> UnitRollout:
        oldest, newest = rollout.versions or (None, None)
        return cls(
            rollout_id=rollout.record.rollout_id,
            reward=rollout.record.reward,
            left_out=left_out,
            oldest=oldest,
            newest=newest,
            samples=len(rollout.samples),
            tokens=rollout.trained_tokens,
            logprob_sum=rollout.logprob_sum,
            seconds=rollout.record.wall_s,
        )


ROLLOUT_FIELDS = tuple(each.name for each in fields(UnitRollout))


@dataclass(frozen=True, slots=True)
class SavedStream:
    """What is restored when a stream goes on."""

    version: int
    taken: int
    """Units that were acknowledged at this version."""
    next_number: int
    places: Mapping[str, int]
    """For each source, how many places it has used."""
    open_units: Sequence[OpenUnit]
    without_signal: Sequence[StreamUnit]
    """The last units at their places, dropped because all of their advantages were 0."""
    left_out: Mapping[str, int]
    acknowledged: int


class StreamState:
    """The tables of one stream. Every method raises StoreError if the file cannot be used."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises StoreError if another process has the stream open: both would train on the same units."""
        self._database = Database(folder / FILE, SCHEMA, name=f"the streams of {folder}", named_rows=True)
        self._name = name
        try:
            self._lock = _lock(folder, name)
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        self._database.close()
        os.close(self._lock)

    def open(self, settings: Mapping[str, Any], version: int | None) -> SavedStream:
        """Create the stream, or restore the one of this name. Raises StoreError if its settings have changed."""
        text = json.dumps(settings, sort_keys=True)
        with self._database.write() as connection:
            row = connection.execute("SELECT settings, version FROM streams WHERE name = ?", [self._name]).fetchone()
            if row is None:
                values = [self._name, time.time(), text, version or 0]
                connection.execute("INSERT INTO streams VALUES (?, ?, ?, ?)", values)
                connection.execute("INSERT INTO versions VALUES (?, ?, ?)", [self._name, version or 0, time.time()])
            elif row["settings"] != text:
                raise StoreError(
                    f"the stream {self._name} was run with {row['settings']}, and now has {text}",
                    hint="give it the same settings, or another name",
                )
            elif version not in (None, row["version"]):
                connection.execute("UPDATE streams SET version = ? WHERE name = ?", [version, self._name])
                connection.execute("INSERT INTO versions VALUES (?, ?, ?)", [self._name, version, time.time()])
        return self._restore()

    def _restore(self) -> SavedStream:
        name = self._name
        with self._database.read() as connection:
            (version,) = connection.execute("SELECT version FROM streams WHERE name = ?", [name]).fetchone()
            number, acknowledged, taken = connection.execute(
                "SELECT max(number), sum(state = 'acknowledged'), sum(state = 'acknowledged' AND version = ?)"
                " FROM units WHERE stream = ?",
                [version, name],
            ).fetchone()
            places = connection.execute(
                "SELECT source, max(place) + 1 FROM units WHERE stream = ? GROUP BY source", [name]
            )
            open_units = connection.execute(
                "SELECT * FROM units WHERE stream = ? AND state NOT IN ('acknowledged', 'dropped') ORDER BY number",
                [name],
            )
            without_signal = connection.execute(WITHOUT_SIGNAL, [name, ZERO_ADVANTAGE])
            left_out = connection.execute(
                "SELECT left_out, count(*) FROM rollouts JOIN units ON units.stream = rollouts.stream"
                " AND units.number = rollouts.unit WHERE rollouts.stream = ? AND left_out IS NOT NULL"
                " AND state IN ('acknowledged', 'dropped') GROUP BY left_out",
                [name],
            )
            return SavedStream(
                version=version,
                taken=taken or 0,
                next_number=0 if number is None else number + 1,
                places=dict(map(tuple, places)),
                open_units=[OpenUnit(_unit(row), row["oldest"]) for row in open_units],
                without_signal=[_unit(row) for row in without_signal],
                left_out=dict(map(tuple, left_out)),
                acknowledged=acknowledged or 0,
            )

    def start(self, unit: StreamUnit, version: int) -> None:
        """Write a unit before its rollouts start."""
        now = time.time()
        values = [
            *(self._name, unit.number, unit.source, unit.place, unit.task_id, unit.batch_id, unit.member),
            *(unit.attempt, "started", version, None, None, None, now, now),
        ]
        with self._database.write() as connection:
            connection.execute(f"INSERT OR REPLACE INTO units VALUES ({', '.join('?' * len(values))})", values)

    def finish(
        self, number: int, state: UnitState, versions: tuple[int, int] | None, rollouts: Iterable[UnitRollout]
    ) -> None:
        """All rollouts of a unit have ended."""
        now = time.time()
        oldest, newest = versions or (None, None)
        rows = [(*(self._name, number), *(getattr(each, name) for name in ROLLOUT_FIELDS), now) for each in rollouts]
        with self._database.write() as connection:
            connection.execute(
                "UPDATE units SET state = ?, oldest = coalesce(?, oldest), newest = ?, changed_at = ?"
                " WHERE stream = ? AND number = ?",
                [state, oldest, newest, now, self._name, number],
            )
            connection.execute("DELETE FROM rollouts WHERE stream = ? AND unit = ?", [self._name, number])
            connection.executemany(f"INSERT INTO rollouts VALUES ({', '.join('?' * 12)})", rows)

    def drop(self, number: int, reason: str) -> None:
        """Leave out a unit that could have been taken."""
        with self._database.write() as connection:
            connection.execute(
                "UPDATE units SET state = 'dropped', changed_at = ? WHERE stream = ? AND number = ?",
                [time.time(), self._name, number],
            )
            connection.execute(
                "UPDATE rollouts SET left_out = ? WHERE stream = ? AND unit = ? AND left_out IS NULL",
                [reason, self._name, number],
            )

    def deliver(self, number: int, version: int, staleness: int) -> None:
        with self._database.write() as connection:
            connection.execute(
                "UPDATE units SET state = 'delivered', version = ?, staleness = ?, changed_at = ?"
                " WHERE stream = ? AND number = ?",
                [version, staleness, time.time(), self._name, number],
            )

    def acknowledge(self, numbers: Sequence[int]) -> None:
        """These units were trained on: they never come again."""
        rows = [(time.time(), self._name, number) for number in numbers]
        with self._database.write() as connection:
            connection.executemany(
                "UPDATE units SET state = 'acknowledged', changed_at = ? WHERE stream = ? AND number = ?", rows
            )

    def set_version(self, version: int) -> None:
        with self._database.write() as connection:
            connection.execute("UPDATE streams SET version = ? WHERE name = ?", [version, self._name])
            connection.execute("INSERT INTO versions VALUES (?, ?, ?)", [self._name, version, time.time()])

    def report(self, version: int, figures: Mapping[str, float]) -> None:
        with self._database.write() as connection:
            values = [self._name, version, time.time(), json.dumps(figures)]
            connection.execute("INSERT INTO reports VALUES (?, ?, ?, ?)", values)


def _lock(folder: Path, name: str) -> int:
    """A lock that this process holds until it closes the file or ends. Its children do not inherit it."""
    path = folder / f"stream-{blake2b(name.encode(), digest_size=8).hexdigest()}.lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be opened: {error.strerror}", hint="see that the folder is writable"
        ) from error
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise StoreError(
            f"another process has the stream {name} open", hint="end that process, or give another name"
        ) from None
    return handle


def _unit(row: Any) -> StreamUnit:
    return StreamUnit(
        *(row[name] for name in ("number", "source", "place", "task_id", "batch_id", "member", "attempt"))
    )
