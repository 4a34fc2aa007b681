"""Creating an instance: wait for a free slot, send the create until it is answered, report every attempt.

The create runs in a task of its own. When its caller is cancelled it goes on, because only its answer says what has
to be deleted; the lease then belongs to the background deleter.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from typing import TYPE_CHECKING

from paddock.fleet.client import leases
from paddock.fleet.client.errors import (
    FleetError,
    InstanceLimit,
    PlaneError,
    ProtocolError,
    ProvisioningFailed,
    RequestRefused,
)
from paddock.fleet.client.events import MakeFailed, MakeRetry, MakeWaiting, ProvisioningCompleted, ambient_context
from paddock.fleet.client.http import retry_request
from paddock.fleet.client.instance_handle import InstanceHandle
from paddock.fleet.client.instance_queue import QueueTicket
from paddock.fleet.client.plane_client import GET_SECONDS, existing_instance
from paddock.retry import Backoff, Deadline
from paddock.telemetry.bus import bus as process_bus

if TYPE_CHECKING:
    from paddock.fleet.client.events import TaskContext
    from paddock.fleet.client.http import FailedRequest
    from paddock.fleet.client.leases import Lease
    from paddock.fleet.client.models import Instance
    from paddock.fleet.client.plane_client import InstanceOptions, PlaneClient
    from paddock.telemetry.bus import Bus

logger = logging.getLogger(__name__)

MAX_PARALLEL_CREATES = 64
"""More creates wait here, in the order of arrival, instead of in a queue of the plane that times out."""
ANSWER_MARGIN_SECONDS = 30
"""The plane has to answer this long before we stop waiting."""
MAX_CREATE_WAIT_SECONDS = 3600
POLL_SECONDS = 0.25
MAX_POLL_SECONDS = 2.0
ORPHAN_SECONDS = 120.0
"""How long a create whose caller was cancelled may take to answer."""
LIMIT_SECONDS = 3600.0
"""How long a create waits for a slot while the plane runs as many instances as it may."""

_semaphores: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]]
_semaphores = weakref.WeakKeyDictionary()


class _EndedEarly(FleetError):
    """The instance ended before it ran: another one may do better."""

    transient = True


class Provisioning:
    """One instance to create. `seconds` limits the create itself, `limit_seconds` the wait for a free slot."""

    def __init__(
        self,
        plane: PlaneClient,
        options: InstanceOptions,
        *,
        seconds: float,
        limit_seconds: float = LIMIT_SECONDS,
        context: TaskContext | None = None,
        bus: Bus = process_bus,
    ) -> None:
        self._plane = plane
        self._options = options
        self._seconds = seconds
        self._limit_seconds = limit_seconds
        self._context = context or ambient_context()
        self._bus = bus
        self._is_abandoned = False
        self._may_exist = False
        """Whether an attempt without an answer may have created an instance."""

    async def run(self) -> InstanceHandle:
        """A running instance. Raises ProvisioningFailed.

        A cancelled caller is cancelled at once; an instance that its request creates is deleted in the background.
        """
        started_at = time.monotonic()
        try:
            instance, queue_seconds = await self._create_in_turn(started_at)
        except FleetError as error:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            attempts = int(error.data.get("attempts", 1))
            self._bus.emit(MakeFailed.of(self._context, cause, message=str(error), attempt=attempts))
            raise
        seconds = time.monotonic() - started_at
        logger.info("[%s] instance %s is ready after %.1f s", self._context.label, instance.instance_id, seconds)
        self._bus.emit(
            ProvisioningCompleted(
                context=self._context,
                provisioning_time_s=round(seconds, 3),
                queue_time_s=round(queue_seconds, 3),
                instance_id=instance.instance_id,
            )
        )
        ttl_seconds = self._options.ttl_seconds
        return InstanceHandle(self._plane, instance, ttl_seconds=ttl_seconds, context=self._context)

    async def _create_in_turn(self, started_at: float) -> tuple[Instance, float]:
        """The instance, and the seconds before its create was sent."""
        ticket = QueueTicket(self._plane.address)
        last_refusal: BaseException | None = None
        try:
            while await ticket.wait(self._limit_seconds - (time.monotonic() - started_at), self._report_waiting):
                try:
                    instance, sent_at = await self._create()
                    return instance, sent_at - started_at
                except ProvisioningFailed as error:
                    if not isinstance(error.__cause__, InstanceLimit):
                        raise
                    last_refusal = error.__cause__
                    ticket.refusals += 1
        finally:
            ticket.leave()
        raise ProvisioningFailed(
            f"no instance of {self._options.env_key}: no place became free within"
            f" {time.monotonic() - started_at:.0f} s",
            hint="end instances (paddock fleet ls), raise the limit, or wait longer (limit_wait_s)",
        ) from last_refusal

    async def _create(self) -> tuple[Instance, float]:
        """The instance, and the time at which its create was sent."""
        semaphore, registry = self._semaphore(), leases.current()
        await semaphore.acquire()
        sent_at = time.monotonic()
        try:
            lease = registry.open(self._plane.address, self._options.run_id, self._options.env_key)
        except BaseException:
            semaphore.release()
            raise
        self._may_exist = False
        task = asyncio.ensure_future(self._create_with_retries(lease))
        task.add_done_callback(lambda _: semaphore.release())
        try:
            return await asyncio.shield(task), sent_at
        except asyncio.CancelledError:
            self._is_abandoned = True
            registry.release(lease)
            if not task.done():
                # Retrieve the exception, which no caller awaits any more.
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
                asyncio.get_running_loop().call_later(ORPHAN_SECONDS, task.cancel)
            raise

    async def _create_with_retries(self, lease: Lease) -> Instance:
        registry, deadline = leases.current(), Deadline(self._seconds)
        try:
            instance = await retry_request(
                lambda: self._attempt(lease, deadline),
                what=f"creating an instance of {self._options.env_key}",
                deadline=deadline,
                backoff=Backoff(first_seconds=0.5, longest_seconds=8.0, attempts=self._plane.backoff.attempts),
                may_retry=self._may_retry,
                before_retry=self._report_retry,
                # A refusal with a reason may be repeated until the deadline; other failures are limited in number.
                counts=lambda error: not (isinstance(error, PlaneError | RequestRefused) and error.ran is False),
            )
        except FleetError as error:
            lease.is_in_flight = False
            if self._may_exist or lease.instance_id is not None:
                registry.release(lease)
            else:
                registry.mark_gone(lease)
            raise ProvisioningFailed(
                f"no instance of {self._options.env_key}: {error}",
                hint=error.hint,
                attempts=error.data.get("attempts", 1),
            ) from error
        except asyncio.CancelledError:
            lease.is_in_flight = False
            registry.release(lease)
            raise
        registry.mark_held(lease)
        return instance

    async def _attempt(self, lease: Lease, deadline: Deadline) -> Instance:
        # Until an attempt is known to have been refused, it may have created an instance.
        may_exist, self._may_exist = self._may_exist, True
        try:
            instance = await self._create_once(lease, deadline)
        except FleetError as error:
            self._may_exist = may_exist or error.ran is not False
            raise
        self._may_exist = False
        if instance.has_ended:
            leases.current().renew_request(lease)
            raise _EndedEarly(f"instance {instance.instance_id} came up with status {instance.status!r}")
        if instance.urls is None:
            raise ProtocolError(f"instance {instance.instance_id} has no addresses")
        return instance

    async def _create_once(self, lease: Lease, deadline: Deadline) -> Instance:
        margin = max(deadline.seconds_left - ANSWER_MARGIN_SECONDS, 0)
        body = {**self._options.body(), "max_wait_seconds": int(min(margin, MAX_CREATE_WAIT_SECONDS))}
        try:
            instance = await self._plane.create_once(body, lease.request_id, seconds=deadline.seconds_left)
        except PlaneError as error:
            existing = existing_instance(error)
            if existing is None:
                raise
            leases.current().set_instance(lease, existing)
            return await self._wait_running(existing, deadline)
        leases.current().set_instance(lease, instance.instance_id)
        is_pending = instance.status == "pending"
        return await self._wait_running(instance.instance_id, deadline) if is_pending else instance

    async def _wait_running(self, instance_id: str, deadline: Deadline) -> Instance:
        pause = POLL_SECONDS
        while True:
            instance = await self._plane.get(instance_id, seconds=min(GET_SECONDS, deadline.seconds_left))
            if instance.status != "pending":
                return instance
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, MAX_POLL_SECONDS)

    def _may_retry(self, error: FleetError) -> bool:
        return error.transient and not isinstance(error, InstanceLimit) and not self._is_abandoned

    def _semaphore(self) -> asyncio.Semaphore:
        by_plane = _semaphores.setdefault(asyncio.get_running_loop(), {})
        return by_plane.setdefault(self._plane.address.base_url, asyncio.Semaphore(MAX_PARALLEL_CREATES))

    # -- events ---------------------------------------------------------------------------------------

    async def _report_retry(self, failed: FailedRequest) -> None:
        logger.warning(
            "[%s] create failed (attempt %d), again in %.1f s: %s",
            self._context.label,
            failed.attempt,
            failed.pause,
            failed.error,
        )
        self._bus.emit(MakeRetry.of_attempt(self._context, failed))

    def _report_waiting(self, ahead: int, seconds: float) -> None:
        logger.warning(
            "[%s] the plane runs as many instances as it may: waiting for a slot (%d ahead, %.0f s so far)",
            self._context.label,
            ahead,
            seconds,
        )
        self._bus.emit(MakeWaiting(context=self._context, ahead=ahead, waited_s=round(seconds, 1)))
