"""One instance that was made for us: how long it lives, whether it is still there, and its one end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Self

from paddock.fleet import leases
from paddock.fleet.errors import FleetError
from paddock.fleet.events import CloseFailed
from paddock.fleet.sdk_calls import SdkCalls
from paddock.telemetry.bus import Bus
from paddock.telemetry.bus import bus as process_bus

if TYPE_CHECKING:
    from paddock.fleet.events import TaskContext
    from paddock.fleet.models import Instance
    from paddock.fleet.plane import Plane

logger = logging.getLogger(__name__)


class InstanceHandle(SdkCalls):
    """One instance that was made for us, and its one end."""

    def __init__(self, plane: Plane, instance: Instance, *, ttl_seconds: float | None, context: TaskContext) -> None:
        self.plane = plane
        self.data = instance
        self.instance_id = instance.instance_id
        self.context = context
        self.ttl_seconds = ttl_seconds
        self.made_at = time.monotonic()
        self._lock = threading.Lock()
        self._closing: concurrent.futures.Future[None] | None = None
        # An instance that is forgotten without a word is ended as soon as somebody makes the next one, or at exit.
        self._forgotten = weakref.finalize(self, leases.current().abandon, plane.address, self.instance_id)

    @property
    def seconds_left(self) -> float | None:
        """How long the instance will live on; None when it was given no time."""
        if self.ttl_seconds is None:
            return None
        return self.ttl_seconds - (time.monotonic() - self.made_at)

    @property
    def is_closed(self) -> bool:
        return self._closing is not None

    @property
    def instance(self) -> Self:
        return self

    async def load(self) -> None:
        """Nothing to do: databases are opened when they are asked for."""

    async def is_gone(self) -> bool:
        """Whether the plane says that it has ended. False when the plane cannot be asked."""
        return await self.plane.is_gone(self.instance_id) is True

    async def close(self, bus: Bus = process_bus) -> None:
        """End the instance: one DELETE, however often and from wherever this is called.

        Goes on to its end when the caller is cancelled.
        """
        with self._lock:
            first = self._closing is None
            if first:
                self._closing = concurrent.futures.Future()
            closing = self._closing
        assert closing is not None
        if first:
            await asyncio.shield(leases.finish(self._end(closing, bus)))
        else:
            await asyncio.shield(asyncio.wrap_future(closing))

    async def _end(self, closing: concurrent.futures.Future[None], bus: Bus) -> None:
        try:
            try:
                await self.plane.delete(self.instance_id)
            except asyncio.CancelledError:
                # The loop is ending and will wait for us once more: the instance must not outlive it.
                await self.plane.delete(self.instance_id)
                raise
        except FleetError as error:
            logger.warning("[%s] instance %s could not be ended: %s", self.context.label, self.instance_id, error)
            bus.emit(
                CloseFailed(
                    context=self.context,
                    error_type=type(error).__name__,
                    error_message=str(error),
                    instance_id=self.instance_id,
                )
            )
        finally:
            self._forgotten.detach()
            closing.set_result(None)
