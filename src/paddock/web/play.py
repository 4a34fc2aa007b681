"""Playing with a served environment: OpenEnv's routes below `/web/`, but each visitor has an episode of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.routing import Route

from paddock.errors import InvalidJSON
from paddock.server.http import Episodes, JSONBytes, answering, read_body

if TYPE_CHECKING:
    from starlette.responses import Response

    from paddock.server.service import Service


class Play:
    """The session is the one that `/reset` hands out as a cookie."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._episodes = Episodes(service)

    def routes(self) -> list[Route]:
        return [
            Route("/metadata", answering(self.metadata), methods=["GET"]),
            Route("/state", answering(self._episodes.state), methods=["GET"]),
            Route("/reset", answering(self._episodes.reset), methods=["POST"]),
            Route("/step", answering(self.step), methods=["POST"]),
            Route("/schema", answering(self.schema), methods=["GET"]),
        ]

    async def metadata(self, request: Request) -> Response:
        return JSONBytes((await self.service.metadata()).model_dump())

    async def schema(self, request: Request) -> Response:
        return JSONBytes(self.service.blueprint.schemas())

    async def step(self, request: Request) -> Response:
        """`{"action": {…}}`, or `{"message": …}` for environments that take one. Arguments may be JSON in a text."""
        raw = await read_body(request.receive, self.service.config.limits.message_bytes)
        try:
            body = orjson.loads(raw or b"{}")
        except orjson.JSONDecodeError as error:
            raise InvalidJSON(f"the body is not valid JSON: {error}") from None
        return await self._episodes.step(_with_body(request, orjson.dumps(_understood(body))))


def _understood(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    if "action" not in body and "message" in body:
        body = {**body, "action": {"message": body["message"]}}
        del body["message"]
    action = body.get("action")
    if isinstance(action, dict) and isinstance(action.get("arguments"), str):
        try:
            body = {**body, "action": {**action, "arguments": orjson.loads(action["arguments"])}}
        except orjson.JSONDecodeError:
            return body
    return body


def _with_body(request: Request, body: bytes) -> Request:
    """The same request with another body; whoever waits for its end still hears of it."""
    told = False

    async def receive() -> Any:
        nonlocal told
        if told:
            return await request.receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(request.scope, receive)
