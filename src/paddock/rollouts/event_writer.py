"""Writes what happens in a rollout, and its record, without making the one who reports it wait."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from paddock.rollouts.trace import Event

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.store import Store

logger = logging.getLogger("paddock.rollout")


class EventWriter:
    """The events of one rollout. One that cannot be written is logged, and stops nothing."""

    def __init__(self, store: Store, record: RolloutRecord) -> None:
        self._store = store
        self._record = record
        self._writes: set[asyncio.Future[Any]] = set()

    def write(self, kind: str, data: dict[str, Any]) -> None:
        """Begin to write an event, and the record as it is now."""
        event = Event(time.time(), kind, data)
        self._begin(self._store.run(self._store.add_event, self._record.rollout_id, event))
        self._begin(self._store.run(self._store.update, self._record))

    async def wait_written(self) -> None:
        if self._writes:
            await asyncio.wait(self._writes)

    def _begin(self, work: Awaitable[Any]) -> None:
        write = asyncio.ensure_future(work)
        self._writes.add(write)
        write.add_done_callback(self._end)

    def _end(self, write: asyncio.Future[Any]) -> None:
        self._writes.discard(write)
        if not write.cancelled() and write.exception() is not None:
            logger.warning("an event of %s was not kept: %s", self._record.rollout_id, write.exception())
