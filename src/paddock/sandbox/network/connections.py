"""What a sandbox connected to, or tried to: one record for each connection."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

MOST_RECORDS = 1000
MOST_SUMMARIES = 1000
"""A program may open connections without end. Those beyond `MOST_RECORDS` have one record for each host, port, phase
and decision, and those beyond `MOST_SUMMARIES` one for all hosts: none can be hidden behind others."""
LONGEST_HOST = 255
OTHER_HOSTS = "(other hosts)"
MOST_SHOWN_FAILURES = 10


@dataclass(frozen=True, slots=True)
class ConnectionRecord:
    """One connection that left the sandbox, or was refused."""

    host: str
    """As the program inside named it."""
    port: int
    allowed: bool
    phase: str
    """`build`, `setup`, `agent` or `verifier`."""
    started_at: float
    """Seconds since 1970."""
    address: str | None = None
    """Where it was connected to. None: it was refused, failed, or another proxy resolved the name."""
    sent_bytes: int = 0
    """What the sandbox sent."""
    received_bytes: int = 0
    reason: str | None = None
    """Why it was refused, or why it failed."""
    seconds: float | None = None
    """How long it was open. None: it still is."""
    count: int = 1
    """How many connections it stands for. Bytes and seconds are those of all of them."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, eq=False)
class LiveConnection:
    """A connection that is open, or about to be."""

    host: str
    port: int
    phase: str
    allowed: bool = True
    address: str | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    reason: str | None = None
    started_at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)

    def snapshot(self, *, ended: bool) -> ConnectionRecord:
        return ConnectionRecord(
            self.host,
            self.port,
            self.allowed,
            self.phase,
            self.started_at,
            self.address,
            self.sent_bytes,
            self.received_bytes,
            self.reason,
            round(time.monotonic() - self.began, 4) if ended else None,
        )


class ConnectionLog:
    """All connections of one sandbox."""

    def __init__(self) -> None:
        self.on_end: Callable[[ConnectionRecord], None] | None = None
        """Called with each record when its connection has ended or was refused, and with the summaries at the end."""
        self._ended: list[ConnectionRecord] = []
        self._summaries: dict[tuple[str, int, str, bool], ConnectionRecord] = {}
        self._live: list[LiveConnection] = []

    @property
    def records(self) -> tuple[ConnectionRecord, ...]:
        """Those that have ended, in that order, then those that are open."""
        live = (connection.snapshot(ended=False) for connection in self._live)
        return (*self._ended, *self._summaries.values(), *live)

    def open(self, host: str, port: int, phase: str) -> LiveConnection:
        connection = LiveConnection(host[:LONGEST_HOST], port, phase)
        self._live.append(connection)
        return connection

    def end(self, connection: LiveConnection) -> None:
        self._live.remove(connection)
        record = connection.snapshot(ended=True)
        if len(self._ended) >= MOST_RECORDS:
            self._summarize(record)
            return
        self._ended.append(record)
        self._report(record)

    def close(self) -> None:
        """Report the summaries: no connection is added to them any more."""
        self._ended += self._summaries.values()
        for record in self._summaries.values():
            self._report(record)
        self._summaries = {}

    def _summarize(self, record: ConnectionRecord) -> None:
        key = (record.host, record.port, record.phase, record.allowed)
        if key not in self._summaries and len(self._summaries) >= MOST_SUMMARIES:
            key = (OTHER_HOSTS, 0, record.phase, record.allowed)
        earlier = self._summaries.get(key)
        if earlier is None:
            self._summaries[key] = replace(record, host=key[0], port=key[1])
            return
        self._summaries[key] = replace(
            earlier,
            sent_bytes=earlier.sent_bytes + record.sent_bytes,
            received_bytes=earlier.received_bytes + record.received_bytes,
            seconds=round((earlier.seconds or 0.0) + (record.seconds or 0.0), 4),
            count=earlier.count + 1,
        )

    def _report(self, record: ConnectionRecord) -> None:
        if self.on_end is not None:
            try:
                self.on_end(record)
            except Exception:
                logger.exception("the connection to %s:%d was not reported", record.host, record.port)


def describe_failures(records: Iterable[ConnectionRecord]) -> list[str]:
    """A line for each host that was not reached, or that the policy refused: programs often hide the reason."""
    lines = []
    for record in records:
        if record.reason is not None:
            state = "cannot be reached" if record.allowed else "was refused"
            lines.append(f"{record.host} port {record.port} {state}: {record.reason}")
    return list(dict.fromkeys(lines))[:MOST_SHOWN_FAILURES]
