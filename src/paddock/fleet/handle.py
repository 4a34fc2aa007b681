"""One instance that was made for us: how long it lives, whether it is still there, and its one end."""

from __future__ import annotations

import asyncio
import logging
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
        self._leases = leases.current()
        self._lease = self._leases.find(plane.address, self.instance_id)
        self._closed = False
        self._forgotten: weakref.finalize[..., InstanceHandle] | None = None
        if self._lease is not None:
            # An instance whose handle is collected without a word is ended in the background.
            self._forgotten = weakref.finalize(self, self._leases.abandon, self._lease)
            self._forgotten.atexit = False

    @property
    def seconds_left(self) -> float | None:
        """How long the instance will live on; None when it was given no time."""
        if self.ttl_seconds is None:
            return None
        return self.ttl_seconds - (time.monotonic() - self.made_at)

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def instance(self) -> Self:
        return self

    async def load(self) -> None:
        """Nothing to do: databases are opened when they are asked for."""

    async def is_gone(self) -> bool:
        """Whether the plane says that it has ended. False when the plane cannot be asked."""
        return await self.plane.is_gone(self.instance_id) is True

    async def close(self, bus: Bus = process_bus) -> None:
        """End the instance: one owner does it, however often and from wherever this is called.

        Waits for the plane's confirmation, at most `leases.GRACE_SECONDS`; a caller that is being cancelled does not
        wait at all. What is not confirmed by then goes on in the background.
        """
        first, self._closed = not self._closed, True
        if self._leases is not leases.current():
            return  # A forked child: the instance is the parent's to end.
        if self._forgotten is not None:
            self._forgotten.detach()
        if self._lease is None:
            await self._delete(bus)
            return
        self._leases.end(self._lease)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return
        left = await leases.wait_gone([self._lease], leases.grace_left([self._lease]))
        if left and first:
            self._announce(bus, "FleetTimeout", f"{self._lease.error or 'no answer'}; tried again in the background")

    async def _delete(self, bus: Bus) -> None:
        """For an instance that somebody else made."""
        try:
            await self.plane.delete(self.instance_id)
        except FleetError as error:
            self._announce(bus, type(error).__name__, str(error))

    def _announce(self, bus: Bus, kind: str, message: str) -> None:
        logger.warning("[%s] instance %s is not ended yet: %s", self.context.label, self.instance_id, message)
        bus.emit(
            CloseFailed(context=self.context, error_type=kind, error_message=message, instance_id=self.instance_id)
        )
