"""`GET /rollouts/{rollout_id}/events`: the events of a rollout as a server-sent stream.

A reader that was cut off goes on with `Last-Event-ID`, as browsers send it by themselves, or `?after=`.
The stream ends after the outcome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import JSONResponse, Response, StreamingResponse

from paddock.envs.opencode.rollout_service import get_service
from paddock.errors import InvalidMessage, PaddockError
from paddock.protocol.sse import KEEP_ALIVE, MEDIA_TYPE, write_event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from paddock.envs.opencode.rollout_service import OpenCodeRolloutService

KEEP_ALIVE_SECONDS = 10.0
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


async def stream_events(request: Request) -> Response:
    try:
        after = _after(request)
        service = await get_service()
        rollout_id = (await service.record(request.path_params["rollout_id"])).rollout_id
        events, done = await service.events(rollout_id, after or 0, 0)
    except PaddockError as error:
        wire = error.to_wire()
        return JSONResponse({"detail": wire.pop("message"), **wire}, error.http_status)
    if after is not None and done and not events:
        # This status tells a browser not to come back.
        return Response(status_code=204)
    body = _body(service, rollout_id, after or 0)
    return StreamingResponse(body, media_type=MEDIA_TYPE, headers=HEADERS)


async def _body(service: OpenCodeRolloutService, rollout_id: str, after: int) -> AsyncIterator[bytes]:
    yield KEEP_ALIVE
    while True:
        events, done = await service.events(rollout_id, after, KEEP_ALIVE_SECONDS)
        for event in events:
            after = event["seq"]
            yield _frame(event)
        if done or service.is_closing:
            return
        if not events:
            yield KEEP_ALIVE


def _frame(event: dict[str, Any]) -> bytes:
    return write_event(orjson.dumps(event), event["kind"], id=event["seq"])


def _after(request: Request) -> int | None:
    """The last event that the reader has; None if it is new."""
    number = request.headers.get("last-event-id") or request.query_params.get("after")
    if not number:
        return None
    if not (number.isascii() and number.isdigit() and len(number) < 16):
        raise InvalidMessage(f"after is {number[:40]!r}, which is no event number", hint="give the last seq you have")
    return int(number)
