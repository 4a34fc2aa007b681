"""The routes of instances: create, get, list, heartbeat, delete."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import orjson
from starlette.routing import Route

from paddock.fleet.plane import instance_records
from paddock.fleet.plane.database import format_time
from paddock.fleet.plane.http import HttpError, RequestFields, json_response, printable, read_object, read_request_id
from paddock.fleet.plane.instance_records import DuplicateRequest, InstanceRequest, LimitReached
from paddock.fleet.plane.processes import StartFailed

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.fleet.plane.instance_records import InstanceRecord
    from paddock.fleet.plane.plane import Plane
    from paddock.fleet.plane.settings import PlaneSettings

MAX_TTL_SECONDS = 30 * 86_400
MAX_HEARTBEAT_SECONDS = 86_400
MAX_WAIT_SECONDS = 3600
DEFAULT_WAIT_SECONDS = 600
MIN_WAIT_SECONDS = 20.0
"""For `max_wait_seconds` 0, which clients send when they themselves wait 30 s or less."""
MAX_VARIABLES_BYTES = 64 * 1024
IMAGE_TYPES = ("mcp",)


class InstanceRoutes:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane

    def routes(self) -> list[Route]:
        one = "/v1/env/instances/{instance_id}"
        return [
            Route("/v1/env/instances", self.create, methods=["POST"]),
            Route("/v1/env/instances", self.list_all, methods=["GET"]),
            Route("/v1/env/instances/batch", self.delete_batch, methods=["DELETE"]),
            Route(one, self.get, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/heartbeat", self.heartbeat, methods=["POST"]),
            Route("/v1/env/runs", self.runs, methods=["GET"]),
            Route("/v1/runner-auth/token", self.runner_token, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        instance_request = read_request(await read_object(request), self.plane.settings, read_request_id(request))
        try:
            instance = await self.plane.instances.create(instance_request)
        except DuplicateRequest as error:
            existing = error.data["instance_id"]
            message = f"This request has made the instance '{existing}' already. GET it instead."
            raise HttpError(
                409, {"error": "duplicate_request_id", "message": message, "instance_id": existing}
            ) from None
        except LimitReached as error:
            limit, alive = error.data["instance_limit"], error.data["running_instances"]
            message = f"Instance limit reached: {alive} of {limit} live. Close one, or raise the limit of the plane."
            raise HttpError(
                403, {"error_type": "instance_limit_exceeded", "message": message, **error.data}
            ) from None
        except StartFailed as error:
            raise _not_started(instance_request, error) from None
        return self._respond(instance)

    async def get(self, request: Request) -> Response:
        return self._respond(await self._require(request))

    async def list_all(self, request: Request) -> Response:
        query = RequestFields(dict(request.query_params))
        status = query.choice("status", instance_records.STATUSES)
        if query.text("profile_id") not in (None, self.plane.settings.profile_id):
            return json_response([])
        records = await self.plane.database.run(
            instance_records.select, status=status, region=query.text("region"), run_id=query.text("run_id")
        )
        return json_response([instance_records.to_json(instance, self.plane.settings) for instance in records])

    async def delete(self, request: Request) -> Response:
        record, request_id = await self._require(request), read_request_id(request)
        if record.is_alive and await self.plane.instances.stop(record.instance_id, request_id):
            return self._respond(await self._require(request))
        after = await self._require(request)
        if after.is_alive:
            raise HttpError(503, "The instance is being made at this moment.", retry_after=1)
        if request_id is not None and after.stop_request_id == request_id:
            # The same request again: its first response was lost.
            return self._respond(after)
        raise HttpError(
            400, f"Instance already terminated: '{after.instance_id}' is {after.status} ({after.reason})."
        )

    async def delete_batch(self, request: Request) -> Response:
        query = RequestFields(dict(request.query_params))
        run_id, profile_id = query.text("run_id"), query.text("profile_id")
        if not run_id and not profile_id:
            raise HttpError(400, "'run_id' is missing. Send it, or 'profile_id' for all of a profile.")
        if profile_id not in (None, self.plane.settings.profile_id):
            return json_response([])
        ended = await self.plane.instances.stop_run(run_id)
        return json_response([instance_records.to_json(instance, self.plane.settings) for instance in ended])

    async def heartbeat(self, request: Request) -> Response:
        fields = await read_object(request, required=False)
        record = await self._require(request)
        running = await self.plane.instances.record_heartbeat(record.instance_id, fields.label("region"))
        if running is None:
            raise HttpError(
                400, f"Instance '{record.instance_id}' is {record.status}: only a running one has a heartbeat."
            )
        last, interval = running.last_heartbeat, running.heartbeat_interval
        return json_response(
            {
                "success": True,
                "instance_id": running.instance_id,
                "last_heartbeat": None if last is None else format_time(last),
                "deadline_timestamp": None if last is None or interval is None else last + interval,
                "interval_seconds": interval,
            }
        )

    async def runs(self, request: Request) -> Response:
        query = RequestFields(dict(request.query_params))
        active = query.choice("active", ("active", "inactive", "all")) or "active"
        profile_id = self.plane.settings.profile_id
        if query.text("profile_id") not in (None, profile_id):
            return json_response([])
        return json_response(await self.plane.database.run(instance_records.count_runs, active, profile_id))

    async def runner_token(self, request: Request) -> Response:
        token = self.plane.runner_token
        if token is None:
            raise HttpError(404, "The instances of this plane are not gated: there is no runner token.")
        return json_response({"token": token})

    async def _require(self, request: Request) -> InstanceRecord:
        instance_id = request.path_params["instance_id"]
        record = await self.plane.database.run(instance_records.find, instance_id)
        if record is None:
            raise HttpError(404, f"Instance '{printable(instance_id)}' not found.")
        return record

    def _respond(self, instance: InstanceRecord) -> Response:
        return json_response(instance_records.to_json(instance, self.plane.settings))


def read_request(fields: RequestFields, settings: PlaneSettings, request_id: str | None) -> InstanceRequest:
    """The validated body of a create. Raises HttpError, which names the field and what to send."""
    env_key, _, version_in_key = fields.require_text("env_key").partition(":")
    environment = settings.environment(env_key)
    if environment is None:
        hosted = ", ".join(each.env_key for each in settings.environments)
        raise HttpError(400, f"Environment '{printable(env_key)}' not found. This plane hosts {hosted}.")
    requested = fields.text("env_version") or version_in_key or None
    version = environment.find_version(requested)
    if version is None:
        versions = ", ".join(environment.versions)
        raise HttpError(400, f"Version '{printable(requested or '')}' not found for '{env_key}'. It has {versions}.")
    region = fields.label("region") or settings.regions[0]
    if region not in settings.regions:
        raise HttpError(400, f"Region {printable(region)} not supported. Please use {list(settings.regions)}.")
    variables = fields.mapping("env_variables")
    if variables is not None and len(orjson.dumps(variables)) > MAX_VARIABLES_BYTES:
        raise HttpError(400, f"'env_variables' is larger than {MAX_VARIABLES_BYTES // 1024} KiB. Send less.")
    wait = fields.integer("max_wait_seconds", 0, MAX_WAIT_SECONDS)
    return InstanceRequest(
        instance_id=secrets.token_hex(8),
        env_key=env_key,
        version=version,
        region=region,
        ttl_seconds=fields.integer("ttl_seconds", 1, MAX_TTL_SECONDS) or settings.default_ttl_seconds,
        max_wait_seconds=DEFAULT_WAIT_SECONDS if wait is None else wait or MIN_WAIT_SECONDS,
        request_id=request_id,
        data_key=fields.label("data_key"),
        data_version=fields.label("data_version"),
        env_variables=variables,
        image_type=fields.choice("image_type", IMAGE_TYPES),
        run_id=fields.label("run_id"),
        heartbeat_interval=fields.integer("heartbeat_interval", 1, MAX_HEARTBEAT_SECONDS),
    )


def _not_started(request: InstanceRequest, error: StartFailed) -> HttpError:
    """Always a 400: clients repeat a 5xx with the same request id, which belongs to this dead instance.

    Whether a new request may succeed is in the message, in words that other clients look for, and in a flag for ours.
    """
    message = f"Instance '{request.instance_id}' of '{request.env_key}' did not start: {error}"
    if not error.transient:
        return HttpError(400, message)
    return HttpError(400, f'{message}. A new request may succeed ("retryable": true)', retry_after=1)
