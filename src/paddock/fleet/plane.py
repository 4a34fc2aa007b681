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
from paddock.fleet.errors import (
    FleetError,
    InstanceGone,
    InstanceLimit,
    PlaneError,
    ProtocolError,
    ProvisioningFailed,
    RequestRefused,
)
from paddock.fleet.http import Reply, send
from paddock.fleet.models import ALIVE, Instance, read_instance
from paddock.fleet.retry import Backoff, Budget, Failure, retried
from paddock.fleet.turns import Ticket

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paddock.fleet.leases import Lease
    from paddock.fleet.settings import PlaneAddress

CREATES_AT_ONCE = 64
"""Further creates wait here, first come first served, instead of in a queue of the plane that times out."""
ANSWER_MARGIN = 30
"""The plane is asked to answer this many seconds before we stop listening."""
LONGEST_CREATE_WAIT = 3600
POLL_SECONDS = 0.25
LONGEST_POLL_SECONDS = 2.0
ORPHAN_SECONDS = 120.0
"""How long a create that nobody waits for any more may take to answer."""
LIMIT_SECONDS = 3600.0
"""How long a create waits for its turn while the team runs as many instances as it may."""
REPEATED_TTL = 60
"""Seconds to live for what a repeated create makes: it is ended at once anyway."""
GET_SECONDS = 10.0
ASK_SECONDS = 3.0
"""For a question that is asked only to decide on a retry."""
DELETE_SECONDS = 20.0
GONE_STATUSES = frozenset((404, 410))
"""Answers to a DELETE that mean there is nothing left to end."""
INVALID_STATUSES = frozenset((400, 422))
"""Answers to a create that mean it is not a valid one."""
PERHAPS_GONE_STATUSES = frozenset((400, 409))
"""Answers to a DELETE that mean it if the plane, asked for the instance, says so too."""

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
        self,
        wish: InstanceWish,
        *,
        seconds: float,
        told: Callable[[Failure], Awaitable[None]] | None = None,
        limit_seconds: float = LIMIT_SECONDS,
        waiting: Callable[[int, float], None] | None = None,
    ) -> tuple[Instance, float]:
        """A running instance, and how long it waited for its turn. Raises ProvisioningFailed.

        `seconds` is the time for the create itself. A plane that runs as many instances as it may is waited for, up
        to `limit_seconds`, in the order of arrival; `waiting` is told how many are ahead, and since when.
        A cancelled caller is cancelled at once; the instance that may come of its request is ended in the background.
        """
        began = turn = time.monotonic()
        ticket = Ticket(self.address)
        failed: ProvisioningFailed | None = None
        try:
            while await ticket.wait(limit_seconds - (time.monotonic() - began), waiting):
                turn = time.monotonic()
                try:
                    instance, queued = await self._create_when_allowed(wish, seconds, told)
                    return instance, turn - began + queued
                except ProvisioningFailed as error:
                    if not isinstance(error.__cause__, InstanceLimit):
                        raise
                    failed = error
                    ticket.refused()
        finally:
            ticket.leave()
        waited = time.monotonic() - began
        message = f"no instance of {wish.env_key}: no place became free within {waited:.0f} s"
        raise ProvisioningFailed(
            message, hint="end instances (paddock fleet ls), raise the limit, or wait longer (limit_wait_s)"
        ) from (failed.__cause__ if failed is not None else None)

    async def _create_when_allowed(
        self, wish: InstanceWish, seconds: float, told: Callable[[Failure], Awaitable[None]] | None
    ) -> tuple[Instance, float]:
        began = time.monotonic()
        gate = self._gate()
        await gate.acquire()
        queued = time.monotonic() - began
        held = leases.current()
        try:
            lease = held.begin(self.address, wish.run_id, wish.env_key)
        except BaseException:
            gate.release()
            raise
        # The create goes on by itself when its caller leaves, so that its answer says what is to be ended.
        left = asyncio.Event()
        work = asyncio.ensure_future(self._create(wish, lease, Budget(seconds), left, told))
        work.add_done_callback(lambda _: gate.release())
        try:
            return await asyncio.shield(work), queued
        except asyncio.CancelledError:
            left.set()
            held.end(lease)
            if not work.done():
                work.add_done_callback(lambda done: done.cancelled() or done.exception())
                asyncio.get_running_loop().call_later(ORPHAN_SECONDS, work.cancel)
            raise

    async def _create(
        self,
        wish: InstanceWish,
        lease: Lease,
        budget: Budget,
        left: asyncio.Event,
        told: Callable[[Failure], Awaitable[None]] | None,
    ) -> Instance:
        body, held = wish.body(), leases.current()
        attempts = Backoff(first=0.5, longest=8.0, attempts=self.backoff.attempts)
        lost = False

        async def attempt() -> Instance:
            nonlocal lost
            body["max_wait_seconds"] = int(min(max(budget.left - ANSWER_MARGIN, 0), LONGEST_CREATE_WAIT))
            # Until a try is known to have been refused, it may have made an instance.
            was_lost, lost = lost, True
            try:
                instance = await self._create_once(body, lease, budget)
            except FleetError as error:
                lost = was_lost or error.ran is not False
                raise
            lost = False
            if instance.has_ended:
                held.rename(lease)
                raise _Stillborn(f"instance {instance.instance_id} came up with status {instance.status!r}")
            if instance.urls is None:
                raise ProtocolError(f"instance {instance.instance_id} has no addresses")
            return instance

        try:
            instance = await retried(
                attempt,
                what=f"creating an instance of {wish.env_key}",
                budget=budget,
                backoff=attempts,
                may_retry=lambda error: (
                    error.transient and not isinstance(error, InstanceLimit) and not left.is_set()
                ),
                before_retry=told,
                # A plane that says why it does not make one now is asked for as long as the budget lasts.
                counts=lambda error: not (isinstance(error, PlaneError | RequestRefused) and error.ran is False),
            )
        except FleetError as error:
            lease.is_in_flight = False
            if not lost and lease.instance_id is None:
                held.finish(lease)
            else:
                held.end(lease)
            failed = ProvisioningFailed(
                f"no instance of {wish.env_key}: {error}", hint=error.hint, attempts=error.data.get("attempts", 1)
            )
            raise failed from error
        except asyncio.CancelledError:
            lease.is_in_flight = False
            held.end(lease)
            raise
        held.hold(lease)
        return instance

    async def _create_once(self, body: dict[str, Any], lease: Lease, budget: Budget) -> Instance:
        headers = {"X-Request-ID": lease.request_id}
        try:
            reply = await self._send("POST", "/v1/env/instances", budget.left, body, headers)
        except PlaneError as error:
            duplicate = _duplicate(error)
            if duplicate is None:
                raise
            leases.current().name(lease, duplicate)
            return await self._wait_running(duplicate, budget)
        instance = read_instance(reply.json())
        leases.current().name(lease, instance.instance_id)
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
        """End an instance, with retries. One that has ended already is as good. Raises FleetError."""
        name = str(uuid.uuid4())
        await retried(
            lambda: self.delete_once(instance_id, seconds=DELETE_SECONDS, name=name),
            what=f"DELETE {instance_id}",
            budget=Budget(DELETE_SECONDS),
            backoff=self.backoff,
            may_retry=lambda error: error.transient,
        )
        lease = leases.current().find(self.address, instance_id)
        if lease is not None:
            leases.current().finish(lease)

    async def delete_once(self, instance_id: str, *, seconds: float, name: str | None = None) -> None:
        """One try to end an instance. Returns when the plane confirms that it is gone; raises FleetError if not."""
        path, headers = f"/v1/env/instances/{instance_id}", {"X-Request-ID": name or str(uuid.uuid4())}
        try:
            reply = await self._send("DELETE", path, seconds, headers=headers)
        except PlaneError as error:
            if error.status in GONE_STATUSES:
                return
            perhaps = error.status in PERHAPS_GONE_STATUSES and not error.transient
            if perhaps and await self.is_gone(instance_id):
                return
            raise
        document = reply.json() if reply.body.strip() else None
        status = document.get("status") if isinstance(document, dict) else None
        if status in ALIVE and not await self.is_gone(instance_id):
            raise _StillAlive(f"instance {instance_id} is {status} after it was deleted")

    async def delete_run(self, run_id: str) -> list[Instance]:
        """End all instances of a run."""
        reply = await self._repeated("DELETE", "/v1/env/instances/batch", DELETE_SECONDS, params={"run_id": run_id})
        return _instances(reply.json())

    async def list_run(self, run_id: str, *, seconds: float = GET_SECONDS) -> list[Instance]:
        """All instances of a run, asked for once."""
        reply = await self._send("GET", "/v1/env/instances", seconds, params={"run_id": run_id})
        return _instances(reply.json())

    async def repeat_create(self, env_key: str, run_id: str, request_id: str, *, seconds: float) -> str | None:
        """The id of the instance that an earlier create under this request id made.

        If it made none, one is made now, with a short time to live: end it. The earlier create then makes none,
        however late it arrives. None if the plane refuses such a create. Raises FleetError if neither is certain.
        """
        wish = InstanceWish(env_key=env_key, ttl_seconds=REPEATED_TTL, run_id=run_id)
        body = {**wish.body(), "max_wait_seconds": 0}
        try:
            reply = await self._send("POST", "/v1/env/instances", seconds, body, {"X-Request-ID": request_id})
        except (PlaneError, RequestRefused) as error:
            duplicate = _duplicate(error) if isinstance(error, PlaneError) else None
            if duplicate is None and not _refused_for_good(error):
                raise
            return duplicate
        return read_instance(reply.json()).instance_id

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


class _Stillborn(FleetError):
    """The instance ended before it ran: another one may do better."""

    transient = True


class _StillAlive(FleetError):
    """The plane took a DELETE, and the instance lives."""

    transient = True


def _instances(document: Any) -> list[Instance]:
    if not isinstance(document, list):
        raise ProtocolError("the control plane answered with something that is not a list of instances")
    return [read_instance(member) for member in document]


def _refused_for_good(error: PlaneError | RequestRefused) -> bool:
    """Whether the plane said that it will not make this instance, now or later."""
    if isinstance(error, InstanceLimit) or error.transient:
        return False
    return isinstance(error, RequestRefused) or error.status in INVALID_STATUSES


def _duplicate(error: PlaneError) -> str | None:
    """The instance that an earlier try of the same create made."""
    if error.status != 409 or not isinstance(error.detail, dict):
        return None
    found = error.detail.get("instance_id")
    return found if error.detail.get("error") == "duplicate_request_id" and isinstance(found, str) else None
