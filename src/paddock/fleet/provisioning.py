"""Make an instance, and tell of every try."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from paddock.fleet.errors import FleetError
from paddock.fleet.events import MakeFailed, MakeRetry, MakeWaiting, ProvisioningCompleted
from paddock.fleet.handle import InstanceHandle

if TYPE_CHECKING:
    from paddock.fleet.events import TaskContext
    from paddock.fleet.plane import InstanceWish, Plane
    from paddock.fleet.retry import Failure
    from paddock.telemetry.bus import Bus

logger = logging.getLogger(__name__)


async def provision(
    plane: Plane, wish: InstanceWish, *, seconds: float, limit_seconds: float, context: TaskContext, bus: Bus
) -> InstanceHandle:
    """A running instance. Raises ProvisioningFailed."""

    async def told(failure: Failure) -> None:
        logger.warning(
            "[%s] create failed (try %d), again in %.1f s: %s", context.label, failure.attempt, failure.pause,
            failure.error,
        )  # fmt: skip
        bus.emit(
            MakeRetry(
                context=context,
                error_type=type(failure.error).__name__,
                error_message=str(failure.error),
                attempt=failure.attempt,
                retry_delay_s=failure.pause,
            )
        )

    def waiting(ahead: int, waited: float) -> None:
        logger.warning(
            "[%s] the plane runs as many instances as it may: waiting for a place (%d ahead, %.0f s so far)",
            context.label,
            ahead,
            waited,
        )
        bus.emit(MakeWaiting(context=context, ahead=ahead, waited_s=round(waited, 1)))

    began = time.monotonic()
    try:
        instance, queued = await plane.create(
            wish, seconds=seconds, told=told, limit_seconds=limit_seconds, waiting=waiting
        )
    except FleetError as error:
        bus.emit(
            MakeFailed(
                context=context,
                error_type=type(error.__cause__ or error).__name__,
                error_message=str(error),
                attempt=int(error.data.get("attempts", 1)),
            )
        )
        raise
    took = time.monotonic() - began
    logger.info("[%s] instance %s is ready after %.1f s", context.label, instance.instance_id, took)
    bus.emit(
        ProvisioningCompleted(
            context=context,
            provisioning_time_s=round(took, 3),
            queue_time_s=round(queued, 3),
            instance_id=instance.instance_id,
        )
    )
    return InstanceHandle(plane, instance, ttl_seconds=wish.ttl_seconds, context=context)
