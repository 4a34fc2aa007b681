"""Who owns the instances of this process, so that nothing is left running.

Invariant: every instance that was made, or may have been made, has exactly one owner until the plane confirms that it
is gone. While its create call runs that is the call (`creating`), then the handle (`held`), and from then on the
background deleter (`ending`), which tries until the plane confirms. A lease is written to disk before its create is
sent (`paddock.fleet.journal`); what is left when the process ends is ended by the next process that uses the plane,
or by `paddock fleet rm --run RUN`.
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

from paddock.fleet import turns
from paddock.fleet.deleter import Deleter
from paddock.fleet.journal import Journal, Record, fingerprint
from paddock.fleet.settings import PlaneAddress, plane_address

if TYPE_CHECKING:
    from paddock.fleet.models import Instance

logger = logging.getLogger(__name__)

CLOSE_ALL_SECONDS = 20.0
GRACE_SECONDS = 5.0
"""How long whoever closes, sweeps or exits waits for a lease, all together: from its hand-over to the deleter."""


@dataclass(eq=False, slots=True)
class Lease:
    """One instance that was made or may have been made."""

    number: int
    address: PlaneAddress
    run_id: str
    is_own_run: bool
    env_key: str
    request_id: str
    """The `X-Request-ID` of its create."""
    instance_id: str | None = None
    state: Literal["creating", "held", "ending", "gone"] = "creating"
    is_in_flight: bool = True
    """Whether its create may still be answered."""
    error: str | None = None
    """Why its last deletion failed."""
    ending_since: float | None = None
    """When the deleter got it, on the monotonic clock."""
    gone: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)

    @property
    def record(self) -> Record:
        return Record(
            self.number,
            self.address.base_url,
            fingerprint(self.address),
            self.run_id,
            self.is_own_run,
            self.env_key,
            self.request_id,
            self.instance_id,
        )


class Leases:
    """All leases of this process."""

    def __init__(self) -> None:
        self.run_id = f"paddock-{uuid.uuid4().hex}"
        self.deleter = Deleter(self)
        self._journal = Journal()
        self._open: dict[int, Lease] = {}
        self._shown: set[PlaneAddress] = set()
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    # -- the life of a lease --------------------------------------------------------------------------

    def begin(self, address: PlaneAddress, run_id: str, env_key: str) -> Lease:
        """A lease, written down. Call this before the create is sent."""
        number, request_id = next(self._numbers), str(uuid.uuid4())
        lease = Lease(number, address, run_id, run_id == self.run_id, env_key, request_id)
        with self._lock:
            self._open[number] = lease
            self._journal.write(lease.record)
            self.deleter.start(address)
        self._show(lease)
        return lease

    def rename(self, lease: Lease) -> None:
        """Another create is sent for the lease: what came of the first one is gone."""
        with self._lock:
            lease.request_id, lease.instance_id = str(uuid.uuid4()), None
            self._journal.write(lease.record)

    def name(self, lease: Lease, instance_id: str) -> None:
        """The plane said which instance it is."""
        with self._lock:
            if lease.state != "gone" and lease.instance_id != instance_id:
                lease.instance_id = instance_id
                self._journal.write(lease.record)
        self.deleter.wake(lease)

    def hold(self, lease: Lease) -> None:
        """The create succeeded: the handle owns the instance, unless the caller has left."""
        with self._lock:
            lease.is_in_flight = False
            if lease.state == "creating":
                lease.state = "held"

    def end(self, lease: Lease) -> concurrent.futures.Future[None]:
        """Hand the lease to the background deleter, and return at once. The future is done when it is gone."""
        with self._lock:
            if lease.state in ("creating", "held"):
                lease.state, lease.ending_since = "ending", time.monotonic()
                self.deleter.take(lease)
        return lease.gone

    def abandon(self, lease: Lease) -> None:
        # Called by the garbage collector at any point: taking the lock here could wait for itself.
        if lease.state in ("creating", "held"):
            lease.state, lease.ending_since = "ending", time.monotonic()
            self.deleter.take(lease)

    def finish(self, lease: Lease) -> None:
        """The plane confirmed that there is no such instance."""
        with self._lock:
            if lease.state == "gone":
                return
            lease.state = "gone"
            self._open.pop(lease.number, None)
            self._journal.remove(lease.number)
        lease.gone.set_result(None)
        if lease.instance_id is not None:
            turns.slot_freed(lease.address)
        self.deleter.wake(lease)

    # -- what there is --------------------------------------------------------------------------------

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
            self._journal.close()

    def drop_journal(self) -> None:
        self._journal.drop()

    def _show(self, lease: Lease) -> None:
        """Tell once on stderr how to clean up by hand: a process that is killed can no longer say so."""
        if not lease.is_own_run or lease.address in self._shown or sys.stderr is None:
            return
        self._shown.add(lease.address)
        where, run = lease.address.base_url, lease.run_id
        print(f"paddock: run {run} at {where}; if it is killed: paddock fleet rm --run {run}", file=sys.stderr)


_leases = Leases()
_inherited: list[Leases] = []


def run_id() -> str:
    """The run id of this process."""
    return _leases.run_id


def current() -> Leases:
    return _leases


def grace_left(leases: list[Lease]) -> float:
    """Seconds for which these are still waited for."""
    now = time.monotonic()
    left = [GRACE_SECONDS - (now - (now if each.ending_since is None else each.ending_since)) for each in leases]
    return max([0.0, *left])


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

    What is not confirmed after `seconds` stays with the background deleter; the ids of those, as far as they are
    known.
    """
    held = current()
    leases = held.outstanding(run_id)
    for lease in leases:
        held.end(lease)
    left = await wait_gone(leases, seconds)
    for lease in left:
        logger.warning("an instance is not confirmed as ended: %s", lease.error or "no answer yet")
    return [lease.instance_id or f"request {lease.request_id}" for lease in left]


async def sweep(run_id: str, *, api_key: str | None = None, base_url: str | None = None) -> list[Instance]:
    """End all instances of a run, such as one whose process was killed, and say which."""
    from paddock.fleet.plane import Plane
    from paddock.fleet.recovery import forget_run

    address = plane_address(api_key, base_url)
    ended = await Plane(address).delete_run(run_id)
    forget_run(address, run_id)
    return ended


def _at_exit() -> None:
    from paddock.fleet.exiting import end_at_exit

    _leases.deleter.stop()
    try:
        end_at_exit(_leases)
    finally:
        _leases.close_journal()


def _in_child() -> None:
    # What the parent opened is the parent's to end. Its threads do not exist here: its objects are never collected.
    global _leases
    _leases.drop_journal()
    _inherited.append(_leases)
    _leases = Leases()
    turns.forget_all()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
