"""Process ownership: which process runs a rollout or a sandbox, and how to finish what a dead process left behind.

Recovery may run in several processes at once: each rollout gets its outcome once, and each sandbox is claimed by one
process before it is ended.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from paddock.processes import process_start_time
from paddock.store import calls, rows
from paddock.store.outcome import Outcome
from paddock.store.packing import compress, decode, decompress, encode

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from paddock.sqlite import Database

REASON = "paddock ended before the rollout did"

logger = logging.getLogger(__name__)


# -- processes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Owner:
    """A process. Its start time distinguishes it from a later process with the same pid."""

    pid: int
    start_time: int | None
    """In clock ticks since the boot; None where the system has no /proc."""
    boot_id: str | None
    hostname: str
    pid_namespace: str | None = None

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        return cls(pid, process_start_time(pid), _boot_id(), socket.gethostname(), _pid_namespace())

    @classmethod
    def from_text(cls, text: str) -> Owner:
        """The owner that `to_text` wrote."""
        return cls(**orjson.loads(text))

    def to_text(self) -> str:
        """The owner as JSON. The same owner always gives the same text."""
        return orjson.dumps(asdict(self), option=orjson.OPT_SORT_KEYS).decode()

    def is_dead(self) -> bool:
        """Whether the process has certainly ended. One on another machine or in another pid namespace cannot be
        checked, so it counts as alive."""
        here = Owner.current()
        if self.boot_id != here.boot_id:
            # The same machine after a reboot; under another name it may be another machine.
            return self.hostname == here.hostname
        if self.boot_id is None and self.hostname != here.hostname:
            return False
        if self.pid_namespace != here.pid_namespace:
            return False
        if self.start_time is None:
            return not _process_exists(self.pid)
        return process_start_time(self.pid) != self.start_time


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _pid_namespace() -> str | None:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


# -- sandboxes ------------------------------------------------------------------------------------


@dataclass(slots=True)
class SandboxEntry:
    """An open sandbox: what another process has to end and remove if the owner dies."""

    sandbox_id: str
    backend: str
    rollout_id: str | None = None
    host_pid: int | None = None
    host_start_time: int | None = None
    """Of `host_pid`, from `process_start_time`."""
    paths: list[str] = field(default_factory=list)
    """Folders and files on the host that are removed with the sandbox."""
    created_at: float | None = None
    owner: Owner | None = None
    """None means the process that records it."""


def record_sandbox(connection: sqlite3.Connection, entry: SandboxEntry, owner: Owner) -> None:
    start = entry.host_start_time
    if start is None and entry.host_pid is not None:
        start = process_start_time(entry.host_pid)
    created_at = time.time() if entry.created_at is None else entry.created_at
    stored = replace(entry, host_start_time=start, created_at=created_at, owner=None)
    connection.execute(
        "INSERT OR REPLACE INTO sandboxes (sandbox_id, rollout_id, owner, data) VALUES (?, ?, ?, ?)",
        (entry.sandbox_id, entry.rollout_id, (entry.owner or owner).to_text(), compress(encode(asdict(stored)))),
    )


def end_sandbox(connection: sqlite3.Connection, sandbox_id: str) -> None:
    connection.execute(
        "UPDATE sandboxes SET ended_at = ? WHERE sandbox_id = ? AND ended_at IS NULL", (time.time(), sandbox_id)
    )


def open_sandboxes(connection: sqlite3.Connection) -> list[SandboxEntry]:
    rows = connection.execute("SELECT owner, data FROM sandboxes WHERE ended_at IS NULL ORDER BY rowid")
    return [SandboxEntry(**{**decode(decompress(data)), "owner": Owner.from_text(owner)}) for owner, data in rows]


def change_sandbox_owner(connection: sqlite3.Connection, sandbox_id: str, *, before: Owner, after: Owner) -> bool:
    """False if the sandbox is no longer open or no longer belongs to `before`."""
    return bool(
        connection.execute(
            "UPDATE sandboxes SET owner = ? WHERE sandbox_id = ? AND owner = ? AND ended_at IS NULL",
            (after.to_text(), sandbox_id, before.to_text()),
        ).rowcount
    )


def delete_ended_sandboxes(connection: sqlite3.Connection, rollout_id: str) -> None:
    connection.execute("DELETE FROM sandboxes WHERE rollout_id = ? AND ended_at IS NOT NULL", (rollout_id,))


# -- recovery -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recovery:
    """The result of a recovery."""

    rollouts: list[str] = field(default_factory=list)
    """Finished as cancelled."""
    sandboxes: list[str] = field(default_factory=list)
    """Ended."""
    failed: dict[str, str] = field(default_factory=dict)
    """Sandboxes that could not be ended, and why; the next recovery tries again."""


def recover(database: Database, owner: Owner, end_orphan: Callable[[SandboxEntry], bool]) -> Recovery:
    """Finish the rollouts of dead processes and end their sandboxes; `owner` is this process."""
    recovery = Recovery(rollouts=_finish_abandoned(database))
    with database.read() as connection:
        entries = open_sandboxes(connection)
    for entry in entries:
        former = entry.owner
        if former is None or not former.is_dead():
            continue
        with database.write() as connection:
            if not change_sandbox_owner(connection, entry.sandbox_id, before=former, after=owner):
                continue
        reason: str | None = "its backend could not end it"
        try:
            if end_orphan(entry):
                reason = None
        except Exception as error:
            logger.warning("sandbox %s could not be ended: %s", entry.sandbox_id, error)
            reason = f"{type(error).__name__}: {error}"
        finally:
            with database.write() as connection:
                if reason is None:
                    end_sandbox(connection, entry.sandbox_id)
                else:
                    change_sandbox_owner(connection, entry.sandbox_id, before=owner, after=former)
        if reason is None:
            recovery.sandboxes.append(entry.sandbox_id)
        else:
            recovery.failed[entry.sandbox_id] = reason
    return recovery


def _finish_abandoned(database: Database) -> list[str]:
    running = "FROM rollouts WHERE outcome IS NULL"
    with database.read() as connection:
        owners = [text for (text,) in connection.execute(f"SELECT DISTINCT owner {running}")]
    dead = [text for text in owners if Owner.from_text(text).is_dead()]
    finished: list[str] = []
    for text in dead:
        with database.read() as connection:
            keys = [key for (key,) in connection.execute(f"SELECT id {running} AND owner = ?", (text,))]
        for key in keys:
            with database.write() as connection:
                # Read and written in one transaction: another recovery may have been here.
                if connection.execute(f"SELECT 1 {running} AND id = ?", (key,)).fetchone() is None:
                    continue
                record = rows.read(connection, key, names=())
                record.outcome = Outcome.CANCELLED
                record.error = record.error or REASON
                record.reward, record.reward_parts = None, {}
                record.reward_reason = record.reward_reason or REASON
                record.finished_at = time.time()
                # The last call may have been stored without the record.
                record.call_count = calls.count(connection, key)
                if rows.finish(connection, key, record):
                    finished.append(record.rollout_id)
    return finished
