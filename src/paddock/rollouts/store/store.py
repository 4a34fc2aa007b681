"""The door to the store: each method is one transaction, or one consistent read.

Safe to use from several threads, and from several processes that each open their own. Async code
calls `run`, which gives the work to the store's own thread.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from paddock.errors import StoreError
from paddock.rollouts.store import blobs, calls, events, figures, ledger, recovery, retention, rows, sequences
from paddock.rollouts.store.aborts import Aborts
from paddock.rollouts.store.database import Database
from paddock.rollouts.store.listing import Listing
from paddock.rollouts.store.live import Live, LiveRollouts
from paddock.rollouts.store.owner import Owner
from paddock.rollouts.store.reserve import Reserve
from paddock.rollouts.store.worker import Worker

if TYPE_CHECKING:
    import builtins
    import sqlite3
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paddock.rollouts.outcome import Outcome
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.store.ledger import SandboxEntry
    from paddock.rollouts.store.recovery import Recovery
    from paddock.rollouts.store.retention import Pruned
    from paddock.rollouts.trace import Call, Event

Arguments = ParamSpec("Arguments")
Asked = ParamSpec("Asked")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


def default_folder() -> Path:
    """`$PADDOCK_STORE`, or `paddock/store` where the user's data lives."""
    chosen = os.environ.get("PADDOCK_STORE")
    if chosen:
        return Path(chosen).expanduser()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "paddock" / "store"


class Store:
    """Everything rollouts leave behind. Every method raises StoreError when the store cannot do it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._live = LiveRollouts()
        self._reserve = Reserve(database.folder)
        self._owner = Owner.current()
        self._worker = Worker("paddock-store")
        self._aborts = Aborts(database.folder)
        self._closed = False

    @classmethod
    def open(cls, folder: Path | str | None = None, *, read_only: bool = False) -> Store:
        """Open the store in `folder`, and make it if there is none."""
        chosen = default_folder() if folder is None else Path(folder).expanduser()
        store = cls(Database(chosen, read_only=read_only))
        if not read_only:
            store._reserve.take()
        return store

    @property
    def path(self) -> Path:
        return self._database.folder

    @property
    def is_current(self) -> bool:
        """False for one of an older version that was opened to be read."""
        return not self._database.stands_in

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what `run` was given, and close. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._worker.close()
            self._database.close()

    async def run(
        self, method: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Call a method of the store on its own thread, after all that were given before.

        A cancelled caller leaves at once; the work is still done."""
        if self._closed:
            raise StoreError(f"the store {self.path} is closed", hint="open it again")
        return await self._worker.run(partial(method, *args, **kwargs))

    # -- rollouts ---------------------------------------------------------------------------------

    def begin(self, record: RolloutRecord) -> None:
        """A running rollout, owned by this process. Its id must be new."""
        with self._database.write() as connection:
            if rows.key_of(connection, record.rollout_id) is not None:
                raise StoreError(
                    f"there is a rollout {record.rollout_id} already", hint="give each rollout an id of its own"
                )
            live = Live(rows.insert(connection, record, self._owner.to_text()))
            rows.save_bodies(connection, live, record)
        with self._database.lock:
            self._live.remember(live)

    def update(self, record: RolloutRecord) -> None:
        """What is known so far. A finished rollout stays as it is, and empty logs leave those stored."""
        with self._writing(record.rollout_id) as (connection, live):
            if rows.update(connection, live.key, record):
                rows.save_bodies(connection, live, record)

    def finish(self, record: RolloutRecord) -> bool:
        """Write the outcome, once. False, with nothing changed, if there is one already.

        On a full disk the reserve is given up for it, and then the logs are left out; what was left
        out is named in `metadata["dropped_for_space"]`."""
        try:
            return self._finish(record)
        except StoreError as error:
            if not error.data.get("full"):
                raise
        if self._reserve.free():
            try:
                return self._finish(record)
            except StoreError as error:
                if not error.data.get("full"):
                    raise
        dropped = {name: type(getattr(record, name))() for name in rows.LOGS if getattr(record, name)}
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
                    # Its begin could not be written; the outcome is kept all the same.
                    key = rows.insert(connection, record, self._owner.to_text())
                first = rows.finish(connection, key, record)
                if first:
                    known = self._live.find(key)
                    # A copy: if this fails and is tried again, nothing of it counts as written.
                    rows.save_bodies(connection, Live(key, bodies=dict(known.bodies) if known else {}), record)
            self._live.forget(key)
        return first

    def get(self, rollout_id: str) -> RolloutRecord | None:
        """The whole record. The first characters of an id are enough, four at least, if no other has them."""
        with self._database.read() as connection:
            key = rows.find(connection, rollout_id)
            return None if key is None else rows.read(connection, key)

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
        limit: int | None = None,
        offset: int = 0,
        newest_first: bool = True,
    ) -> Listing:
        """All records that match, by when they began, without logs, transcript and file names (`get` has them).

        They are read in pages while they are gone through. Rollouts that begin meanwhile are not among them.
        """
        if offset < 0 or (limit is not None and limit < 0):
            raise StoreError(f"limit is {limit}, offset is {offset}", hint="give 0 or more; None lists all")
        filters = rows.Filters(task_id, agent, model, outcome, batch_id, finished, since)
        with self._database.read() as connection:
            keys = rows.keys(connection, filters, limit=limit, offset=offset, newest_first=newest_first)
        return Listing(keys, self._listed)

    def _listed(self, keys: Sequence[int]) -> builtins.list[RolloutRecord]:
        """Records of one moment; those that are gone are left out."""
        with self._database.read() as connection:
            there = rows.existing(connection, keys)
            return [rows.read(connection, key, names=("instruction", "config")) for key in keys if key in there]

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
    ) -> int:
        filters = rows.Filters(task_id, agent, model, outcome, batch_id, finished, since)
        with self._database.read() as connection:
            return rows.count(connection, filters)

    def recent_batches(self, limit: int) -> builtins.list[str]:
        """The names of the batches that began last, the newest first."""
        with self._database.read() as connection:
            return rows.recent_batches(connection, limit)

    def rescore(
        self,
        rollout_id: str,
        reward: float | None,
        reason: str | None = None,
        parts: Mapping[str, float] | None = None,
        note: str = "",
    ) -> None:
        """Keep what a later verification said. The reward of the record stays."""
        score = {"at": time.time(), "reward": reward, "reason": reason, "parts": dict(parts or {}), "note": note}
        with self._database.write() as connection:
            events.add_score(connection, self._key(connection, rollout_id), score)

    def scores(self, rollout_id: str) -> builtins.list[dict[str, Any]]:
        """What later verifications said, oldest first: at, reward, reason, parts, note."""
        with self._database.read() as connection:
            return events.scores(connection, self._key(connection, rollout_id))

    # -- calls and events -------------------------------------------------------------------------

    def save_call(self, rollout_id: str, call: Call) -> None:
        """Insert a call, or replace the one with its id."""
        with self._writing(rollout_id) as (connection, live):
            calls.save(connection, live, call)

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

    # -- looking ----------------------------------------------------------------------------------

    def ask(
        self,
        question: Callable[Concatenate[sqlite3.Connection, Asked], Result],
        *args: Asked.args,
        **kwargs: Asked.kwargs,
    ) -> Result:
        """The answer to one of the questions of `search` and `light`, all of it of one moment."""
        with self._database.read() as connection:
            if self._database.stands_in:
                figures.follow(connection)
            return question(connection, *args, **kwargs)

    def version(self) -> int:
        """Another number whenever another connection has written something."""
        with self._database.outside() as connection:
            return int(connection.execute("PRAGMA data_version").fetchone()[0])

    # -- stopping ---------------------------------------------------------------------------------

    @property
    def aborts(self) -> Aborts:
        """Which running rollouts somebody wants stopped, whatever process they run in."""
        return self._aborts

    # -- blobs ------------------------------------------------------------------------------------

    def put_blob(self, data: bytes) -> str:
        """Store bytes and return their digest. Name it in a record (as `workdir_blob`) within a day:
        a blob that no rollout refers to is pruned after that."""
        return blobs.put(self._database, data)

    def get_blob(self, digest: str) -> bytes:
        return blobs.get(self._database, digest)

    # -- sandboxes --------------------------------------------------------------------------------

    def note_sandbox(self, entry: SandboxEntry) -> None:
        """Write an open sandbox down, before anything of it has to be cleaned up."""
        with self._database.write() as connection:
            ledger.note(connection, entry, self._owner)

    def end_sandbox(self, sandbox_id: str) -> None:
        with self._database.write() as connection:
            ledger.end(connection, sandbox_id)

    def open_sandboxes(self) -> builtins.list[SandboxEntry]:
        """Of all processes, dead ones included."""
        with self._database.read() as connection:
            return ledger.open_entries(connection)

    # -- care -------------------------------------------------------------------------------------

    def recover(self, end_leftover: Callable[[SandboxEntry], bool]) -> Recovery:
        """Finish the rollouts of dead processes as cancelled, and end their sandboxes with
        `end_leftover`, which says whether it could."""
        found = recovery.recover(self._database, self._owner, end_leftover)
        for rollout_id in found.rollouts:
            self._aborts.settle(rollout_id)
        return found

    def prune(self, *, max_age_seconds: float | None = None, max_bytes: int | None = None) -> Pruned:
        """Delete the oldest finished rollouts: those older than the age, and as many as make the
        store small enough. The file shrinks, also on a full disk."""
        return retention.prune(self._database, self._reserve, max_age_seconds=max_age_seconds, max_bytes=max_bytes)

    def size(self) -> int:
        """Bytes on the disk."""
        return self._database.size()

    def _key(self, connection: sqlite3.Connection, rollout_id: str) -> int:
        key = rows.key_of(connection, rollout_id)
        if key is None:
            raise StoreError(f"there is no rollout {rollout_id} in {self.path}", hint="give the whole id")
        return key

    @contextmanager
    def _writing(self, rollout_id: str) -> Iterator[tuple[sqlite3.Connection, Live]]:
        """A transaction on one rollout. What fails leaves nothing behind, in memory neither."""
        with self._database.lock:
            key = None
            try:
                with self._database.write() as connection:
                    key = self._key(connection, rollout_id)
                    live = self._live.find(key)
                    if live is None:
                        live = Live(key)
                        sequences.recall(connection, live)
                        self._live.remember(live)
                    yield connection, live
            except BaseException:
                if key is not None:
                    self._live.forget(key)
                raise
