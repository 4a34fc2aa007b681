"""Instances: make, look, list, keep alive, end."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import orjson
from starlette.routing import Route

from paddock.fleet.control import records
from paddock.fleet.control.answers import Fields, Refused, answer, read_object, request_id, shown
from paddock.fleet.control.database import text_of
from paddock.fleet.control.process import StartFailed
from paddock.fleet.control.records import DuplicateRequest, LimitReached, Order

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.fleet.control.plane import Plane
    from paddock.fleet.control.records import Instance
    from paddock.fleet.control.settings import PlaneSettings

LONGEST_TTL = 30 * 86_400
LONGEST_HEARTBEAT = 86_400
LONGEST_WAIT = 3600
USUAL_WAIT = 600
SHORTEST_WAIT = 20.0
"""For `max_wait_seconds` 0, which clients send when they themselves wait 30 s or less."""
MOST_VARIABLES_BYTES = 64 * 1024
IMAGE_TYPES = ("mcp",)


class Instances:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane

    def routes(self) -> list[Route]:
        one = "/v1/env/instances/{instance_id}"
        return [
            Route("/v1/env/instances", self.create, methods=["POST"]),
            Route("/v1/env/instances", self.listed, methods=["GET"]),
            Route("/v1/env/instances/batch", self.delete_batch, methods=["DELETE"]),
            Route(one, self.one, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/heartbeat", self.heartbeat, methods=["POST"]),
            Route("/v1/env/runs", self.runs, methods=["GET"]),
            Route("/v1/runner-auth/token", self.runner_token, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        order = read_order(await read_object(request), self.plane.settings, request_id(request))
        try:
            made = await self.plane.hosting.create(order)
        except DuplicateRequest as error:
            made_before = error.data["instance_id"]
            message = f"This request has made the instance '{made_before}' already. GET it instead."
            raise Refused(
                409, {"error": "duplicate_request_id", "message": message, "instance_id": made_before}
            ) from None
        except LimitReached as error:
            most, alive = error.data["instance_limit"], error.data["running_instances"]
            message = f"Instance limit reached: {alive} of {most} live. Close one, or raise the limit of the plane."
            raise Refused(403, {"error_type": "instance_limit_exceeded", "message": message, **error.data}) from None
        except StartFailed as error:
            raise _not_started(order, error) from None
        return self._answer(made)

    async def one(self, request: Request) -> Response:
        return self._answer(await self._needed(request))

    async def listed(self, request: Request) -> Response:
        asked = Fields(dict(request.query_params))
        status = asked.choice("status", records.STATUSES)
        if asked.text("profile_id") not in (None, self.plane.settings.profile_id):
            return answer([])
        found = await self.plane.database.run(
            records.select, status=status, region=asked.text("region"), run_id=asked.text("run_id")
        )
        return answer([records.on_the_wire(instance, self.plane.settings) for instance in found])

    async def delete(self, request: Request) -> Response:
        found, asked = await self._needed(request), request_id(request)
        if found.is_alive and await self.plane.hosting.stop(found.instance_id, asked):
            return self._answer(await self._needed(request))
        after = await self._needed(request)
        if after.is_alive:
            raise Refused(503, "The instance is being made at this moment.", retry_after=1)
        if asked is not None and after.stop_request_id == asked:
            # The same request again: its first answer was lost.
            return self._answer(after)
        raise Refused(400, f"Instance already terminated: '{after.instance_id}' is {after.status} ({after.reason}).")

    async def delete_batch(self, request: Request) -> Response:
        asked = Fields(dict(request.query_params))
        run_id, profile_id = asked.text("run_id"), asked.text("profile_id")
        if not run_id and not profile_id:
            raise Refused(400, "'run_id' is missing. Send it, or 'profile_id' for all of a profile.")
        if profile_id not in (None, self.plane.settings.profile_id):
            return answer([])
        ended = await self.plane.hosting.stop_run(run_id)
        return answer([records.on_the_wire(instance, self.plane.settings) for instance in ended])

    async def heartbeat(self, request: Request) -> Response:
        given = await read_object(request, required=False)
        found = await self._needed(request)
        beaten = await self.plane.hosting.heartbeat(found.instance_id, given.label("region"))
        if beaten is None:
            raise Refused(
                400, f"Instance '{found.instance_id}' is {found.status}: only a running one has a heartbeat."
            )
        last, interval = beaten.last_heartbeat, beaten.heartbeat_interval
        return answer(
            {
                "success": True,
                "instance_id": beaten.instance_id,
                "last_heartbeat": None if last is None else text_of(last),
                "deadline_timestamp": None if last is None or interval is None else last + interval,
                "interval_seconds": interval,
            }
        )

    async def runs(self, request: Request) -> Response:
        asked = Fields(dict(request.query_params))
        active = asked.choice("active", ("active", "inactive", "all")) or "active"
        own = self.plane.settings.profile_id
        if asked.text("profile_id") not in (None, own):
            return answer([])
        return answer(await self.plane.database.run(records.count_runs, active, own))

    async def runner_token(self, request: Request) -> Response:
        token = self.plane.runner_token
        if token is None:
            raise Refused(404, "The instances of this plane are not gated: there is no runner token.")
        return answer({"token": token})

    async def _needed(self, request: Request) -> Instance:
        instance_id = request.path_params["instance_id"]
        found = await self.plane.database.run(records.find, instance_id)
        if found is None:
            raise Refused(404, f"Instance '{shown(instance_id)}' not found.")
        return found

    def _answer(self, instance: Instance) -> Response:
        return answer(records.on_the_wire(instance, self.plane.settings))


def read_order(given: Fields, settings: PlaneSettings, asked_as: str | None) -> Order:
    """What a request asks an instance to be. Raises Refused, naming the field and what to send."""
    env_key, _, version_in_key = given.needed_text("env_key").partition(":")
    environment = settings.environment(env_key)
    if environment is None:
        hosted = ", ".join(found.env_key for found in settings.environments)
        raise Refused(400, f"Environment '{shown(env_key)}' not found. This plane hosts {hosted}.")
    wanted = given.text("env_version") or version_in_key or None
    version = environment.find_version(wanted)
    if version is None:
        versions = ", ".join(environment.versions)
        raise Refused(400, f"Version '{shown(wanted or '')}' not found for '{env_key}'. It has {versions}.")
    region = given.label("region") or settings.regions[0]
    if region not in settings.regions:
        raise Refused(400, f"Region {shown(region)} not supported. Please use {list(settings.regions)}.")
    variables = given.mapping("env_variables")
    if variables is not None and len(orjson.dumps(variables)) > MOST_VARIABLES_BYTES:
        raise Refused(400, f"'env_variables' is larger than {MOST_VARIABLES_BYTES // 1024} KiB. Send less.")
    wait = given.whole("max_wait_seconds", 0, LONGEST_WAIT)
    return Order(
        instance_id=secrets.token_hex(8),
        env_key=env_key,
        version=version,
        region=region,
        ttl_seconds=given.whole("ttl_seconds", 1, LONGEST_TTL) or settings.default_ttl_seconds,
        max_wait_seconds=USUAL_WAIT if wait is None else wait or SHORTEST_WAIT,
        request_id=asked_as,
        data_key=given.label("data_key"),
        data_version=given.label("data_version"),
        env_variables=variables,
        image_type=given.choice("image_type", IMAGE_TYPES),
        run_id=given.label("run_id"),
        heartbeat_interval=given.whole("heartbeat_interval", 1, LONGEST_HEARTBEAT),
    )


def _not_started(order: Order, error: StartFailed) -> Refused:
    """400 in either case: clients repeat a 5xx under the same request id, which names this dead instance.
    Whether a new request may succeed is said in words that they look for, and to our own as a flag."""
    what = f"Instance '{order.instance_id}' of '{order.env_key}' did not start: {error}"
    if not error.passing:
        return Refused(400, what)
    return Refused(400, f'{what}. A new request may succeed ("retryable": true)', retry_after=1)
