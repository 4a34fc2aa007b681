"""What this process holds at its control planes, so that nothing is left running when it ends.

Every create carries the run id of the process. What was opened and not closed is ended by `close_all`, or at
exit; what a killed process left is ended by `sweep(run_id)` from anywhere.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
import uuid
from typing import TYPE_CHECKING, Any

from paddock.fleet.settings import PlaneAddress, plane_address

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from paddock.fleet.models import Instance

logger = logging.getLogger(__name__)

EXIT_SECONDS = 5.0


class Leases:
    """Instances that are open, and runs that may hold one nobody knows the name of."""

    def __init__(self) -> None:
        self.run_id = f"paddock-{uuid.uuid4().hex}"
        self.open: dict[tuple[PlaneAddress, str], None] = {}
        self.abandoned: set[tuple[PlaneAddress, str]] = set()
        """Open instances whose owner was forgotten."""
        self.unsure: set[PlaneAddress] = set()
        """Planes where a create of this process's own run was left without an answer."""
        self.creating: dict[int, PlaneAddress] = {}
        self.lock = threading.Lock()
        self._next = 0

    def begin_create(self, address: PlaneAddress, run: str) -> int:
        with self.lock:
            self._next += 1
            if run == self.run_id:
                self.creating[self._next] = address
            return self._next

    def end_create(self, number: int, *, unsure: bool) -> None:
        with self.lock:
            address = self.creating.pop(number, None)
            if unsure and address is not None:
                self.unsure.add(address)

    def opened(self, address: PlaneAddress, instance_id: str) -> None:
        with self.lock:
            self.open[address, instance_id] = None

    def closed(self, address: PlaneAddress, instance_id: str) -> None:
        with self.lock:
            self.open.pop((address, instance_id), None)

    def abandon(self, address: PlaneAddress, instance_id: str) -> None:
        # Called by the garbage collector, wherever it strikes: taking the lock here could wait for itself.
        self.abandoned.add((address, instance_id))

    def take_abandoned(self, address: PlaneAddress) -> list[str]:
        """The abandoned instances of one plane; they are the caller's from now on."""
        found = [key for key in tuple(self.abandoned) if key[0] == address]
        self.abandoned.difference_update(found)
        return [key[1] for key in found if key in self.open]

    def take(self) -> tuple[list[tuple[PlaneAddress, str]], set[PlaneAddress]]:
        """All that is left to end; it is the caller's from now on."""
        with self.lock:
            left, self.open = list(self.open), {}
            planes = self.unsure | set(self.creating.values())
            self.unsure = set()
            return left, planes


_leases = Leases()
_finishing: set[asyncio.Task[None]] = set()


def run_id() -> str:
    """The run id of this process."""
    return _leases.run_id


def current() -> Leases:
    return _leases


def finish(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Let `work` end by itself, whoever is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    _finishing.add(task)
    task.add_done_callback(_finished)
    return task


def _finished(task: asyncio.Task[None]) -> None:
    _finishing.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("cleaning up: %s", error)


async def finished() -> None:
    """Wait for what ends by itself on this loop."""
    loop = asyncio.get_running_loop()
    ours = [task for task in _finishing if task.get_loop() is loop and task is not asyncio.current_task()]
    if ours:
        await asyncio.wait(ours)


async def close_all() -> None:
    """End every instance this process opened and did not close."""
    from paddock.fleet.errors import FleetError
    from paddock.fleet.plane import Plane

    await finished()
    left, planes = _leases.take()
    ends: list[Coroutine[Any, Any, Any]] = [Plane(address).delete(instance_id) for address, instance_id in left]
    ends += [Plane(address).delete_run(_leases.run_id) for address in planes]
    for result in await asyncio.gather(*ends, return_exceptions=True):
        if isinstance(result, FleetError):
            logger.warning("an instance could not be ended: %s", result)
        elif isinstance(result, BaseException):
            raise result


async def sweep(run_id: str, *, api_key: str | None = None, base_url: str | None = None) -> list[Instance]:
    """End all instances of a run, such as one whose process was killed, and say which."""
    from paddock.fleet.plane import Plane

    return await Plane(plane_address(api_key, base_url)).delete_run(run_id)


def _at_exit() -> None:
    left, planes = _leases.take()
    for address, instance_id in left:
        if address not in planes:
            _delete(address, f"/v1/env/instances/{urllib.parse.quote(instance_id)}")
    for address in planes:
        _delete(address, f"/v1/env/instances/batch?run_id={_leases.run_id}")


def _delete(address: PlaneAddress, path: str) -> None:
    # At exit there is no loop and no thread may be started: one plain request has to do.
    request = urllib.request.Request(f"{address.base_url}{path}", method="DELETE", headers=address.headers)
    try:
        urllib.request.urlopen(request, timeout=EXIT_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError as error:
        logger.warning("leaving %s%s to its time to live: %s", address.base_url, path, type(error).__name__)


def _in_child() -> None:
    # What the parent opened is the parent's to close.
    global _leases
    _leases = Leases()
    _finishing.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
