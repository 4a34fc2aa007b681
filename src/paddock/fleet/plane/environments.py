"""The routes of what the plane offers and of its state: environments, regions, account, health, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import PlainTextResponse
from starlette.routing import Route

import paddock
from paddock.fleet.plane import instance_records
from paddock.fleet.plane.database import now_text
from paddock.fleet.plane.http import HttpError, json_response, printable

if TYPE_CHECKING:
    import sqlite3

    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.fleet.plane.plane import Plane
    from paddock.fleet.plane.settings import HostedEnvironment, PlaneSettings


class EnvironmentRoutes:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/status", self.status, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/v1/env/", self.list_all, methods=["GET"]),
            Route("/v1/env", self.list_all, methods=["GET"]),
            Route("/v1/env/{env_key}", self.get, methods=["GET"]),
            Route("/v1/regions", self.regions, methods=["GET"]),
            Route("/v1/account", self.account, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        """Open without a key, so it says only that the plane answers."""
        return json_response({"status": "healthy", "service": "paddock-fleet", "version": paddock.__version__})

    async def status(self, request: Request) -> Response:
        return json_response(await self.plane.statistics())

    async def metrics(self, request: Request) -> Response:
        statistics = await self.plane.statistics()
        lines = [f'paddock_fleet_instances{{status="{name}"}} {n}' for name, n in statistics["instances"].items()]
        lines += [f'paddock_fleet_since_start{{event="{name}"}} {n}' for name, n in statistics["since_start"].items()]
        lines += [f"paddock_fleet_{name} {statistics[name]}" for name in ("instance_limit", "starting", "warm")]
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    async def list_all(self, request: Request) -> Response:
        offered_since = await self.plane.database.run(_read_versions)
        return json_response(
            [_to_json(environment, offered_since) for environment in self.plane.settings.environments]
        )

    async def get(self, request: Request) -> Response:
        env_key = request.path_params["env_key"]
        environment = self.plane.settings.environment(env_key)
        if environment is None:
            raise HttpError(404, f"Environment '{printable(env_key)}' not found. GET /v1/env/ lists them.")
        return json_response(_to_json(environment, await self.plane.database.run(_read_versions)))

    async def regions(self, request: Request) -> Response:
        return json_response(list(self.plane.settings.regions))

    async def account(self, request: Request) -> Response:
        settings = self.plane.settings
        return json_response(
            {
                "team_id": settings.team_id,
                "team_name": settings.team_name,
                "instance_limit": settings.instance_limit,
                "instance_count": await self.plane.database.run(instance_records.count_alive),
                "profile_id": settings.profile_id,
                "profile_name": settings.profile_id,
            }
        )


def store_versions(connection: sqlite3.Connection, settings: PlaneSettings) -> None:
    """Store since when each version is offered."""
    for environment in settings.environments:
        connection.executemany(
            "INSERT OR IGNORE INTO versions (env_key, version, since) VALUES (?, ?, ?)",
            [(environment.env_key, version, now_text()) for version in environment.versions],
        )


def _read_versions(connection: sqlite3.Connection) -> dict[tuple[str, str], str]:
    return {(row["env_key"], row["version"]): row["since"] for row in connection.execute("SELECT * FROM versions")}


def _to_json(environment: HostedEnvironment, offered_since: dict[tuple[str, str], str]) -> dict[str, Any]:
    return {
        "env_key": environment.env_key,
        "name": environment.name or environment.env_key,
        "description": environment.description,
        "default_version": environment.current_version,
        "versions": {version: offered_since[environment.env_key, version] for version in environment.versions},
    }
