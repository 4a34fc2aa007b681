"""Ending the instances of leases: in the background, after a crash, and when the process exits.

`Deleter` runs on a thread of its own, so it outlives the event loops of its callers, and no caller waits for a plane
that hangs. It retries until the plane confirms the end.

A lease without an instance id belongs to a create whose answer never came. What it created is found in two ways: in
the plane's list of the run (by request id where the plane shows it, by elimination in a run that is ours alone), and
by the same create once more with the same request id, to which a plane answers with the first instance.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING

from paddock.fleet.client.errors import FleetError, PlaneError
from paddock.fleet.client.lease_journal import dead_journals, journaled_instances
from paddock.fleet.client.models import ALIVE, ENDED
from paddock.fleet.client.plane_client import PlaneClient
from paddock.loop_thread import RunningLoop
from paddock.retry import Backoff

if TYPE_CHECKING:
    from paddock.fleet.client.lease_journal import LeaseRecord
    from paddock.fleet.client.leases import Lease, LeaseRegistry
    from paddock.fleet.client.settings import PlaneAddress

logger = logging.getLogger(__name__)

PAUSES = Backoff(first_seconds=0.25, longest_seconds=10.0)
RECOVERY_PAUSES = Backoff(first_seconds=2.0, longest_seconds=60.0)
ATTEMPT_SECONDS = 10.0
ANSWER_SECONDS = 1.0
"""How long a create whose caller was cancelled may still answer before the plane's list is read."""
WATCH_SECONDS = 60.0
"""How long the plane's list is watched for the instance of an unanswered create before the create is sent again."""
NO_LIST_STATUSES = frozenset((404, 405, 501))
"""Statuses of a plane that has no list of instances."""
WARN_AT_ATTEMPT = 5
EXIT_SECONDS = 1.0
"""The least time for the last attempt at exit."""


# -- in the background --------------------------------------------------------------------------------


class Deleter:
    """Owns the leases in state `ending`."""

    def __init__(self, registry: LeaseRegistry) -> None:
        self._registry = registry
        self._running: RunningLoop | None = None
        self._is_stopped = False
        self._wakeups: dict[int, asyncio.Event] = {}
        self._suspects: dict[str, frozenset[int]] = {}
        """Instances of our run without an owner: the creates that had no answer when they were listed first."""
        self._recovered: set[PlaneAddress] = set()

    # -- from any thread ------------------------------------------------------------------------------

    def start(self, address: PlaneAddress) -> None:
        """Start the thread, and end what dead processes left at this plane."""
        if self._running is None and not self._is_stopped:
            self._running = RunningLoop("paddock-fleet-deleter")
        if address not in self._recovered and self._running is not None:
            self._recovered.add(address)
            self._running.submit(_recover_with_retries(address))

    def delete(self, lease: Lease) -> None:
        """End the lease from now on. Safe in a finalizer: it takes no lock of ours."""
        if self._running is not None and not self._is_stopped:
            self._running.submit(self._delete(lease))

    def wake(self, lease: Lease) -> None:
        """The lease has changed: do not wait for the end of the pause."""
        wakeup = self._wakeups.get(lease.number)
        if wakeup is not None and self._running is not None and not self._is_stopped:
            self._running.loop.call_soon_threadsafe(wakeup.set)

    def stop(self) -> None:
        self._is_stopped = True
        if self._running is not None:
            self._running.stop()

    # -- on the deleter's loop ------------------------------------------------------------------------

    async def _delete(self, lease: Lease) -> None:
        wakeup = self._wakeups[lease.number] = asyncio.Event()
        plane, started_at, attempt = PlaneClient(lease.address), time.monotonic(), 0
        try:
            while lease.state != "gone":
                wakeup.clear()
                attempt += 1
                try:
                    if lease.instance_id is not None:
                        await plane.delete_once(lease.instance_id, seconds=ATTEMPT_SECONDS)
                        self._registry.mark_gone(lease)
                        return
                    if await self._find_instance(lease, plane, time.monotonic() - started_at):
                        attempt -= 1
                        continue
                except FleetError as error:
                    lease.error = str(error)
                    if attempt == WARN_AT_ATTEMPT:
                        logger.warning("still trying to end %s: %s", lease.instance_id or "a lost create", error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(wakeup.wait(), PAUSES.pause(attempt))
        finally:
            self._wakeups.pop(lease.number, None)

    async def _find_instance(self, lease: Lease, plane: PlaneClient, waited: float) -> bool:
        """Find what a create without an answer created. Whether the lease has changed."""
        if lease.is_in_flight and waited < ANSWER_SECONDS:
            return False
        try:
            instances = await plane.list_run(lease.run_id, seconds=ATTEMPT_SECONDS)
        except PlaneError as error:
            if error.status not in NO_LIST_STATUSES:
                raise
            return await self._repeat_create(lease, plane)
        if lease.instance_id is not None or lease.state == "gone":
            return True
        own = next((each for each in instances if each.request_id == lease.request_id), None)
        if own is None and lease.is_own_run:
            alive = {each.instance_id for each in instances if not each.has_ended}
            orphan = self._find_orphan(lease, alive)
            if orphan is not None:
                self._registry.set_instance(lease, orphan)
                return True
        if own is not None:
            if own.has_ended:
                self._registry.mark_gone(lease)
            else:
                self._registry.set_instance(lease, own.instance_id)
            return True
        can_appear = lease.is_own_run or any(each.request_id is not None for each in instances)
        if can_appear and (waited < WATCH_SECONDS or lease.is_in_flight):
            return False
        return await self._repeat_create(lease, plane)

    def _find_orphan(self, lease: Lease, alive: set[str]) -> str | None:
        """An instance of our run without an owner.

        One that was listed while other creates had no answer may be theirs. It is an orphan once they all have one.
        """
        outstanding = self._registry.outstanding(lease.run_id)
        creating = frozenset(each.number for each in outstanding if each.state == "creating")
        owned = {each.instance_id for each in outstanding} | journaled_instances(lease.address)
        for instance_id in sorted(alive - owned):
            if not self._suspects.setdefault(instance_id, creating) & creating:
                del self._suspects[instance_id]
                return instance_id
        return None

    async def _repeat_create(self, lease: Lease, plane: PlaneClient) -> bool:
        instance_id = await plane.repeat_create(
            lease.env_key, lease.run_id, lease.request_id, seconds=ATTEMPT_SECONDS
        )
        if instance_id is None:
            self._registry.mark_gone(lease)
        else:
            self._registry.set_instance(lease, instance_id)
        return True


# -- after a crash ------------------------------------------------------------------------------------


async def _recover_with_retries(address: PlaneAddress) -> None:
    """End what dead processes left at this plane. A plane that cannot be reached is asked again later."""
    attempt = 0
    while True:
        try:
            ended, failures = await recover(address)
        except OSError as error:
            logger.warning("the leases of ended processes cannot be read: %s", error)
            return
        if ended:
            logger.warning("ended %d instances that killed processes left", len(ended))
        if not failures:
            return
        attempt += 1
        await asyncio.sleep(RECOVERY_PAUSES.pause(attempt))


async def recover(address: PlaneAddress) -> tuple[list[str], list[FleetError]]:
    """End what dead processes left at this plane, once: the instances ended, and why other leases are still open."""
    plane, ended, failures = PlaneClient(address), list[str](), list[FleetError]()
    with dead_journals() as journals:
        work = [(journal, record) for journal in journals for record in list(journal.records.values())]
        work = [(journal, record) for journal, record in work if record.belongs_to(address)]
        results = await asyncio.gather(*(_recover_lease(plane, record) for _, record in work), return_exceptions=True)
        for (journal, record), result in zip(work, results, strict=True):
            if isinstance(result, FleetError):
                logger.info("what a killed process left is not ended yet: %s", result)
                failures.append(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                ended += result
                journal.remove(record.number)
    return ended, failures


def forget_run(address: PlaneAddress, run_id: str) -> None:
    """Remove the leases of a run that was ended as a whole from the journals of dead processes.

    A create without an answer stays: it may still create an instance after the run was ended.
    """
    try:
        with dead_journals() as journals:
            for journal in journals:
                for record in list(journal.records.values()):
                    is_ended = record.run == run_id and record.instance is not None
                    if is_ended and record.belongs_to(address):
                        journal.remove(record.number)
    except OSError as error:
        logger.warning("the leases of ended processes cannot be read: %s", error)


async def _recover_lease(plane: PlaneClient, record: LeaseRecord) -> list[str]:
    """End the instance of a lease; the ids of what was ended. Raises FleetError while that is not certain."""
    if record.instance is not None:
        return await _delete_all(plane, [record.instance])
    instances = await plane.list_run(record.run, seconds=ATTEMPT_SECONDS)
    own = [each for each in instances if each.request_id == record.request]
    if own:
        return await _delete_all(plane, [each.instance_id for each in own if not each.has_ended])
    ended: list[str] = []
    if record.is_own_run:
        # The process that made up this run id is dead: instances of the run in no other journal were its own.
        owned = journaled_instances(plane.address)
        orphans = [each.instance_id for each in instances if not each.has_ended and each.instance_id not in owned]
        ended = await _delete_all(plane, orphans)
    # An instance may still appear in the list: only the create itself, sent again, makes it certain.
    created = await plane.repeat_create(record.env_key, record.run, record.request, seconds=ATTEMPT_SECONDS)
    return ended if created is None or created in ended else ended + await _delete_all(plane, [created])


async def _delete_all(plane: PlaneClient, instance_ids: list[str]) -> list[str]:
    for instance_id in instance_ids:
        await plane.delete_once(instance_id, seconds=ATTEMPT_SECONDS)
    return instance_ids


# -- at exit: there is no event loop and no new thread any more, so these requests block -------------------


def delete_at_exit(registry: LeaseRegistry) -> None:
    """Try once to end what is left, and log what could not be confirmed. That stays in the journal."""
    grace = max((lease.grace_seconds_left for lease in registry.outstanding()), default=0.0)
    deadline = time.monotonic() + max(grace, EXIT_SECONDS)
    for lease in registry.outstanding():
        try:
            if time.monotonic() < deadline and _delete_blocking(lease, deadline):
                registry.mark_gone(lease)
        except (OSError, ValueError, http.client.HTTPException) as error:
            lease.error = type(error).__name__
    for run_id in {lease.run_id for lease in registry.outstanding()}:
        logger.warning(
            "%d instances of run %s may be left; the next process that uses the plane ends them,"
            " or: paddock fleet rm --run %s",
            len(registry.outstanding(run_id)),
            run_id,
            run_id,
        )


def _delete_blocking(lease: Lease, deadline: float) -> bool:
    """Whether the plane confirmed the end of the lease."""
    if lease.instance_id is not None:
        return _delete_instance_blocking(lease.address, lease.instance_id, deadline)
    query = urllib.parse.urlencode({"run_id": lease.run_id})
    status, body = _send_blocking(lease.address, "GET", f"/v1/env/instances?{query}", deadline)
    instances = json.loads(body) if status == 200 else []
    own = [each for each in instances if each.get("request_id") == lease.request_id]
    orphans = [each for each in instances if each.get("status") in ALIVE] if lease.is_own_run and not own else []
    is_ended = all(
        [_delete_instance_blocking(lease.address, each["instance_id"], deadline) for each in own or orphans]
    )
    # An instance that is not listed may still appear: the lease stays, unless the list showed our own create.
    return bool(own) and is_ended


def _delete_instance_blocking(address: PlaneAddress, instance_id: str, deadline: float) -> bool:
    path = f"/v1/env/instances/{urllib.parse.quote(instance_id)}"
    status, _ = _send_blocking(address, "DELETE", path, deadline)
    if status in (400, 409):
        status, body = _send_blocking(address, "GET", path, deadline)
        return status == 404 or (status == 200 and json.loads(body).get("status") in ENDED)
    return status < 300 or status in (404, 410)


def _send_blocking(address: PlaneAddress, method: str, path: str, deadline: float) -> tuple[int, bytes]:
    request = urllib.request.Request(f"{address.base_url}{path}", method=method, headers=address.headers)
    try:
        with urllib.request.urlopen(request, timeout=max(deadline - time.monotonic(), 0.1)) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
