"""Ending what processes left that were killed: their journals say what, the plane says whether it is still there."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from paddock.fleet.errors import FleetError
from paddock.fleet.journal import dead_journals, written_instances
from paddock.fleet.retry import Backoff

if TYPE_CHECKING:
    from paddock.fleet.journal import Record
    from paddock.fleet.plane import Plane
    from paddock.fleet.settings import PlaneAddress

logger = logging.getLogger(__name__)

PAUSES = Backoff(first=2.0, longest=60.0)
ATTEMPT_SECONDS = 10.0


async def recover_in_background(address: PlaneAddress) -> None:
    """End what dead processes left at this plane. A plane that cannot be reached is asked again later."""
    attempt = 0
    while True:
        try:
            ended, failures = await recover(address)
        except OSError as error:
            logger.warning("the leases of ended processes cannot be read: %s", error)
            return
        if ended:
            logger.warning("ended %d instances that processes left which were killed", len(ended))
        if not failures:
            return
        attempt += 1
        await asyncio.sleep(PAUSES.pause(attempt))


async def recover(address: PlaneAddress) -> tuple[list[str], list[FleetError]]:
    """End what dead processes left at this plane, once: the instances ended, and why other leases are still open."""
    from paddock.fleet.plane import Plane

    plane, ended, failures = Plane(address), list[str](), list[FleetError]()
    with dead_journals() as journals:
        work = [(journal, record) for journal in journals for record in list(journal.records.values())]
        work = [(journal, record) for journal, record in work if record.belongs_to(address)]
        results = await asyncio.gather(*(_end(plane, record) for _, record in work), return_exceptions=True)
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
    """Strike out the leases of a run that was ended as a whole, in the journals of dead processes.

    A create without an answer stays: it may still make an instance after the run was ended.
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


async def _end(plane: Plane, record: Record) -> list[str]:
    """End what a lease stands for; the ids of what was ended. Raises FleetError while that is not certain."""
    if record.instance is not None:
        return await _delete(plane, [record.instance])
    listed = await plane.list_run(record.run, seconds=ATTEMPT_SECONDS)
    ours = [each for each in listed if each.request_id == record.request]
    if ours:
        return await _delete(plane, [each.instance_id for each in ours if not each.has_ended])
    ended: list[str] = []
    if record.is_own_run:
        # The process that made up this run id is dead: what nobody else has written down was its own.
        owned = written_instances(plane.address)
        orphans = [each.instance_id for each in listed if not each.has_ended and each.instance_id not in owned]
        ended = await _delete(plane, orphans)
    # What the list does not show may still come: only the create itself, sent again, settles it.
    made = await plane.repeat_create(record.env_key, record.run, record.request, seconds=ATTEMPT_SECONDS)
    return ended if made is None or made in ended else ended + await _delete(plane, [made])


async def _delete(plane: Plane, instance_ids: list[str]) -> list[str]:
    for instance_id in instance_ids:
        await plane.delete_once(instance_id, seconds=ATTEMPT_SECONDS)
    return instance_ids
