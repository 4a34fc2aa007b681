"""The store as the page reads it: read-only, opened on first use, and queried on worker threads.

Lists, single rollouts, the change watcher and exports each have a connection and a thread, so that none waits for
another. While people search, one task makes older rollouts searchable.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from paddock.errors import StoreError
from paddock.store import Owner, Store, rows, search, tags
from paddock.store.store import default_folder
from paddock.web.loaded_rollout import LoadedRollout
from paddock.web.responses import PageNotFound, PartMissing

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable
    from pathlib import Path

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LISTS, ROLLOUTS, CHANGES, EXPORTS = "lists", "rollouts", "changes", "exports"
"""Names of the connections."""
MAX_CACHED_RESULTS = 64
MAX_STALE_SECONDS = 1.0
"""How old a cached result over many rollouts may be while rollouts are written."""
FIRST_ROWS = 100
MAX_LOADED_ROLLOUTS = 6
INDEXING_PAUSE_SECONDS = 0.05
HINT = "paddock rollout TASK --model … makes one; --store names another folder"

logger = logging.getLogger("paddock.web")


class ReadStore:
    """One store. Folder and existence are looked up anew each time: a rollout may create the store later."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else folder.expanduser()
        self._stores: dict[str, Store] = {}
        self._results: OrderedDict[Any, tuple[int, float, Any]] = OrderedDict()
        self._rollouts: OrderedDict[str, LoadedRollout] = OrderedDict()
        self._indexing: asyncio.Task[None] | None = None

    @property
    def exists(self) -> bool:
        return (self.folder / "store.db").exists()

    @property
    def can_write(self) -> bool:
        """Whether requests to stop a rollout can be written."""
        return os.access(self.folder, os.W_OK)

    def check(self) -> None:
        """Read what the page shows first. Raises StoreError for a broken store."""
        if self.exists:
            with Store.open(self.folder, read_only=True) as store:
                store.count()
                list(store.list(limit=FIRST_ROWS))

    def close(self) -> None:
        if self._indexing is not None:
            self._indexing.cancel()
        for store in self._stores.values():
            store.close()
        self._stores.clear()
        self._rollouts.clear()

    async def query(
        self,
        function: Callable[Concatenate[sqlite3.Connection, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """The result of a query over many rollouts."""
        return await self.query_on(LISTS, function, *args, **kwargs)

    async def cached_query(
        self,
        function: Callable[Concatenate[sqlite3.Connection, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """The same for an expensive query: the result is reused until something was written, and for
        `MAX_STALE_SECONDS` after that."""
        store = await self.open(LISTS)
        version = await store.run(store.data_version)
        key = (function, args, tuple(sorted(kwargs.items())))
        now = time.monotonic()
        cached = self._results.get(key)
        if cached is None or (cached[0] != version and now - cached[1] > MAX_STALE_SECONDS):
            cached = (version, now, await store.run(lambda: store.query(function, *args, **kwargs)))
            self._results[key] = cached
            if len(self._results) > MAX_CACHED_RESULTS:
                self._results.popitem(last=False)
        result: Result = cached[2]
        return result

    async def query_on(
        self,
        name: str,
        function: Callable[Concatenate[sqlite3.Connection, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        store = await self.open(name)
        return await store.run(lambda: store.query(function, *args, **kwargs))

    async def open(self, name: str = ROLLOUTS) -> Store:
        if name not in self._stores:
            await asyncio.to_thread(self._keep_open, name)
        return self._stores[name]

    def _keep_open(self, name: str) -> None:
        """On a thread as a whole: a cancelled caller would not close what it opened."""
        opened = self._open()
        if self._stores.setdefault(name, opened) is not opened:
            opened.close()

    def _open(self) -> Store:
        if not self.exists:
            raise PartMissing(f"there is no store in {self.folder}", hint=HINT)
        store = Store.open(self.folder, read_only=True)
        if not store.is_current:
            # Migrated where that is allowed; elsewhere the older version is read.
            try:
                Store.open(self.folder).close()
            except StoreError:
                return store
            store.close()
            store = Store.open(self.folder, read_only=True)
        return store

    def start_indexing(self) -> None:
        """Make all finished rollouts searchable in the background, unless that is being done."""
        if self.can_write and (self._indexing is None or self._indexing.done()):
            self._indexing = asyncio.create_task(self._index_transcripts())

    async def _index_transcripts(self) -> None:
        try:
            before = await self.write(Store.index_transcripts)
            while before is not None:
                # Leave the write lock to rollouts.
                await asyncio.sleep(INDEXING_PAUSE_SECONDS)
                before = await self.write(partial(Store.index_transcripts, before=before))
        except StoreError as error:
            logger.warning("older rollouts cannot be made searchable: %s", error)

    async def write(self, method: Callable[[Store], Result]) -> Result:
        """The result of a method that writes."""
        if not self.can_write:
            raise StoreError(f"the store {self.folder} cannot be written", hint="make its folder writable")

        def open_and_write() -> Result:
            with Store.open(self.folder) as store:
                return method(store)

        return await asyncio.to_thread(open_and_write)

    async def load_rollout(self, rollout_id: str) -> LoadedRollout:
        """A rollout by its id or a unique prefix of it, refreshed."""
        store = await self.open(ROLLOUTS)
        return await store.run(lambda: store.query(self._load, rollout_id))

    def _load(self, connection: sqlite3.Connection, rollout_id: str) -> LoadedRollout:
        key, name, owner = find(connection, rollout_id)
        rollout = self._rollouts.get(name)
        if rollout is None or rollout.key != key:
            rollout = LoadedRollout(key, name)
        rollout.is_orphan = owner is not None and Owner.from_text(owner).is_dead()
        self._rollouts[name] = rollout
        self._rollouts.move_to_end(name)
        if len(self._rollouts) > MAX_LOADED_ROLLOUTS:
            self._rollouts.popitem(last=False)
        rollout.refresh(connection)
        return rollout

    async def query_rollout(
        self,
        rollout_id: str,
        function: Callable[Concatenate[sqlite3.Connection, LoadedRollout, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """The result of a query about one rollout, from one snapshot."""
        store = await self.open(ROLLOUTS)

        def query(connection: sqlite3.Connection) -> Result:
            return function(connection, self._load(connection, rollout_id), *args, **kwargs)

        return await store.run(lambda: store.query(query))


def find(connection: sqlite3.Connection, rollout_id: str) -> tuple[int, str, str | None]:
    """The key and the whole id of a rollout, and its owner if it is running."""
    key = rows.find(connection, rollout_id)
    if key is None:
        raise PageNotFound(
            f"there is no rollout {rollout_id[:80]!r}", hint="it may have been pruned; look at the table"
        )
    name, owner, outcome = connection.execute(
        "SELECT rollout_id, owner, outcome FROM rollouts WHERE id = ?", (key,)
    ).fetchone()
    return key, name, owner if outcome is None else None


def summaries(connection: sqlite3.Connection, keys: Iterable[int]) -> list[dict[str, Any]]:
    """A row of the table for each of the rollouts that still exist."""
    listed = list(keys)
    tags_by_key = tags.read(connection, listed)
    heads = ((key, rows.head(connection, key)) for key in listed)
    return [{**summarize_head(head), "tags": tags_by_key.get(key, [])} for key, head in heads if head is not None]


def summarize_head(head: dict[str, Any]) -> dict[str, Any]:
    """The summary of a rollout from the head of its record."""
    from paddock.rollouts.rollout_json import summarize
    from paddock.store.rows import to_record

    return summarize(to_record(head))


def changed_rows(connection: sqlite3.Connection, after: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
    """The number of the last change, and summaries of the rollouts that changed."""
    changes = search.changed_since(connection, after, limit)
    return (changes[-1][1] if changes else after), summaries(connection, [key for key, _ in changes])
