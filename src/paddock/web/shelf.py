"""The store as the page reads it: never written to, from a few threads of its own, opened when first asked.

Tables, single rollouts and the watch for changes each have a connection, so that none waits for another.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from paddock.errors import StoreError
from paddock.rollouts.store import Owner, Store, figures, rows
from paddock.rollouts.store.store import default_folder
from paddock.web.answers import NotFound, NotHere
from paddock.web.trail import Trail

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable
    from pathlib import Path

Asked = ParamSpec("Asked")
Result = TypeVar("Result")

TABLES, ROLLOUTS, CHANGES = "tables", "rollouts", "changes"
ANSWERS = 64
FRESH = 1.0
"""Seconds for which figures over many rollouts may be old while rollouts are being written."""
FIRST_ROWS = 100
TRAILS = 6
"""Rollouts that are kept in memory as they were read."""
HINT = "paddock rollout TASK --model … makes one; --store names another folder"


class Shelf:
    """One store."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else folder.expanduser()
        self._stores: dict[str, Store] = {}
        self._answers: OrderedDict[Any, tuple[int, float, Any]] = OrderedDict()
        self._trails: OrderedDict[str, Trail] = OrderedDict()

    @property
    def exists(self) -> bool:
        return (self.folder / "store.db").exists()

    @property
    def can_write(self) -> bool:
        """Whether rollouts can be asked to stop."""
        return os.access(self.folder, os.W_OK)

    def check(self) -> None:
        """Read what the page shows first. Raises StoreError for a store that is broken."""
        if self.exists:
            with Store.open(self.folder, read_only=True) as store:
                store.count()
                list(store.list(limit=FIRST_ROWS))

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores.clear()
        self._trails.clear()

    async def ask(
        self,
        question: Callable[Concatenate[sqlite3.Connection, Asked], Result],
        *args: Asked.args,
        **kwargs: Asked.kwargs,
    ) -> Result:
        """About many rollouts."""
        return await self.on(TABLES, question, *args, **kwargs)

    async def remembered(
        self,
        question: Callable[Concatenate[sqlite3.Connection, Asked], Result],
        *args: Asked.args,
        **kwargs: Asked.kwargs,
    ) -> Result:
        """The same for what costs more to find out: an answer is given again until something was written, and for a
        moment longer."""
        store = await self.store(TABLES)
        version = await store.run(store.version)
        key = (question, args, tuple(sorted(kwargs.items())))
        now = time.monotonic()
        known = self._answers.get(key)
        if known is None or (known[0] != version and now - known[1] > FRESH):
            known = (version, now, await store.run(lambda: store.ask(question, *args, **kwargs)))
            self._answers[key] = known
            if len(self._answers) > ANSWERS:
                self._answers.popitem(last=False)
        found: Result = known[2]
        return found

    async def on(
        self,
        which: str,
        question: Callable[Concatenate[sqlite3.Connection, Asked], Result],
        *args: Asked.args,
        **kwargs: Asked.kwargs,
    ) -> Result:
        store = await self.store(which)
        return await store.run(lambda: store.ask(question, *args, **kwargs))

    async def store(self, which: str = ROLLOUTS) -> Store:
        if which not in self._stores:
            opened = await asyncio.to_thread(self._open)
            if self._stores.setdefault(which, opened) is not opened:
                opened.close()
        return self._stores[which]

    def _open(self) -> Store:
        if not self.exists:
            raise NotHere(f"there is no store in {self.folder}", hint=HINT)
        store = Store.open(self.folder, read_only=True)
        if not store.is_current:
            # Brought up to date where that is allowed; elsewhere it is read as it is.
            try:
                Store.open(self.folder).close()
            except StoreError:
                return store
            store.close()
            store = Store.open(self.folder, read_only=True)
        return store

    async def trail(self, rollout_id: str) -> Trail:
        """A rollout by its id, or by the unique beginning of it, as far as it has come now."""
        store = await self.store(ROLLOUTS)
        return await store.run(lambda: store.ask(self._advance, rollout_id))

    def _advance(self, connection: sqlite3.Connection, rollout_id: str) -> Trail:
        key, name, owner = find(connection, rollout_id)
        trail = self._trails.get(name)
        if trail is None or trail.key != key:
            trail = Trail(key, name)
        trail.is_orphan = owner is not None and Owner.from_text(owner).is_dead()
        self._trails[name] = trail
        self._trails.move_to_end(name)
        if len(self._trails) > TRAILS:
            self._trails.popitem(last=False)
        trail.advance(connection)
        return trail

    async def with_trail(
        self,
        rollout_id: str,
        question: Callable[Concatenate[sqlite3.Connection, Trail, Asked], Result],
        *args: Asked.args,
        **kwargs: Asked.kwargs,
    ) -> Result:
        """Ask something about one rollout, in the moment in which it is read."""
        store = await self.store(ROLLOUTS)

        def answer(connection: sqlite3.Connection) -> Result:
            return question(connection, self._advance(connection, rollout_id), *args, **kwargs)

        return await store.run(lambda: store.ask(answer))


def find(connection: sqlite3.Connection, rollout_id: str) -> tuple[int, str, str | None]:
    """Key, whole id, and the owner of a rollout that runs."""
    key = rows.find(connection, rollout_id)
    if key is None:
        raise NotFound(f"there is no rollout {rollout_id[:80]!r}", hint="it may have been pruned; look at the table")
    name, owner, outcome = connection.execute(
        "SELECT rollout_id, owner, outcome FROM rollouts WHERE id = ?", (key,)
    ).fetchone()
    return key, name, owner if outcome is None else None


def summaries(connection: sqlite3.Connection, keys: list[int]) -> list[dict[str, Any]]:
    """What fits on a line, for each of the rollouts that are still there."""
    return [found for key in keys if (found := summary(connection, key)) is not None]


def summary(connection: sqlite3.Connection, key: int) -> dict[str, Any] | None:
    head = rows.head(connection, key)
    return None if head is None else shown(head)


def shown(head: dict[str, Any]) -> dict[str, Any]:
    """A head as the summary of a rollout."""
    from paddock.rollouts.outcome import Outcome
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.shown import summarize

    outcome = head["outcome"]
    return summarize(RolloutRecord(**{**head, "outcome": None if outcome is None else Outcome(outcome)}))


def changed_rows(connection: sqlite3.Connection, after: int, most: int) -> tuple[int, list[dict[str, Any]]]:
    """Summaries of what changed, and the number to go on from."""
    found = figures.changed_since(connection, after, most)
    return (found[-1][1] if found else after), summaries(connection, [key for key, _ in found])
