"""Tasks: stored, changed, found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from paddock.fleet.control import tasks
from paddock.fleet.control.answers import Refused, answer, read_object, shown

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.fleet.control.plane import Plane


class Tasks:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.team_id = plane.settings.team_id

    def routes(self) -> list[Route]:
        return [
            Route("/v1/tasks", self.listed, methods=["GET"]),
            Route("/v1/tasks", self.put, methods=["POST"]),
            Route("/v1/tasks/{key:path}", self.one, methods=["GET"]),
            Route("/v1/tasks/{key:path}", self.change, methods=["PUT"]),
            Route("/v1/verifiers/{verifier_id}", self.verifier, methods=["GET"]),
        ]

    async def listed(self, request: Request) -> Response:
        asked = request.query_params
        filters = {name: asked[name] for name in tasks.FILTERS if asked.get(name)}
        keys = asked.getlist("task_keys")
        found = []
        if asked.get("team_id", self.team_id) == self.team_id:
            found = await self.plane.database.run(tasks.find_tasks, filters, keys, self.team_id)
        return answer({"tasks": found, "total": len(found)})

    async def put(self, request: Request) -> Response:
        given = await read_object(request)
        project_key = request.query_params.get("project_key") or given.text("project_key")
        return answer(await self.plane.database.run(tasks.put_task, given, project_key, self.team_id))

    async def one(self, request: Request) -> Response:
        version = request.query_params.get("version_id")
        key = request.path_params["key"]
        return answer(await self.plane.database.run(tasks.needed_task, key, self.team_id, version))

    async def change(self, request: Request) -> Response:
        given = await read_object(request)
        return answer(
            await self.plane.database.run(tasks.change_task, request.path_params["key"], given, self.team_id)
        )

    async def verifier(self, request: Request) -> Response:
        verifier_id = request.path_params["verifier_id"]
        found = await self.plane.database.run(tasks.find_verifier, verifier_id)
        if found is None:
            raise Refused(404, f"Verifier '{shown(verifier_id)}' not found.")
        return answer(found)
