"""Live updates as server-sent events: one poller of the store for all listeners, and none without listeners.

The poller reads SQLite's `data_version`, which is cheap. When it changes, each listener queries what is new to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paddock.errors import PaddockError
from paddock.protocol.sse import KEEP_ALIVE
from paddock.store import search
from paddock.web import calls
from paddock.web.read_store import CHANGES, ReadStore, changed_rows, summarize_head
from paddock.web.responses import event

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import AsyncIterator, Callable, Iterator

    from paddock.web.loaded_rollout import LoadedRollout

logger = logging.getLogger("paddock.web")

POLL_SECONDS = 0.06
KEEP_ALIVE_SECONDS = 15.0
MAX_WAIT_SECONDS = 1.0
"""A listener queries at least this often."""
MAX_ROWS = 200


class ChangeWatcher:
    """Wakes its listeners when the store has changed."""

    def __init__(self, store: ReadStore, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self.is_stopping = is_stopping
        self._store = store
        self._listeners: set[asyncio.Event] = set()
        self._polling: asyncio.Task[None] | None = None

    @property
    def is_polling(self) -> bool:
        return self._polling is not None

    @contextmanager
    def subscribe(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever something was written; its owner clears it."""
        wake_event = asyncio.Event()
        self._listeners.add(wake_event)
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())
        try:
            yield wake_event
        finally:
            self._listeners.discard(wake_event)
            if not self._listeners and self._polling is not None:
                self._polling.cancel()
                self._polling = None

    def wake(self) -> None:
        """Wake all listeners."""
        for wake_event in self._listeners:
            wake_event.set()

    async def _poll(self) -> None:
        before: int | None = None
        last_error = ""
        while True:
            try:
                store = await self._store.open(CHANGES)
                now = await store.run(store.data_version)
            except PaddockError as error:
                if error.message != last_error:
                    last_error = error.message
                    logger.warning("the store cannot be watched: %s", last_error)
                now = -1
                await asyncio.sleep(MAX_WAIT_SECONDS)
            if now != before:
                before = now
                self.wake()
            await asyncio.sleep(POLL_SECONDS)

    async def wait(self, wake_event: asyncio.Event) -> None:
        """Until something was written, or `MAX_WAIT_SECONDS` have passed."""
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                await wake_event.wait()
        except TimeoutError:
            pass
        wake_event.clear()


async def follow_table(store: ReadStore, watcher: ChangeWatcher) -> AsyncIterator[bytes]:
    """Summaries of rollouts as they change, for the table."""
    number = await store.query_on(CHANGES, search.latest_change)
    yield event("hello", {"changed": number})
    sent_at = time.monotonic()
    with watcher.subscribe() as wake_event:
        while not watcher.is_stopping():
            number, rows = await store.query_on(CHANGES, changed_rows, number, MAX_ROWS)
            if rows:
                yield event("rows", {"rows": rows})
                sent_at = time.monotonic()
            elif time.monotonic() - sent_at > KEEP_ALIVE_SECONDS:
                yield KEEP_ALIVE
                sent_at = time.monotonic()
            if len(rows) < MAX_ROWS:
                await watcher.wait(wake_event)


async def follow_rollout(
    store: ReadStore, watcher: ChangeWatcher, rollout_id: str, after: int
) -> AsyncIterator[bytes]:
    """New transcript items, calls and summaries of one rollout, until it ends."""
    position = ListenerPosition(after)
    sent_at = time.monotonic()
    with watcher.subscribe() as wake_event:
        while not watcher.is_stopping():
            updates = await store.query_rollout(rollout_id, position.take_updates)
            for name, document in updates:
                yield event(name, document)
                sent_at = time.monotonic()
            if updates and updates[-1][0] == "done":
                return
            if time.monotonic() - sent_at > KEEP_ALIVE_SECONDS:
                yield KEEP_ALIVE
                sent_at = time.monotonic()
            await watcher.wait(wake_event)


class ListenerPosition:
    """How much of a rollout one listener has received."""

    def __init__(self, after: int) -> None:
        self.seq = after
        self.calls = 0
        self.live = 0
        self.summary: dict[str, Any] | None = None

    def take_updates(
        self, connection: sqlite3.Connection, rollout: LoadedRollout
    ) -> list[tuple[str, dict[str, Any]]]:
        """The events that the listener has not received, in order."""
        updates: list[tuple[str, dict[str, Any]]] = []
        has_ended = not rollout.is_live
        changed = rollout.changed_calls[self.calls :]
        if changed:
            self.calls = len(rollout.changed_calls)
            updates.append(("calls", {"calls": calls.list_calls(connection, rollout, changed)}))
        items = rollout.items[self.seq :]
        if changed or items:
            self.live = 0
        self.seq += len(items)
        provisional = rollout.live[self.live :]
        self.live = len(rollout.live)
        if items or provisional:
            updates.append(("items", {"items": [*items, *provisional], "next": self.seq}))
        summary = summarize_head(rollout.head)
        if summary != self.summary:
            self.summary = summary
            updates.append(("summary", {**summary, "live": rollout.is_live}))
        if has_ended:
            updates.append(("done", {"outcome": rollout.head.get("outcome"), "orphan": rollout.is_orphan}))
        return updates
