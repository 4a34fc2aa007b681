"""Following along: one watch over the store for all who listen, and none while nobody does.

SQLite tells cheaply whether anything was written. Only then is asked which rollouts changed, and each
listener reads on from where it stands.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paddock.errors import PaddockError
from paddock.rollouts.store import figures
from paddock.web import calls
from paddock.web.shelf import CHANGES, Shelf, changed_rows, shown
from paddock.web.streams import STILL_HERE, event

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import AsyncIterator, Callable, Iterator

    from paddock.web.trail import Trail

logger = logging.getLogger("paddock.web")

LOOK_EVERY = 0.06
KEEP_ALIVE = 15.0
LONGEST_WAIT = 1.0
"""A listener looks up at least so often, whether it was told or not."""
MOST_ROWS = 200


class Watch:
    """Wakes its listeners when the store has changed."""

    def __init__(self, shelf: Shelf, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self.is_stopping = is_stopping
        self._shelf = shelf
        self._listeners: set[asyncio.Event] = set()
        self._looking: asyncio.Task[None] | None = None

    @property
    def is_looking(self) -> bool:
        return self._looking is not None

    @contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever something was written; its owner clears it."""
        woken = asyncio.Event()
        self._listeners.add(woken)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            yield woken
        finally:
            self._listeners.discard(woken)
            if not self._listeners and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    def wake(self) -> None:
        """Have all listeners look up."""
        for woken in self._listeners:
            woken.set()

    async def _look(self) -> None:
        before: int | None = None
        told = ""
        while True:
            try:
                store = await self._shelf.store(CHANGES)
                now = await store.run(store.version)
            except PaddockError as error:
                if error.message != told:
                    told = error.message
                    logger.warning("the store cannot be watched: %s", told)
                now = -1
                await asyncio.sleep(LONGEST_WAIT)
            if now != before:
                before = now
                self.wake()
            await asyncio.sleep(LOOK_EVERY)

    async def wait(self, woken: asyncio.Event) -> None:
        """Until something was written, or a moment has passed."""
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                await woken.wait()
        except TimeoutError:
            pass
        woken.clear()


async def rows(shelf: Shelf, watch: Watch) -> AsyncIterator[bytes]:
    """The table: summaries of rollouts as they change."""
    number = await shelf.on(CHANGES, figures.latest)
    yield event("hello", {"changed": number})
    spoke = time.monotonic()
    with watch.listening() as woken:
        while not watch.is_stopping():
            number, found = await shelf.on(CHANGES, changed_rows, number, MOST_ROWS)
            if found:
                yield event("rows", {"rows": found})
                spoke = time.monotonic()
            elif time.monotonic() - spoke > KEEP_ALIVE:
                yield STILL_HERE
                spoke = time.monotonic()
            if len(found) < MOST_ROWS:
                await watch.wait(woken)


async def rollout(shelf: Shelf, watch: Watch, rollout_id: str, after: int) -> AsyncIterator[bytes]:
    """One rollout: new items of its transcript, its calls and its summary, until it ends."""
    position = Position(after)
    spoke = time.monotonic()
    with watch.listening() as woken:
        while not watch.is_stopping():
            told = await shelf.with_trail(rollout_id, position.news)
            for name, document in told:
                yield event(name, document)
                spoke = time.monotonic()
            if told and told[-1][0] == "done":
                return
            if time.monotonic() - spoke > KEEP_ALIVE:
                yield STILL_HERE
                spoke = time.monotonic()
            await watch.wait(woken)


class Position:
    """How much of a rollout one listener knows."""

    def __init__(self, after: int) -> None:
        self.seq = after
        self.calls = 0
        self.live = 0
        self.summary: dict[str, Any] | None = None

    def news(self, connection: sqlite3.Connection, trail: Trail) -> list[tuple[str, dict[str, Any]]]:
        """What it does not know yet, in the order in which it is told."""
        told: list[tuple[str, dict[str, Any]]] = []
        ended = not trail.is_live
        fresh = trail.changed_calls[self.calls :]
        if fresh:
            self.calls = len(trail.changed_calls)
            told.append(("calls", {"calls": calls.listed(connection, trail, fresh)}))
        items = trail.items[self.seq :]
        if fresh or items:
            self.live = 0
        self.seq += len(items)
        ahead = trail.live[self.live :]
        self.live = len(trail.live)
        if items or ahead:
            told.append(("items", {"items": [*items, *ahead], "next": self.seq}))
        summary = shown(trail.head)
        if summary != self.summary:
            self.summary = summary
            told.append(("summary", {**summary, "live": trail.is_live}))
        if ended:
            told.append(("done", {"outcome": trail.head.get("outcome"), "orphan": trail.is_orphan}))
        return told
