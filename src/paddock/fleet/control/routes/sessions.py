"""Jobs, sessions and traces: taken in and given back. A request that comes twice counts once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from starlette.routing import Route

from paddock.fleet.control import sessions
from paddock.fleet.control.answers import Fields, Refused, answer, answer_text, read_object, request_id, shown
from paddock.fleet.control.database import replayed

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.fleet.control.plane import Plane


class Sessions:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane

    def routes(self) -> list[Route]:
        return [
            Route("/v1/jobs", self.jobs, methods=["GET"]),
            Route("/v1/jobs", self.create_job, methods=["POST"]),
            Route("/v1/jobs/{job_id}", self.job, methods=["GET"]),
            Route("/v1/sessions/job/{job_id}", self.job_sessions, methods=["GET"]),
            Route("/v1/sessions/{session_id}/transcript", self.transcript, methods=["GET"]),
            Route("/v1/sessions/ingest", self.ingest, methods=["POST"]),
            Route("/v1/traces/jobs", self.trace_job, methods=["POST"]),
            Route("/v1/traces/logs", self.log, methods=["POST"]),
        ]

    async def jobs(self, request: Request) -> Response:
        found = await self.plane.database.run(sessions.find_jobs)
        return answer({"jobs": found, "total": len(found)})

    async def create_job(self, request: Request) -> Response:
        given = await read_object(request)
        models = given.items("models", least=1)
        if not all(isinstance(model, str) for model in models or []):
            raise Refused(400, "'models' holds something else than strings. Send the names of models.")
        # Keys of other services are nothing that a plane which runs no model should keep.
        body = {name: value for name, value in given.values.items() if name != "byok_keys"}
        name = given.label("name")
        return await self._once(request, lambda connection: sessions.put_job(connection, name, body))

    async def trace_job(self, request: Request) -> Response:
        name = (await read_object(request)).label("name")

        def work(connection: sqlite3.Connection) -> dict[str, Any]:
            made = sessions.put_job(connection, name, {"source": "trace"})
            return {"job_id": made["job_id"], "name": made["name"], "status": "running"}

        return await self._once(request, work)

    async def job(self, request: Request) -> Response:
        job_id = request.path_params["job_id"]
        found = await self.plane.database.run(sessions.find_jobs, job_id)
        if not found:
            raise Refused(404, f"Job '{shown(job_id)}' not found.")
        return answer(found[0])

    async def job_sessions(self, request: Request) -> Response:
        job_id = request.path_params["job_id"]
        return answer(await self.plane.database.run(sessions.job_sessions, job_id, self.plane.settings))

    async def transcript(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        return answer(await self.plane.database.run(sessions.transcript, session_id, self.plane.settings))

    async def ingest(self, request: Request) -> Response:
        given = await read_object(request)
        messages = given.items("messages", least=1) or []
        for place, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise Refused(400, f"'messages[{place}]' has no 'role'. Send objects with 'role' and 'content'.")
        return await self._take_in(request, given, [sessions.normal_message(one, "user") for one in messages])

    async def log(self, request: Request) -> Response:
        given = await read_object(request)
        history = given.items("history") or []
        messages = [sessions.normal_message(message, "user") for message in history]
        response = given.values.get("response")
        if response is not None:
            messages.append(sessions.normal_message(response, "assistant"))
        if not messages and given.text("session_id") is None:
            raise Refused(400, "'history' and 'response' are missing. Send messages, or the 'session_id' to change.")
        return await self._take_in(request, given, messages)

    async def _take_in(self, request: Request, given: Fields, messages: list[dict[str, Any]]) -> Response:
        return await self._once(request, lambda connection: sessions.ingest(connection, given, messages))

    async def _once(self, request: Request, work: Callable[[sqlite3.Connection], dict[str, Any]]) -> Response:
        asked = request_id(request)
        name = None if asked is None else f"{request.url.path} {asked}"

        def carry_out(connection: sqlite3.Connection) -> str:
            return replayed(connection, name, lambda: orjson.dumps(work(connection)).decode())

        return answer_text(await self.plane.database.run(carry_out))
