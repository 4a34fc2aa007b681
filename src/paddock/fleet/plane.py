"""The control plane's endpoints, each as one method that retries what may be retried within one budget.

Knows nothing of rollouts. A create is named by its `X-Request-ID`, so repeating it never makes a second instance.
"""

from __future__ import annotations

import asyncio
import time
import uuid
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.fleet import leases
from paddock.fleet.errors import FleetError, InstanceGone, PlaneError, ProtocolError, ProvisioningFailed
from paddock.fleet.http import Reply, send
from paddock.fleet.models import Instance, read_instance
from paddock.fleet.retry import Backoff, Budget, Failure, retried

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paddock.fleet.settings import PlaneAddress

CREATES_AT_ONCE = 64
"""Further creates wait here, first come first served, instead of in a queue of the plane that times out."""
ANSWER_MARGIN = 30
"""The plane is asked to answer this many seconds before we stop listening."""
LONGEST_CREATE_WAIT = 3600
POLL_SECONDS = 0.25
LONGEST_POLL_SECONDS = 2.0
ORPHAN_SECONDS = 120.0
"""How long a create that nobody waits for any more may take to answer, so that its instance can be ended."""
GET_SECONDS = 10.0
ASK_SECONDS = 3.0
"""For a question that is asked only to decide on a retry."""
DELETE_SECONDS = 20.0
GONE_STATUSES = frozenset((400, 404, 409, 410))
"""Answers to a DELETE that mean there is nothing left to end."""

_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]]
_gates = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class InstanceWish:
    """What instance to make."""

    env_key: str
    data_key: str | None = None
    data_version: str | None = None
    image_type: str | None = None
    region: str | None = None
    ttl_seconds: int | None = None
    env_variables: dict[str, Any] | None = None
    heartbeat_interval: int | None = None
    run_id: str = field(default_factory=leases.run_id)

    def body(self) -> dict[str, Any]:
        key, _, version = self.env_key.partition(":")
        data_key, _, data_version = (self.data_key or "").partition(":")
        wished = {
            "env_key": key,
            "env_version": _versioned(version),
            "data_key": data_key or None,
            "data_version": _versioned(self.data_version or data_version) if data_key else None,
            "region": self.region,
            "env_variables": self.env_variables,
            "image_type": self.image_type if self.image_type == "mcp" else None,
            "ttl_seconds": self.ttl_seconds,
            "heartbeat_interval": self.heartbeat_interval,
            "run_id": self.run_id,
            "created_from": "sdk",
        }
        return {name: value for name, value in wished.items() if value is not None}


def _versioned(version: str) -> str | None:
    return f"v{version}" if version[:1].isdigit() else version or None


class Plane:
    """One control plane and the key to it."""

    def __init__(self, address: PlaneAddress, *, backoff: Backoff | None = None) -> None:
        self.address = address
        self.backoff = backoff or Backoff()
        self._runner_token: str | None = None
        self._runner_token_known = False

    # -- instances ------------------------------------------------------------------------------------

    async def create(
        self, wish: InstanceWish, *, seconds: float, told: Callable[[Failure], Awaitable[None]] | None = None
    ) -> tuple[Instance, float]:
        """A running instance, and how long it waited for its turn. Raises ProvisioningFailed.

        A cancelled caller is cancelled at once; the instance that may come of its request is ended when it comes.
        """
        budget = Budget(seconds)
        began = time.monotonic()
        gate = self._gate()
        await gate.acquire()
        queued = time.monotonic() - began
        # The create goes on by itself when its caller leaves, so that what it makes can be ended.
        left = asyncio.Event()
        work = asyncio.ensure_future(self._create(wish, budget, left, told))
        work.add_done_callback(lambda _: gate.release())
        try:
            return await asyncio.shield(work), queued
        except asyncio.CancelledError:
            left.set()
            if not work.cancelled():
                leases.finish(self._end_orphan(work))
            raise

    async def _end_orphan(self, work: asyncio.Future[Instance]) -> None:
        try:
            instance = await asyncio.wait_for(work, ORPHAN_SECONDS)
        except (FleetError, TimeoutError):
            return
        await self.delete(instance.instance_id)

    async def _create(
        self,
        wish: InstanceWish,
        budget: Budget,
        left: asyncio.Event,
        told: Callable[[Failure], Awaitable[None]] | None,
    ) -> Instance:
        body = wish.body()
        names = _RequestName()
        attempts = Backoff(first=0.5, longest=8.0, attempts=self.backoff.attempts)

        async def attempt() -> Instance:
            body["max_wait_seconds"] = int(min(max(budget.left - ANSWER_MARGIN, 0), LONGEST_CREATE_WAIT))
            instance = await self._create_once(body, names, budget)
            if instance.has_ended:
                names.renew()
                raise _Stillborn(f"instance {instance.instance_id} came up with status {instance.status!r}")
            if instance.urls is None:
                raise ProtocolError(f"instance {instance.instance_id} has no addresses")
            return instance

        held = leases.current()
        for forgotten in held.take_abandoned(self.address):
            leases.finish(self.delete(forgotten))
        number = held.begin_create(self.address, wish.run_id)
        try:
            instance = await retried(
                attempt,
                what=f"creating an instance of {wish.env_key}",
                budget=budget,
                backoff=attempts,
                may_retry=lambda error: error.transient and not left.is_set(),
                before_retry=told,
            )
        except FleetError as error:
            held.end_create(number, unsure=error.ran is None)
            failed = ProvisioningFailed(
                f"no instance of {wish.env_key}: {error}", hint=error.hint, attempts=error.data.get("attempts", 1)
            )
            raise failed from error
        except asyncio.CancelledError:
            held.end_create(number, unsure=True)
            raise
        held.end_create(number, unsure=False)
        held.opened(self.address, instance.instance_id)
        return instance

    async def _create_once(self, body: dict[str, Any], names: _RequestName, budget: Budget) -> Instance:
        headers = {"X-Request-ID": names.now}
        try:
            reply = await self._send("POST", "/v1/env/instances", budget.left, body, headers)
        except PlaneError as error:
            duplicate = _duplicate(error)
            if duplicate is None:
                raise
            return await self._wait_running(duplicate, budget)
        instance = read_instance(reply.json())
        return instance if instance.status != "pending" else await self._wait_running(instance.instance_id, budget)

    async def _wait_running(self, instance_id: str, budget: Budget) -> Instance:
        pause = POLL_SECONDS
        while True:
            instance = await self.get(instance_id, seconds=min(GET_SECONDS, budget.left))
            if instance.status != "pending":
                return instance
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, LONGEST_POLL_SECONDS)

    async def get(self, instance_id: str, *, seconds: float = GET_SECONDS) -> Instance:
        """Raises InstanceGone when the plane does not know it."""
        try:
            reply = await self._repeated("GET", f"/v1/env/instances/{instance_id}", seconds)
        except PlaneError as error:
            if error.status == 404:
                raise InstanceGone(f"instance {instance_id} is not known to the control plane") from error
            raise
        return read_instance(reply.json())

    async def is_gone(self, instance_id: str) -> bool | None:
        """Whether the instance has ended; None when the plane does not say so at once."""
        try:
            reply = await self._send("GET", f"/v1/env/instances/{instance_id}", ASK_SECONDS)
            return read_instance(reply.json()).has_ended
        except FleetError as error:
            return True if isinstance(error, PlaneError) and error.status == 404 else None

    async def delete(self, instance_id: str) -> None:
        """End an instance. One that has ended already is as good."""
        try:
            name = {"X-Request-ID": str(uuid.uuid4())}
            await self._repeated("DELETE", f"/v1/env/instances/{instance_id}", DELETE_SECONDS, headers=name)
        except PlaneError as error:
            if error.status not in GONE_STATUSES:
                raise
        leases.current().closed(self.address, instance_id)

    async def delete_run(self, run_id: str) -> list[Instance]:
        """End all instances of a run."""
        reply = await self._repeated("DELETE", "/v1/env/instances/batch", DELETE_SECONDS, params={"run_id": run_id})
        return [read_instance(member) for member in reply.json()]

    async def heartbeat(self, instance_id: str, *, seconds: float = GET_SECONDS) -> None:
        await self._repeated("POST", f"/v1/env/instances/{instance_id}/heartbeat", seconds, {})

    async def runner_token(self) -> str | None:
        """What opens the instance plane, where it is gated."""
        if not self._runner_token_known:
            try:
                document = (await self._send("GET", "/v1/runner-auth/token", GET_SECONDS)).json()
            except PlaneError as error:
                if error.transient:
                    return None
                document = None
            except FleetError:
                return None
            token = document.get("token") if isinstance(document, dict) else None
            self._runner_token = token if isinstance(token, str) else None
            self._runner_token_known = True
        return self._runner_token

    # -- verifiers and traces -------------------------------------------------------------------------

    async def execute_verifier(self, body: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        """Run a verifier. Repeated under one name, which the plane answers from its memory."""
        headers = {"X-Request-ID": str(uuid.uuid4())}
        path = "/v1/verifiers/execute"
        document = (await self._repeated("POST", path, seconds, body, headers, failure_is_data=True)).json()
        if not isinstance(document, dict) or not isinstance(document.get("success"), bool):
            raise ProtocolError("the control plane answered a verifier run without saying whether it succeeded")
        return document

    async def post(self, path: str, body: dict[str, Any], *, seconds: float) -> Any:
        """Any other POST, sent once under a name of its own."""
        return (await self._send("POST", path, seconds, body, {"X-Request-ID": str(uuid.uuid4())})).json()

    async def get_json(self, path: str, *, seconds: float) -> Any:
        """Any other GET, repeated when it fails in passing."""
        return (await self._repeated("GET", path, seconds)).json()

    # -- the wire -------------------------------------------------------------------------------------

    async def _repeated(
        self,
        method: str,
        path: str,
        seconds: float,
        document: Any = None,
        headers: dict[str, str] | None = None,
        params: dict[str, str] | None = None,
        *,
        failure_is_data: bool = False,
    ) -> Reply:
        return await retried(
            lambda: self._send(method, path, seconds, document, headers, params, failure_is_data=failure_is_data),
            what=f"{method} {path}",
            budget=Budget(seconds),
            backoff=self.backoff,
            may_retry=lambda error: error.transient,
        )

    async def _send(
        self,
        method: str,
        path: str,
        seconds: float,
        document: Any = None,
        headers: dict[str, str] | None = None,
        params: dict[str, str] | None = None,
        *,
        failure_is_data: bool = False,
    ) -> Reply:
        return await send(
            method,
            f"{self.address.base_url}{path}",
            timeout=seconds,
            document=document,
            headers=self.address.headers | (headers or {}),
            params=params,
            failure_is_data=failure_is_data,
        )

    def _gate(self) -> asyncio.Semaphore:
        gates = _gates.setdefault(asyncio.get_running_loop(), {})
        return gates.setdefault(self.address.base_url, asyncio.Semaphore(CREATES_AT_ONCE))


class _RequestName:
    """The `X-Request-ID` of a create: the same as long as the same instance is meant."""

    def __init__(self) -> None:
        self.now = str(uuid.uuid4())

    def renew(self) -> None:
        self.now = str(uuid.uuid4())


class _Stillborn(FleetError):
    """The instance ended before it ran: another one may do better."""

    transient = True


def _duplicate(error: PlaneError) -> str | None:
    """The instance that an earlier try of the same create made."""
    if error.status != 409 or not isinstance(error.detail, dict):
        return None
    found = error.detail.get("instance_id")
    return found if error.detail.get("error") == "duplicate_request_id" and isinstance(found, str) else None
