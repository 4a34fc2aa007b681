"""What a process that died left behind: rollouts without an outcome, and sandboxes nobody ends.

Safe to run in several processes at once: each rollout gets its outcome once, and each sandbox is
claimed by one of them before it is ended.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paddock.rollouts.outcome import Outcome
from paddock.rollouts.store import ledger, rows
from paddock.rollouts.store.owner import Owner

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.rollouts.store.database import Database
    from paddock.rollouts.store.ledger import SandboxEntry

REASON = "paddock ended before the rollout did"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was put right."""

    rollouts: list[str] = field(default_factory=list)
    """Finished as cancelled."""
    sandboxes: list[str] = field(default_factory=list)
    """Ended."""
    failed: dict[str, str] = field(default_factory=dict)
    """Sandboxes that could not be ended, and why; the next recovery tries again."""


def recover(database: Database, owner: Owner, end_leftover: Callable[[SandboxEntry], bool]) -> Recovery:
    found = Recovery(rollouts=_finish_abandoned(database))
    with database.read() as connection:
        entries = ledger.open_entries(connection)
    for entry in entries:
        former = entry.owner
        if former is None or not former.is_dead():
            continue
        with database.write() as connection:
            if not ledger.change_owner(connection, entry.sandbox_id, before=former, after=owner):
                continue
        reason: str | None = "its backend could not end it"
        try:
            if end_leftover(entry):
                reason = None
        except Exception as error:
            logger.warning("sandbox %s could not be ended: %s", entry.sandbox_id, error)
            reason = f"{type(error).__name__}: {error}"
        finally:
            with database.write() as connection:
                if reason is None:
                    ledger.end(connection, entry.sandbox_id)
                else:
                    ledger.change_owner(connection, entry.sandbox_id, before=owner, after=former)
        if reason is None:
            found.sandboxes.append(entry.sandbox_id)
        else:
            found.failed[entry.sandbox_id] = reason
    return found


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
                if rows.finish(connection, key, record):
                    finished.append(record.rollout_id)
    return finished
