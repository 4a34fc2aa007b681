"""The background deleter: it ends instances until the plane confirms that they are gone.

It runs on a thread of its own, so it outlives the event loops of its callers and nobody waits for a plane that hangs.
A lease without an instance id belongs to a create whose answer never came. The deleter finds out what came of it, in
this order: the plane's list of the run (by request id where the plane shows it, by elimination in a run that is ours
alone), then the same create once more under the same request id, to which a plane answers with the first instance.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from paddock.fleet.errors import FleetError, PlaneError
from paddock.fleet.retry import Backoff
from paddock.fleet.sync import RunningLoop

if TYPE_CHECKING:
    from paddock.fleet.leases import Lease, Leases
    from paddock.fleet.plane import Plane
    from paddock.fleet.settings import PlaneAddress

logger = logging.getLogger(__name__)

PAUSES = Backoff(first=0.25, longest=10.0)
ATTEMPT_SECONDS = 10.0
ANSWER_SECONDS = 1.0
"""How long a create whose caller left may still answer by itself before the plane is asked what came of it."""
WATCH_SECONDS = 60.0
"""How long the plane's list is watched for what an unanswered create made before the create is sent again."""
NO_LIST_STATUSES = frozenset((404, 405, 501))
"""Answers of a plane that has no list of instances."""
WARN_AT_ATTEMPT = 5


class Deleter:
    """Owns the leases in state `ending`."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._running: RunningLoop | None = None
        self._stopped = False
        self._wakes: dict[int, asyncio.Event] = {}
        self._suspects: dict[str, frozenset[int]] = {}
        self._recovered: set[PlaneAddress] = set()

    # -- from any thread ------------------------------------------------------------------------------

    def start(self, address: PlaneAddress) -> None:
        """Be ready, and end what dead processes left at this plane."""
        if self._running is None and not self._stopped:
            self._running = RunningLoop("paddock-fleet-deleter")
        if address not in self._recovered and self._running is not None:
            self._recovered.add(address)
            from paddock.fleet.recovery import recover_in_background

            self._running.submit(recover_in_background(address))

    def take(self, lease: Lease) -> None:
        """End the lease from now on. Safe in a destructor: takes no lock of ours."""
        if self._running is not None and not self._stopped:
            self._running.submit(self._end(lease))

    def wake(self, lease: Lease) -> None:
        """Something about the lease has changed."""
        wake = self._wakes.get(lease.number)
        if wake is not None and self._running is not None and not self._stopped:
            self._running.loop.call_soon_threadsafe(wake.set)

    def stop(self) -> None:
        self._stopped = True
        if self._running is not None:
            self._running.stop()

    # -- on the deleter's loop ------------------------------------------------------------------------

    async def _end(self, lease: Lease) -> None:
        from paddock.fleet.plane import Plane

        wake = self._wakes[lease.number] = asyncio.Event()
        plane, began, attempt = Plane(lease.address), time.monotonic(), 0
        try:
            while lease.state != "gone":
                wake.clear()
                try:
                    if lease.instance_id is not None:
                        await plane.delete_once(lease.instance_id, seconds=ATTEMPT_SECONDS)
                        self._leases.finish(lease)
                        return
                    if await self._find(lease, plane, time.monotonic() - began):
                        continue
                except FleetError as error:
                    lease.error = str(error)
                    attempt += 1
                    if attempt == WARN_AT_ATTEMPT:
                        logger.warning("still trying to end %s: %s", lease.instance_id or "a lost create", error)
                else:
                    attempt += 1
                pause = PAUSES.pause(attempt)
                with suppress(TimeoutError):
                    await asyncio.wait_for(wake.wait(), pause)
        finally:
            self._wakes.pop(lease.number, None)

    async def _find(self, lease: Lease, plane: Plane, waited: float) -> bool:
        """Learn what came of a create without an answer. Whether anything was learned."""
        if lease.is_in_flight and waited < ANSWER_SECONDS:
            return False
        try:
            listed = await plane.list_run(lease.run_id, seconds=ATTEMPT_SECONDS)
        except PlaneError as error:
            if error.status not in NO_LIST_STATUSES:
                raise
            return await self._ask_again(lease, plane)
        if lease.instance_id is not None or lease.state == "gone":
            return True
        ours = next((each for each in listed if each.request_id == lease.request_id), None)
        if ours is None and lease.is_own_run:
            alive = {each.instance_id for each in listed if not each.has_ended}
            orphan = self._orphan(lease, alive)
            if orphan is not None:
                self._leases.name(lease, orphan)
                return True
        if ours is not None:
            if ours.has_ended:
                self._leases.finish(lease)
            else:
                self._leases.name(lease, ours.instance_id)
            return True
        is_watched = lease.is_own_run or any(each.request_id is not None for each in listed)
        if is_watched and (waited < WATCH_SECONDS or lease.is_in_flight):
            return False
        return await self._ask_again(lease, plane)

    def _orphan(self, lease: Lease, alive: set[str]) -> str | None:
        """An instance of our run that belongs to nobody.

        One that was listed while other creates had no answer may be theirs. It is an orphan once they all have one.
        """
        from paddock.fleet.journal import written_instances

        outstanding = self._leases.outstanding(lease.run_id)
        creating = frozenset(each.number for each in outstanding if each.state == "creating")
        owned = {each.instance_id for each in outstanding} | written_instances(lease.address)
        for instance_id in sorted(alive - owned):
            if not self._suspects.setdefault(instance_id, creating) & creating:
                del self._suspects[instance_id]
                return instance_id
        return None

    async def _ask_again(self, lease: Lease, plane: Plane) -> bool:
        instance_id = await plane.repeat_create(
            lease.env_key, lease.run_id, lease.request_id, seconds=ATTEMPT_SECONDS
        )
        if instance_id is None:
            self._leases.finish(lease)
        else:
            self._leases.name(lease, instance_id)
        return True
