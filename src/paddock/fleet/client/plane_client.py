"""The endpoints of the control plane, each as one method. Requests that are safe to repeat are retried.

Knows nothing of rollouts and of leases. A create is identified by its `X-Request-ID`, so repeating it never makes a
second instance.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.fleet.client.errors import (
    FleetError,
    InstanceGone,
    InstanceLimit,
    PlaneError,
    ProtocolError,
    RequestRefused,
)
from paddock.fleet.client.http import FleetReply, retry_request, send
from paddock.fleet.client.models import ALIVE, Instance, read_instance
from paddock.retry import Backoff, Deadline

if TYPE_CHECKING:
    from paddock.fleet.client.settings import PlaneAddress

REPEATED_TTL_SECONDS = 60
"""Time to live of an instance that a repeated create makes: it is ended at once anyway."""
GET_SECONDS = 10.0
STATUS_SECONDS = 3.0
"""For a request whose answer only decides on a retry."""
DELETE_SECONDS = 20.0
GONE_STATUSES = frozenset((404, 410))
"""Statuses of a DELETE that mean that the instance does not exist."""
INVALID_STATUSES = frozenset((400, 422))
"""Statuses of a create that is invalid."""
MAYBE_GONE_STATUSES = frozenset((400, 409))
"""Statuses of a DELETE that need a GET: the instance may have ended, or not."""


@dataclass(frozen=True, slots=True)
class InstanceOptions:
    """Which instance to create."""

    env_key: str
    """`key` or `key:version`."""
    run_id: str
    data_key: str | None = None
    data_version: str | None = None
    image_type: str | None = None
    region: str | None = None
    ttl_seconds: int | None = None
    env_variables: dict[str, Any] | None = None
    heartbeat_interval: int | None = None

    def body(self) -> dict[str, Any]:
        key, _, version = self.env_key.partition(":")
        data_key, _, data_version = (self.data_key or "").partition(":")
        values = {
            "env_key": key,
            "env_version": _add_v(version),
            "data_key": data_key or None,
            "data_version": _add_v(self.data_version or data_version) if data_key else None,
            "region": self.region,
            "env_variables": self.env_variables,
            "image_type": self.image_type if self.image_type == "mcp" else None,
            "ttl_seconds": self.ttl_seconds,
            "heartbeat_interval": self.heartbeat_interval,
            "run_id": self.run_id,
            "created_from": "sdk",
        }
        return {name: value for name, value in values.items() if value is not None}


def _add_v(version: str) -> str | None:
    return f"v{version}" if version[:1].isdigit() else version or None


class PlaneClient:
    """One control plane and its key."""

    def __init__(self, address: PlaneAddress, *, backoff: Backoff | None = None) -> None:
        self.address = address
        self.backoff = backoff or Backoff()
        self._runner_token: str | None = None
        self._has_runner_token = False

    # -- instances ------------------------------------------------------------------------------------

    async def create_once(self, body: dict[str, Any], request_id: str, *, seconds: float) -> Instance:
        """Send a create once. The instance may still be pending. Raises FleetError."""
        reply = await self._send("POST", "/v1/env/instances", seconds, document=body, request_id=request_id)
        return read_instance(reply.json())

    async def get(self, instance_id: str, *, seconds: float = GET_SECONDS) -> Instance:
        """Raises InstanceGone when the plane does not know it."""
        try:
            reply = await self._send("GET", f"/v1/env/instances/{instance_id}", seconds, retry=True)
        except PlaneError as error:
            if error.status == 404:
                raise InstanceGone(f"instance {instance_id} is not known to the control plane") from error
            raise
        return read_instance(reply.json())

    async def is_gone(self, instance_id: str) -> bool | None:
        """Whether the instance has ended; None when the plane does not answer at once."""
        try:
            reply = await self._send("GET", f"/v1/env/instances/{instance_id}", STATUS_SECONDS)
            return read_instance(reply.json()).has_ended
        except FleetError as error:
            return True if isinstance(error, PlaneError) and error.status == 404 else None

    async def delete(self, instance_id: str) -> None:
        """End an instance, with retries. One that has ended already is fine. Raises FleetError."""
        request_id = str(uuid.uuid4())
        await retry_request(
            lambda: self.delete_once(instance_id, seconds=DELETE_SECONDS, request_id=request_id),
            what=f"DELETE {instance_id}",
            deadline=Deadline(DELETE_SECONDS),
            backoff=self.backoff,
            may_retry=lambda error: error.transient,
        )

    async def delete_once(self, instance_id: str, *, seconds: float, request_id: str | None = None) -> None:
        """One attempt to end an instance. Returns when the plane confirms its end; raises FleetError if not."""
        path, request_id = f"/v1/env/instances/{instance_id}", request_id or str(uuid.uuid4())
        try:
            reply = await self._send("DELETE", path, seconds, request_id=request_id)
        except PlaneError as error:
            if error.status in GONE_STATUSES:
                return
            may_be_gone = error.status in MAYBE_GONE_STATUSES and not error.transient
            if may_be_gone and await self.is_gone(instance_id):
                return
            raise
        document = reply.json() if reply.body.strip() else None
        status = document.get("status") if isinstance(document, dict) else None
        if status in ALIVE and not await self.is_gone(instance_id):
            raise _NotDeleted(f"instance {instance_id} is {status} after it was deleted")

    async def delete_run(self, run_id: str) -> list[Instance]:
        """End all instances of a run."""
        reply = await self._send(
            "DELETE", "/v1/env/instances/batch", DELETE_SECONDS, params={"run_id": run_id}, retry=True
        )
        return _instances(reply.json())

    async def list_run(self, run_id: str, *, seconds: float = GET_SECONDS) -> list[Instance]:
        """All instances of a run. Sent once."""
        reply = await self._send("GET", "/v1/env/instances", seconds, params={"run_id": run_id})
        return _instances(reply.json())

    async def repeat_create(self, env_key: str, run_id: str, request_id: str, *, seconds: float) -> str | None:
        """The id of the instance that an earlier create under this request id made.

        If there is none, this request creates one with a short time to live, which the caller has to delete. The
        earlier create then creates none, however late it arrives. None if the plane refuses such a create. Raises
        FleetError if neither is certain.
        """
        options = InstanceOptions(env_key, run_id, ttl_seconds=REPEATED_TTL_SECONDS)
        body = {**options.body(), "max_wait_seconds": 0}
        try:
            return (await self.create_once(body, request_id, seconds=seconds)).instance_id
        except (PlaneError, RequestRefused) as error:
            existing = existing_instance(error) if isinstance(error, PlaneError) else None
            if existing is None and not _is_final_refusal(error):
                raise
            return existing

    async def heartbeat(self, instance_id: str, *, seconds: float = GET_SECONDS) -> None:
        await self._send("POST", f"/v1/env/instances/{instance_id}/heartbeat", seconds, document={}, retry=True)

    async def runner_token(self) -> str | None:
        """The token for the management API of instances; None where there is none."""
        if not self._has_runner_token:
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
            self._has_runner_token = True
        return self._runner_token

    # -- verifiers and traces -------------------------------------------------------------------------

    async def execute_verifier(self, body: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        """Run a verifier. Retries have one request id, so the plane runs it once."""
        reply = await self._send(
            "POST",
            "/v1/verifiers/execute",
            seconds,
            document=body,
            request_id=str(uuid.uuid4()),
            retry=True,
            failure_is_data=True,
        )
        document = reply.json()
        if not isinstance(document, dict) or not isinstance(document.get("success"), bool):
            raise ProtocolError("the control plane answered a verifier run without saying whether it succeeded")
        return document

    async def post(self, path: str, body: dict[str, Any], *, seconds: float) -> Any:
        """Any other POST, sent once."""
        return (await self._send("POST", path, seconds, document=body, request_id=str(uuid.uuid4()))).json()

    async def get_json(self, path: str, *, seconds: float) -> Any:
        """Any other GET, with retries."""
        return (await self._send("GET", path, seconds, retry=True)).json()

    # -- the wire -------------------------------------------------------------------------------------

    async def _send(
        self,
        method: str,
        path: str,
        seconds: float,
        *,
        request_id: str | None = None,
        retry: bool = False,
        **options: Any,
    ) -> FleetReply:
        """One request, or with `retry` up to the first success within `seconds`. `options` are those of `send`."""
        url = f"{self.address.base_url}{path}"
        headers = self.address.headers | ({} if request_id is None else {"X-Request-ID": request_id})

        async def send_once() -> FleetReply:
            return await send(method, url, timeout=seconds, headers=headers, **options)

        if not retry:
            return await send_once()
        return await retry_request(
            send_once,
            what=f"{method} {path}",
            deadline=Deadline(seconds),
            backoff=self.backoff,
            may_retry=lambda error: error.transient,
        )


class _NotDeleted(FleetError):
    """The plane accepted a DELETE, and the instance is still alive."""

    transient = True


def _instances(document: Any) -> list[Instance]:
    if not isinstance(document, list):
        raise ProtocolError("the control plane answered with something that is not a list of instances")
    return [read_instance(member) for member in document]


def _is_final_refusal(error: PlaneError | RequestRefused) -> bool:
    """Whether the plane said that it will not make this instance, now or later."""
    if isinstance(error, InstanceLimit) or error.transient:
        return False
    return isinstance(error, RequestRefused) or error.status in INVALID_STATUSES


def existing_instance(error: PlaneError) -> str | None:
    """The instance that an earlier attempt of the same create made: the error says `duplicate_request_id`."""
    if error.status != 409 or not isinstance(error.detail, dict):
        return None
    instance_id = error.detail.get("instance_id")
    is_duplicate = error.detail.get("error") == "duplicate_request_id" and isinstance(instance_id, str)
    return instance_id if is_duplicate else None
