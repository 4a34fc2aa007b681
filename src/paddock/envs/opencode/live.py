"""One rollout that this process runs or will run, and the store in which it waits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paddock.rollouts.store import Store

if TYPE_CHECKING:
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.rollout import Rollout


class WaitingStore(Store):
    """A store that knows a rollout from the moment it was asked for, so that a crash cannot lose one in the queue."""

    def queue(self, record: RolloutRecord) -> None:
        super().begin(record)

    def begin(self, record: RolloutRecord) -> None:
        """It was queued before: this only tells that its turn has come."""
        self.update(record)


class Live:
    def __init__(self, record: RolloutRecord, secrets: tuple[str, ...]) -> None:
        self.record = record
        self.secrets = secrets
        self.rollout: Rollout | None = None
        """None while it waits for its turn, or for its model."""
        self.task: asyncio.Task[None]
        self.changed = asyncio.Event()
        """Set at the next event; each one brings a new `changed`."""
        self.ended = asyncio.Event()
        self.stopped: str | None = None

    @property
    def id(self) -> str:
        return self.record.rollout_id

    async def follow(self, rollout: Rollout) -> None:
        """Run it, in a task of its own: an abort that comes at its last moment cancels nothing else."""
        running = asyncio.create_task(rollout.run())
        try:
            # It can be aborted only once it has begun.
            await asyncio.sleep(0)
            self.rollout = rollout
            await asyncio.shield(running)
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait([running])
            raise

    async def stop(self, reason: str) -> None:
        """Doing it again does nothing."""
        if self.stopped is not None or self.ended.is_set():
            return
        self.stopped = reason
        if self.rollout is None:
            self.task.cancel()
        else:
            await self.rollout.abort(reason)

    def moved(self, _: Rollout | None = None) -> None:
        happened, self.changed = self.changed, asyncio.Event()
        happened.set()

    def end(self) -> None:
        self.ended.set()
        self.changed.set()
