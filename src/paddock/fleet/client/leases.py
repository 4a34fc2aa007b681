"""Leases: every instance of this process has exactly one owner, so that none is left running.

Invariant: an instance that was created, or may have been created, has an owner until the plane confirms its end.
While its create runs that is the create (`creating`), then the handle (`held`), and then the background deleter
(`ending`), which retries until the plane confirms. A lease is written to disk before its create is sent
(`lease_journal`). What is left when the process ends is ended by the next process that uses the plane, or by
`paddock fleet rm --run RUN`.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import itertools
import logging
import os
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from paddock.fleet.client import instance_queue
from paddock.fleet.client.lease_deletion import Deleter, delete_at_exit, forget_run
from paddock.fleet.client.lease_journal import LeaseJournal, LeaseRecord, fingerprint
from paddock.fleet.client.plane_client import PlaneClient
from paddock.fleet.client.settings import PlaneAddress, plane_address

if TYPE_CHECKING:
    from paddock.fleet.client.models import Instance

logger = logging.getLogger(__name__)

CLOSE_ALL_SECONDS = 20.0
GRACE_SECONDS = 5.0
"""How long all callers together wait for the end of a lease, counted from its release to the deleter."""


@dataclass(eq=False, slots=True)
class Lease:
    """One instance that was created, or may have been created."""

    number: int
    address: PlaneAddress
    run_id: str
    is_own_run: bool
    """Whether this process made up the run id, so that no other process has instances in the run."""
    env_key: str
    request_id: str
    """The `X-Request-ID` of its create."""
    instance_id: str | None = None
    state: Literal["creating", "held", "ending", "gone"] = "creating"
    is_in_flight: bool = True
    """Whether its create may still be answered."""
    error: str | None = None
    """Why its last deletion failed."""
    released_at: float | None = None
    """When the deleter got it, on the monotonic clock."""
    gone: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)

    @property
    def record(self) -> LeaseRecord:
        return LeaseRecord(
            self.number,
            self.address.base_url,
            fingerprint(self.address),
            self.run_id,
            self.is_own_run,
            self.env_key,
            self.request_id,
            self.instance_id,
        )

    @property
    def grace_seconds_left(self) -> float:
        spent = 0.0 if self.released_at is None else time.monotonic() - self.released_at
        return max(GRACE_SECONDS - spent, 0.0)


class LeaseRegistry:
    """All leases of this process. Methods are safe from any thread."""

    def __init__(self) -> None:
        self.run_id = f"paddock-{uuid.uuid4().hex}"
        self.deleter = Deleter(self)
        self.journal = LeaseJournal()
        self._open: dict[int, Lease] = {}
        self._announced: set[PlaneAddress] = set()
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    # -- transitions ----------------------------------------------------------------------------------

    def open(self, address: PlaneAddress, run_id: str, env_key: str) -> Lease:
        """A new lease, written to disk. Call this before the create is sent."""
        number, request_id = next(self._numbers), str(uuid.uuid4())
        lease = Lease(number, address, run_id, run_id == self.run_id, env_key, request_id)
        with self._lock:
            self._open[number] = lease
            self.journal.write(lease.record)
            self.deleter.start(address)
        self._announce_run(lease)
        return lease

    def renew_request(self, lease: Lease) -> None:
        """Another create is sent for the lease: the instance of the first one has ended."""
        with self._lock:
            lease.request_id, lease.instance_id = str(uuid.uuid4()), None
            self.journal.write(lease.record)

    def set_instance(self, lease: Lease, instance_id: str) -> None:
        """The plane named the instance."""
        with self._lock:
            if lease.state != "gone" and lease.instance_id != instance_id:
                lease.instance_id = instance_id
                self.journal.write(lease.record)
        self.deleter.wake(lease)

    def mark_held(self, lease: Lease) -> None:
        """The create succeeded: the handle owns the instance, unless the caller was cancelled."""
        with self._lock:
            lease.is_in_flight = False
            if lease.state == "creating":
                lease.state = "held"

    def release(self, lease: Lease) -> None:
        """Hand the lease to the background deleter, and return at once. `lease.gone` is done when it is gone."""
        with self._lock:
            self.release_unlocked(lease)

    def release_unlocked(self, lease: Lease) -> None:
        """`release` for finalizers: the garbage collector may run them while this thread holds the lock."""
        if lease.state in ("creating", "held"):
            lease.state, lease.released_at = "ending", time.monotonic()
            self.deleter.delete(lease)

    def mark_gone(self, lease: Lease) -> None:
        """The plane confirmed that there is no such instance."""
        with self._lock:
            if lease.state == "gone":
                return
            lease.state = "gone"
            self._open.pop(lease.number, None)
            self.journal.remove(lease.number)
        lease.gone.set_result(None)
        if lease.instance_id is not None:
            instance_queue.wake_next(lease.address)
        self.deleter.wake(lease)

    # -- queries --------------------------------------------------------------------------------------

    def outstanding(self, run_id: str | None = None) -> list[Lease]:
        """The leases that are not gone, of one run or all."""
        with self._lock:
            return [lease for lease in self._open.values() if run_id in (None, lease.run_id)]

    def find(self, address: PlaneAddress, instance_id: str) -> Lease | None:
        return next(
            (each for each in self.outstanding() if each.address == address and each.instance_id == instance_id), None
        )

    def close_journal(self) -> None:
        with self._lock:
            self.journal.close()

    def _announce_run(self, lease: Lease) -> None:
        """Print once how to clean up by hand: a process that is killed cannot do so any more."""
        if not lease.is_own_run or lease.address in self._announced or sys.stderr is None:
            return
        self._announced.add(lease.address)
        url, run = lease.address.base_url, lease.run_id
        print(f"paddock: run {run} at {url}; if it is killed: paddock fleet rm --run {run}", file=sys.stderr)


_registry = LeaseRegistry()
_inherited: list[LeaseRegistry] = []


def run_id() -> str:
    """The run id of this process."""
    return _registry.run_id


def current() -> LeaseRegistry:
    return _registry


def grace_seconds_left(leases: list[Lease]) -> float:
    """How long callers still wait for the end of these."""
    return max((lease.grace_seconds_left for lease in leases), default=0.0)


async def wait_gone(leases: list[Lease], seconds: float) -> list[Lease]:
    """Wait until the plane has confirmed the end of these; those that it has not confirmed in time."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def check(_: object) -> None:
        if all(lease.gone.done() for lease in leases) and not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    for lease in leases:
        lease.gone.add_done_callback(check)
    if leases:
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), seconds)
    return [lease for lease in leases if not lease.gone.done()]


async def close_all(run_id: str | None = None, *, seconds: float = CLOSE_ALL_SECONDS) -> list[str]:
    """End every instance of this process, or those of one run, and wait for it.

    What is not confirmed after `seconds` stays with the background deleter; returns the ids of those, where known.
    """
    registry = current()
    leases = registry.outstanding(run_id)
    for lease in leases:
        registry.release(lease)
    unconfirmed = await wait_gone(leases, seconds)
    for lease in unconfirmed:
        logger.warning("an instance is not confirmed as ended: %s", lease.error or "no answer yet")
    return [lease.instance_id or f"request {lease.request_id}" for lease in unconfirmed]


async def sweep(run_id: str, *, api_key: str | None = None, base_url: str | None = None) -> list[Instance]:
    """End all instances of a run, such as one whose process was killed, and return them."""
    address = plane_address(api_key, base_url)
    ended = await PlaneClient(address).delete_run(run_id)
    forget_run(address, run_id)
    return ended


def _at_exit() -> None:
    _registry.deleter.stop()
    try:
        delete_at_exit(_registry)
    finally:
        _registry.close_journal()


def _after_fork_in_child() -> None:
    # The parent ends what it opened. Its threads do not exist here, so its objects must never be finalized.
    global _registry
    _registry.journal.drop()
    _inherited.append(_registry)
    _registry = LeaseRegistry()
    instance_queue.clear_after_fork()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
