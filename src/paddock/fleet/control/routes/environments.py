"""What the plane offers and how it is: environments, regions, the account, health and figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import PlainTextResponse
from starlette.routing import Route

import paddock
from paddock.fleet.control import records
from paddock.fleet.control.answers import Refused, answer, shown

if TYPE_CHECKING:
    import sqlite3

    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.fleet.control.plane import Plane
    from paddock.fleet.control.settings import HostedEnvironment


class Environments:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/status", self.status, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/v1/env/", self.listed, methods=["GET"]),
            Route("/v1/env", self.listed, methods=["GET"]),
            Route("/v1/env/{env_key}", self.one, methods=["GET"]),
            Route("/v1/regions", self.regions, methods=["GET"]),
            Route("/v1/account", self.account, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        """Open to all, so it tells nothing but that the plane answers."""
        return answer({"status": "healthy", "service": "paddock-fleet", "version": paddock.__version__})

    async def status(self, request: Request) -> Response:
        return answer(await self.plane.statistics())

    async def metrics(self, request: Request) -> Response:
        figures = await self.plane.statistics()
        lines = [f'paddock_fleet_instances{{status="{name}"}} {n}' for name, n in figures["instances"].items()]
        lines += [f'paddock_fleet_since_start{{event="{name}"}} {n}' for name, n in figures["since_start"].items()]
        lines += [f"paddock_fleet_{name} {figures[name]}" for name in ("instance_limit", "starting", "warm")]
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    async def listed(self, request: Request) -> Response:
        since = await self.plane.database.run(_since)
        return answer([_on_the_wire(environment, since) for environment in self.plane.settings.environments])

    async def one(self, request: Request) -> Response:
        env_key = request.path_params["env_key"]
        environment = self.plane.settings.environment(env_key)
        if environment is None:
            raise Refused(404, f"Environment '{shown(env_key)}' not found. GET /v1/env/ lists them.")
        return answer(_on_the_wire(environment, await self.plane.database.run(_since)))

    async def regions(self, request: Request) -> Response:
        return answer(list(self.plane.settings.regions))

    async def account(self, request: Request) -> Response:
        settings = self.plane.settings
        return answer(
            {
                "team_id": settings.team_id,
                "team_name": settings.team_name,
                "instance_limit": settings.instance_limit,
                "instance_count": await self.plane.database.run(records.count_alive),
                "profile_id": settings.profile_id,
                "profile_name": settings.profile_id,
            }
        )


def _since(connection: sqlite3.Connection) -> dict[tuple[str, str], str]:
    return {(row["env_key"], row["version"]): row["since"] for row in connection.execute("SELECT * FROM versions")}


def _on_the_wire(environment: HostedEnvironment, since: dict[tuple[str, str], str]) -> dict[str, Any]:
    return {
        "env_key": environment.env_key,
        "name": environment.name or environment.env_key,
        "description": environment.description,
        "default_version": environment.usual_version,
        "versions": {version: since[environment.env_key, version] for version in environment.versions},
    }
