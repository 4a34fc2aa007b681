"""Manual steps in a served environment: OpenEnv's routes below `/web/`, with an episode per visitor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.routing import Route

from paddock.errors import InvalidJSON
from paddock.server.http import EpisodeRoutes, JSONBytes, read_body, with_error_responses

if TYPE_CHECKING:
    from starlette.responses import Response

    from paddock.server.service import Service


class Play:
    """The session is the one that `/reset` hands out as a cookie."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._episodes = EpisodeRoutes(service)

    def routes(self) -> list[Route]:
        return [
            Route("/metadata", with_error_responses(self.metadata), methods=["GET"]),
            Route("/state", with_error_responses(self._episodes.state), methods=["GET"]),
            Route("/reset", with_error_responses(self._episodes.reset), methods=["POST"]),
            Route("/step", with_error_responses(self.step), methods=["POST"]),
            Route("/schema", with_error_responses(self.schema), methods=["GET"]),
        ]

    async def metadata(self, request: Request) -> Response:
        return JSONBytes((await self.service.metadata()).model_dump())

    async def schema(self, request: Request) -> Response:
        return JSONBytes(self.service.spec.schemas())

    async def step(self, request: Request) -> Response:
        """`{"action": {…}}`, or `{"message": …}` for environments that take one. Arguments may be JSON in a text."""
        raw = await read_body(request.receive, self.service.config.limits.message_bytes)
        try:
            body = orjson.loads(raw or b"{}")
        except orjson.JSONDecodeError as error:
            raise InvalidJSON(f"the body is not valid JSON: {error}") from None
        return await self._episodes.step(_with_body(request, orjson.dumps(_normalise_body(body))))


def _normalise_body(body: Any) -> Any:
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
    """The same request with another body; a disconnect is still received."""
    is_sent = False

    async def receive() -> Any:
        nonlocal is_sent
        if is_sent:
            return await request.receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(request.scope, receive)
