"""The handle of one instance: its time to live, whether it still exists, its one end, and the calls of the SDK.

A trainer that verifies by hand passes `orchestrator._fleet_env` to the SDK's `Task.verify_detailed_async`. The SDK
uses three names of it: `instance_id`, `check_bundle_exists`, `execute_verifier_remote`. A test runs the real SDK.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import time
import weakref
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from paddock.fleet.client import leases
from paddock.fleet.client.errors import FleetError, VerifierInvalid
from paddock.fleet.client.events import CloseFailed
from paddock.fleet.client.grading import REGION, VERIFIER_SECONDS
from paddock.telemetry.bus import Bus
from paddock.telemetry.bus import bus as process_bus

if TYPE_CHECKING:
    from paddock.fleet.client.events import TaskContext
    from paddock.fleet.client.models import Instance
    from paddock.fleet.client.plane_client import PlaneClient

logger = logging.getLogger(__name__)

CHECK_SECONDS = 30.0
OVERHEAD_SECONDS = 30.0
"""What a run may take beyond the verifier's own time, to start it and to answer."""


@dataclass(frozen=True, slots=True)
class VerifierAnswer:
    """The plane's answer about a verifier, with the field names of the SDK's responses."""

    success: bool
    result: Any = None
    error: dict[str, Any] | None = None
    stdout: str | None = None
    execution_id: str | None = None
    execution_time_ms: int | None = None
    bundle_cache_hit: bool | None = None
    verifier_id: str | None = None
    key: str | None = None
    version: int | None = None
    display_src: str | None = None
    created_at: str | None = None
    comment: str | None = None

    @classmethod
    def read(cls, document: dict[str, Any]) -> VerifierAnswer:
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in document.items() if name in names})


class InstanceHandle:
    """One instance, created by this process or by another one."""

    def __init__(
        self, plane: PlaneClient, instance: Instance, *, ttl_seconds: float | None, context: TaskContext
    ) -> None:
        self.plane = plane
        self.data = instance
        self.instance_id = instance.instance_id
        self.context = context
        self.ttl_seconds = ttl_seconds
        self.created_at = time.monotonic()
        self._registry = leases.current()
        self._lease = self._registry.find(plane.address, self.instance_id)
        self._is_closed = False
        self._finalizer: weakref.finalize[..., InstanceHandle] | None = None
        if self._lease is not None:
            # An instance whose handle is garbage collected without a close is ended in the background.
            self._finalizer = weakref.finalize(self, self._registry.release_unlocked, self._lease)
            self._finalizer.atexit = False

    @property
    def seconds_left(self) -> float | None:
        """The rest of its time to live; None when it has none."""
        if self.ttl_seconds is None:
            return None
        return self.ttl_seconds - (time.monotonic() - self.created_at)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def instance(self) -> Self:
        return self

    async def load(self) -> None:
        """For the SDK. Databases are opened on use, so there is nothing to load."""

    async def is_gone(self) -> bool:
        """Whether the plane says that it has ended. False when the plane does not answer."""
        return await self.plane.is_gone(self.instance_id) is True

    async def close(self, bus: Bus = process_bus) -> None:
        """End the instance, once, however often and from whichever thread this is called.

        Waits for the plane's confirmation, at most `leases.GRACE_SECONDS`; a caller that is being cancelled does not
        wait. Afterwards the background deleter goes on.
        """
        is_first, self._is_closed = not self._is_closed, True
        if self._registry is not leases.current():
            return  # A forked child: the parent ends the instance.
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._lease is None:
            await self._delete(bus)
            return
        self._registry.release(self._lease)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return
        unconfirmed = await leases.wait_gone([self._lease], self._lease.grace_seconds_left)
        if unconfirmed and is_first:
            self._report(bus, "FleetTimeout", f"{self._lease.error or 'no answer'}; retried in the background")

    async def _delete(self, bus: Bus) -> None:
        """For an instance that another process created."""
        try:
            await self.plane.delete(self.instance_id)
        except FleetError as error:
            self._report(bus, type(error).__name__, str(error))

    def _report(self, bus: Bus, error_type: str, message: str) -> None:
        logger.warning("[%s] instance %s is not ended yet: %s", self.context.label, self.instance_id, message)
        bus.emit(
            CloseFailed(
                context=self.context, error_type=error_type, error_message=message, instance_id=self.instance_id
            )
        )

    # -- calls of the SDK's verifiers -----------------------------------------------------------------

    async def check_bundle_exists(self, bundle_hash: str) -> VerifierAnswer:
        """Whether the plane has the bundle of that SHA-256."""
        path = f"/v1/verifiers/check?sha256={bundle_hash}"
        document = await self.plane.get_json(path, seconds=CHECK_SECONDS)
        return VerifierAnswer.read({"success": False, **(document if isinstance(document, dict) else {})})

    async def execute_verifier_remote(
        self,
        bundle_data: bytes,
        bundle_sha: str,
        key: str,
        function_name: str,
        args: tuple[Any, ...],
        args_array: list[Any],
        kwargs: dict[str, Any],
        timeout: int | None = VERIFIER_SECONDS,
        needs_upload: bool = True,
        verifier_runtime_version: str | None = None,
    ) -> VerifierAnswer:
        """Run a verifier at the plane. Raises VerifierInvalid if an argument is not plain data."""
        try:
            # The first argument is a placeholder for the environment, which the plane replaces.
            packed = pickle.dumps({"args": (None, *args), "kwargs": kwargs}, protocol=4)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise VerifierInvalid(f"an argument of the verifier cannot be sent: {error}") from error
        seconds = VERIFIER_SECONDS if timeout is None else timeout
        body: dict[str, Any] = {
            "key": key,
            "sha256": bundle_sha,
            "args": base64.b64encode(packed).decode(),
            "args_array": args_array,
            "function_name": function_name,
            "timeout": seconds,
            "region": REGION,
        }
        if needs_upload:
            body["bundle"] = base64.b64encode(bundle_data).decode()
        if verifier_runtime_version:
            body["verifier_runtime_version"] = verifier_runtime_version
        return VerifierAnswer.read(await self.plane.execute_verifier(body, seconds=seconds + OVERHEAD_SECONDS))
