"""The sandboxes that are open, written down so that those of a dead process can be ended."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from paddock.rollouts.processes import process_start_time
from paddock.rollouts.store.owner import Owner
from paddock.rollouts.store.packing import decode, encode, squeeze, unsqueeze

if TYPE_CHECKING:
    import sqlite3


@dataclass(slots=True)
class SandboxEntry:
    """One sandbox: what has to be ended and removed if its owner cannot."""

    sandbox_id: str
    backend: str
    rollout_id: str | None = None
    host_pid: int | None = None
    host_start_time: int | None = None
    """Of `host_pid`, as `process_start_time` tells it: a later process with that number is another."""
    paths: list[str] = field(default_factory=list)
    """Folders and files of the host that go with the sandbox."""
    created_at: float | None = None
    owner: Owner | None = None
    """None: the process that notes it."""


def note(connection: sqlite3.Connection, entry: SandboxEntry, owner: Owner) -> None:
    start = entry.host_start_time
    if start is None and entry.host_pid is not None:
        start = process_start_time(entry.host_pid)
    created_at = time.time() if entry.created_at is None else entry.created_at
    kept = replace(entry, host_start_time=start, created_at=created_at, owner=None)
    connection.execute(
        "INSERT OR REPLACE INTO sandboxes (sandbox_id, rollout_id, owner, data) VALUES (?, ?, ?, ?)",
        (entry.sandbox_id, entry.rollout_id, (entry.owner or owner).to_text(), squeeze(encode(asdict(kept)))),
    )


def end(connection: sqlite3.Connection, sandbox_id: str) -> None:
    connection.execute(
        "UPDATE sandboxes SET ended_at = ? WHERE sandbox_id = ? AND ended_at IS NULL", (time.time(), sandbox_id)
    )


def open_entries(connection: sqlite3.Connection) -> list[SandboxEntry]:
    rows = connection.execute("SELECT owner, data FROM sandboxes WHERE ended_at IS NULL ORDER BY rowid")
    return [SandboxEntry(**{**decode(unsqueeze(data)), "owner": Owner.from_text(owner)}) for owner, data in rows]


def change_owner(connection: sqlite3.Connection, sandbox_id: str, *, before: Owner, after: Owner) -> bool:
    """False if the sandbox is no longer open or no longer belongs to `before`."""
    return bool(
        connection.execute(
            "UPDATE sandboxes SET owner = ? WHERE sandbox_id = ? AND owner = ? AND ended_at IS NULL",
            (after.to_text(), sandbox_id, before.to_text()),
        ).rowcount
    )


def forget_ended(connection: sqlite3.Connection, rollout_id: str) -> None:
    connection.execute("DELETE FROM sandboxes WHERE rollout_id = ? AND ended_at IS NOT NULL", (rollout_id,))
