"""`Store`, the interface of the package: each method is one write transaction, or one consistent read.

It is thread-safe, and several processes may each open their own. Async code calls `run`, which does the work on the
store's worker thread.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from paddock.config import PADDOCK_STORE, user_data_folder
from paddock.errors import StoreError
from paddock.sqlite import Database, WorkerThread, read_pragma
from paddock.store import (
    blobs,
    calls,
    events,
    recovery,
    retention,
    rows,
    search,
    sequences,
    snapshots,
    tags,
    transcripts,
    tree,
)
from paddock.store.aborts import Aborts
from paddock.store.recovery import Owner
from paddock.store.retention import Reserve
from paddock.store.rows import RecordList
from paddock.store.schema import SCHEMA
from paddock.store.search import Search
from paddock.store.sequences import LruCache, WriteCache

if TYPE_CHECKING:
    import builtins
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from paddock.capture.trace import Call, Event
    from paddock.store.outcome import Outcome
    from paddock.store.record import RolloutRecord
    from paddock.store.recovery import Recovery, SandboxEntry
    from paddock.store.retention import Pruned
    from paddock.store.tree import Branch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_CACHED_ROLLOUTS = 256

logger = logging.getLogger(__name__)


def default_folder() -> Path:
    """`$PADDOCK_STORE`, or `paddock/store` in the user's data folder."""
    return PADDOCK_STORE.read() or user_data_folder() / "store"


class Store:
    """Everything rollouts leave behind. Every method raises StoreError when the store cannot do it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._write_caches: LruCache[WriteCache] = LruCache(MAX_CACHED_ROLLOUTS)
        self._reserve = Reserve(database.folder)
        self._owner = Owner.current()
        self._worker = WorkerThread("paddock-store")
        self._aborts = Aborts(database.folder)
        self._closed = False

    @classmethod
    def open(cls, folder: Path | str | None = None, *, read_only: bool = False) -> Store:
        """Open the store in `folder`, and create it if there is none."""
        folder = default_folder() if folder is None else Path(folder).expanduser()
        file = folder / "store.db"
        try:
            is_missing = read_only and not file.exists()
        except OSError as error:
            raise StoreError(f"the store {folder}: {error}", hint="see that the folder can be used") from error
        if is_missing:
            raise StoreError(f"there is no store in {folder}", hint="run a rollout first, or set PADDOCK_STORE")
        store = cls(Database(file, SCHEMA, name=f"the store {folder}", read_only=read_only))
        if not read_only:
            store._reserve.allocate()
        return store

    @property
    def path(self) -> Path:
        """The folder of the store."""
        return self._database.folder

    @property
    def is_current(self) -> bool:
        """False for an older version that was opened read-only."""
        return not self._database.is_emulated

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the work of `run`, and close. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._worker.close()
            self._database.close()

    async def run(
        self, method: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Call a method of the store on the worker thread, after all earlier ones.

        A cancelled caller returns at once; the work is still done."""
        if self._closed:
            raise StoreError(f"the store {self.path} is closed", hint="open it again")
        return await self._worker.run(partial(method, *args, **kwargs))

    # -- rollouts ---------------------------------------------------------------------------------

    def begin(self, record: RolloutRecord) -> None:
        """Store a running rollout, owned by this process. Its id must be new."""
        with self._database.write() as connection:
            if rows.key_of(connection, record.rollout_id) is not None:
                raise StoreError(
                    f"there is a rollout {record.rollout_id} already", hint="give each rollout an id of its own"
                )
            cache = WriteCache(rows.insert(connection, self._placed(record), self._owner.to_text()))
            rows.save_bodies(connection, cache, record)
        with self._database.lock:
            self._write_caches.put(cache.key, cache)

    def update(self, record: RolloutRecord) -> None:
        """Write the record of a running rollout. A finished one stays as it is; empty logs leave the stored ones."""
        with self._writing(record.rollout_id) as (connection, cache):
            if rows.update(connection, cache.key, record):
                rows.save_bodies(connection, cache, record)

    def finish(self, record: RolloutRecord) -> bool:
        """Write the outcome, once. False, with nothing changed, if there is one already.

        On a full disk the reserve is released for it; if that is not enough, the logs are left out and named in
        `metadata["dropped_for_space"]`."""
        try:
            is_first = self._finish(record)
        except StoreError as error:
            if not error.data.get("full"):
                raise
        else:
            self._index_transcript(record.rollout_id)
            return is_first
        if self._reserve.release():
            try:
                return self._finish(record)
            except StoreError as error:
                if not error.data.get("full"):
                    raise
        dropped = {name: type(getattr(record, name))() for name in rows.LOGS if getattr(record, name)}
        if not dropped:
            return self._finish(record)
        logger.warning("rollout %s is stored without %s", record.rollout_id, ", ".join(dropped))
        metadata = {**record.metadata, "dropped_for_space": [*dropped]}
        return self._finish(replace(record, metadata=metadata, **dropped))

    def _finish(self, record: RolloutRecord) -> bool:
        if record.outcome is None:
            raise StoreError(f"rollout {record.rollout_id} has no outcome", hint="set outcome before finish")
        if record.finished_at is None:
            record = replace(record, finished_at=time.time())
        with self._database.lock:
            with self._database.write() as connection:
                key = rows.key_of(connection, record.rollout_id)
                if key is None:
                    # `begin` failed; the outcome is stored all the same.
                    key = rows.insert(connection, record, self._owner.to_text())
                is_first = rows.finish(connection, key, record)
                if is_first:
                    cache = self._write_caches.get(key)
                    # A copy: a failed attempt must not count as written.
                    rows.save_bodies(connection, WriteCache(key, bodies=dict(cache.bodies) if cache else {}), record)
            self._write_caches.pop(key, None)
        return is_first

    def _index_transcript(self, rollout_id: str) -> None:
        """Make the text of a rollout searchable. If that fails, `index_transcripts` tries again."""
        try:
            with self._database.read() as connection:
                key = rows.key_of(connection, rollout_id)
            if key is not None:
                transcripts.add(self._database, [key])
        except StoreError as error:
            logger.warning("rollout %s cannot be searched yet: %s", rollout_id, error)

    def index_transcripts(self, before: int | None = None) -> int | None:
        """Make some finished rollouts searchable that are not: those of an older store, or of a process that died.
        Returns the `before` of the next call; None once all are."""
        return transcripts.add_pending(self._database, before)

    def get(self, rollout_id: str) -> RolloutRecord | None:
        """The whole record. The first characters of an id are enough, four at least, if no other has them.

        `latest` is the rollout that began last."""
        with self._database.read() as connection:
            key = rows.find(connection, rollout_id)
            return None if key is None else self._placed(rows.read(connection, key))

    def list(
        self,
        *,
        task_id: str | None = None,
        agent: str | None = None,
        model: str | None = None,
        outcome: Outcome | str | None = None,
        batch_id: str | None = None,
        finished: bool | None = None,
        since: float | None = None,
        tag: str | None = None,
        limit: int | None = None,
        offset: int = 0,
        newest_first: bool = True,
    ) -> RecordList:
        """All records that match, by when they began, without logs, transcript and file names (`get` has them).

        They are read in pages while they are iterated over. Rollouts that begin meanwhile are not among them.
        """
        if offset < 0 or (limit is not None and limit < 0):
            raise StoreError(f"limit is {limit}, offset is {offset}", hint="give 0 or more; None lists all")
        matching = Search.of(task_id, agent, model, outcome, batch_id, finished, since, tag)
        order: search.Order = "desc" if newest_first else "asc"
        keys = self.query(search.page, matching, order=order, offset=offset, limit=limit)
        return RecordList(keys, self._read_records)

    def _read_records(self, keys: Sequence[int]) -> builtins.list[RolloutRecord]:
        """Records from one snapshot; those that were deleted are left out."""
        with self._database.read() as connection:
            existing = rows.existing(connection, keys)
            names = ("instruction", "config")
            return [self._placed(rows.read(connection, key, names=names)) for key in keys if key in existing]

    def _placed(self, record: RolloutRecord) -> RolloutRecord:
        """The record, which can find its calls in this store."""
        record.store_folder = str(self.path)
        return record

    def count(
        self,
        *,
        task_id: str | None = None,
        agent: str | None = None,
        model: str | None = None,
        outcome: Outcome | str | None = None,
        batch_id: str | None = None,
        finished: bool | None = None,
        since: float | None = None,
        tag: str | None = None,
    ) -> int:
        """How many rollouts `list` would return without a limit."""
        return self.query(search.count, Search.of(task_id, agent, model, outcome, batch_id, finished, since, tag))

    def recent_batches(self, limit: int) -> builtins.list[str]:
        """The names of the batches that began last, the newest first."""
        return self.query(search.recent_batches, limit)

    def rescore(
        self,
        rollout_id: str,
        reward: float | None,
        reason: str | None = None,
        parts: Mapping[str, float] | None = None,
        note: str = "",
    ) -> None:
        """Store the result of a later verification. The reward of the record stays."""
        score = {"at": time.time(), "reward": reward, "reason": reason, "parts": dict(parts or {}), "note": note}
        with self._database.write() as connection:
            rows.add_score(connection, self._key(connection, rollout_id), score)

    def scores(self, rollout_id: str) -> builtins.list[dict[str, Any]]:
        """The results of later verifications, oldest first: at, reward, reason, parts, note."""
        with self._database.read() as connection:
            return rows.read_scores(connection, self._key(connection, rollout_id))

    def change_tags(
        self, rollout_ids: Sequence[str], *, add: Iterable[str] = (), remove: Iterable[str] = ()
    ) -> dict[str, builtins.list[str]]:
        """Add and remove tags of rollouts, by their whole ids; returns the tags that each has now."""
        added, removed = list(add), list(remove)
        result = {}
        with self._database.write() as connection:
            for rollout_id in rollout_ids:
                key = self._key(connection, rollout_id)
                result[rollout_id] = tags.change(connection, key, added, removed)
                search.touch(connection, key)
        return result

    def tags(self, rollout_id: str) -> builtins.list[str]:
        """The tags of a rollout, in order."""
        with self._database.read() as connection:
            key = self._key(connection, rollout_id)
            return tags.read(connection, [key]).get(key, [])

    # -- trees ------------------------------------------------------------------------------------

    def tree(self, rollout_id: str) -> builtins.list[Branch]:
        """All rollouts that were forked from the same one as this one, each after its parent."""
        with self._database.read() as connection:
            self._key(connection, rollout_id)
            return tree.read(connection, rollout_id)

    def children(self, rollout_id: str) -> builtins.list[Branch]:
        """The forks of a rollout, in the order in which they began. It may be pruned."""
        with self._database.read() as connection:
            return tree.children(connection, rollout_id)

    # -- calls and events -------------------------------------------------------------------------

    def save_call(self, rollout_id: str, call: Call) -> None:
        """Insert a call, or replace the one with its id."""
        with self._writing(rollout_id) as (connection, cache):
            calls.save(connection, cache, call)

    def calls(self, rollout_id: str) -> builtins.list[Call]:
        """All calls in their order, exactly as they were saved."""
        with self._database.read() as connection:
            return calls.load(connection, self._key(connection, rollout_id))

    def add_event(self, rollout_id: str, event: Event) -> int:
        """Its number in the rollout, from 1."""
        with self._database.write() as connection:
            return events.add(connection, self._key(connection, rollout_id), event)

    def events(self, rollout_id: str, after: int = 0, limit: int | None = None) -> builtins.list[tuple[int, Event]]:
        """Events with a number above `after`, in order; all of them unless a limit is given."""
        with self._database.read() as connection:
            return events.read(connection, self._key(connection, rollout_id), after=after, limit=limit)

    # -- queries ----------------------------------------------------------------------------------

    def query(
        self,
        function: Callable[Concatenate[sqlite3.Connection, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """The result of a function of `search`, `rows`, `partial_read` or `bulk_read`, from one snapshot."""
        with self._database.read() as connection:
            if self._database.is_emulated:
                search.refresh_emulated(connection)
            return function(connection, *args, **kwargs)

    def data_version(self) -> int:
        """A number that changes whenever another connection has written something."""
        with self._database.autocommit() as connection:
            return read_pragma(connection, "data_version")

    # -- aborts -----------------------------------------------------------------------------------

    @property
    def aborts(self) -> Aborts:
        """Requests to stop running rollouts, in whatever process they run."""
        return self._aborts

    # -- blobs ------------------------------------------------------------------------------------

    def put_blob(self, data: bytes) -> str:
        """Store bytes and return their digest. Name it in a record (as `workdir_blob`) within a day:
        a blob that no rollout refers to is pruned after that."""
        return blobs.put(self._database, data)

    def get_blob(self, digest: str) -> bytes:
        """The data with this digest. Raises StoreError if it is not there, or is damaged."""
        return blobs.get(self._database, digest)

    def put_snapshot(self, rollout_id: str, contents: Mapping[str, bytes]) -> None:
        """Store blobs by their digests, to which the rollout refers as long as its snapshots are kept."""
        with self._database.read() as connection:
            key = self._key(connection, rollout_id)
        snapshots.put(self._database, key, contents)

    # -- sandboxes --------------------------------------------------------------------------------

    def record_sandbox(self, entry: SandboxEntry) -> None:
        """Record an open sandbox, before it has anything that needs cleaning up."""
        with self._database.write() as connection:
            recovery.record_sandbox(connection, entry, self._owner)

    def end_sandbox(self, sandbox_id: str) -> None:
        """Record that a sandbox has ended."""
        with self._database.write() as connection:
            recovery.end_sandbox(connection, sandbox_id)

    def open_sandboxes(self) -> builtins.list[SandboxEntry]:
        """Of all processes, dead ones included."""
        with self._database.read() as connection:
            return recovery.open_sandboxes(connection)

    # -- maintenance -------------------------------------------------------------------------------------

    def recover(self, end_orphan: Callable[[SandboxEntry], bool]) -> Recovery:
        """Finish the rollouts of dead processes as cancelled, and end their sandboxes with `end_orphan`, which
        returns whether it succeeded."""
        result = recovery.recover(self._database, self._owner, end_orphan)
        for rollout_id in result.rollouts:
            self._aborts.clear(rollout_id)
        return result

    def prune(self, *, max_age_seconds: float | None = None, max_bytes: int | None = None) -> Pruned:
        """Delete the oldest finished rollouts: those older than the age, and as many as make the
        store small enough. The file shrinks, also on a full disk."""
        return retention.prune(self._database, self._reserve, max_age_seconds=max_age_seconds, max_bytes=max_bytes)

    def delete(self, rollout_ids: Sequence[str]) -> Pruned:
        """Delete finished rollouts by their whole ids. The result leaves out those that still run."""
        return retention.delete(self._database, self._reserve, rollout_ids)

    def expire_snapshots(self, max_age_seconds: float) -> int:
        """Delete the snapshots of rollouts that ended longer ago. The rollouts stay. Returns how many it were."""
        return snapshots.expire(self._database, max_age_seconds)

    def size_bytes(self) -> int:
        """The size on the disk."""
        return self._database.size_bytes()

    def _key(self, connection: sqlite3.Connection, rollout_id: str) -> int:
        key = rows.key_of(connection, rollout_id)
        if key is None:
            raise StoreError(
                f"there is no rollout {rollout_id} in {self.path}", hint="give the whole id", missing=True
            )
        return key

    @contextmanager
    def _writing(self, rollout_id: str) -> Iterator[tuple[sqlite3.Connection, WriteCache]]:
        """A transaction on one rollout, with its cache. A failure drops the cache, which may have changed."""
        with self._database.lock:
            key = None
            try:
                with self._database.write() as connection:
                    key = self._key(connection, rollout_id)
                    cache = self._write_caches.get(key) or sequences.load_cache(connection, key)
                    self._write_caches.put(key, cache)
                    yield connection, cache
            except BaseException:
                if key is not None:
                    self._write_caches.pop(key, None)
                raise
