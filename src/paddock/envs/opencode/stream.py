"""`GET /rollouts/{rollout_id}/events`: the events of a rollout as a server-sent stream.

A reader that was cut off goes on with `Last-Event-ID`, as browsers send it by themselves, or `?after=`.
The stream ends after the outcome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import JSONResponse, Response, StreamingResponse

from paddock.envs.opencode.desk import desk_here
from paddock.errors import InvalidMessage, PaddockError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from paddock.envs.opencode.desk import Desk

KEEP_ALIVE_EVERY = 10.0
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


async def stream_events(request: Request) -> Response:
    try:
        after = _after(request)
        desk = await desk_here()
        rollout_id = (await desk.record(request.path_params["rollout_id"])).rollout_id
        events, done = await desk.events(rollout_id, after or 0, 0)
    except PaddockError as error:
        wire = error.to_wire()
        return JSONResponse({"detail": wire.pop("message"), **wire}, error.http_status)
    if after is not None and done and not events:
        # This status tells a browser not to come back.
        return Response(status_code=204)
    body = _body(desk, rollout_id, after or 0)
    return StreamingResponse(body, media_type="text/event-stream", headers=HEADERS)


async def _body(desk: Desk, rollout_id: str, after: int) -> AsyncIterator[bytes]:
    yield b": here\n\n"
    while True:
        events, done = await desk.events(rollout_id, after, KEEP_ALIVE_EVERY)
        for event in events:
            after = event["seq"]
            yield _frame(event)
        if done or desk.is_closing:
            return
        if not events:
            yield b": here\n\n"


def _frame(event: dict[str, Any]) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event["seq"], event["kind"].encode(), orjson.dumps(event))


def _after(request: Request) -> int | None:
    """The last event that the reader has; None if it is new."""
    given = request.headers.get("last-event-id") or request.query_params.get("after")
    if not given:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        raise InvalidMessage(f"after is {given[:40]!r}, which is no event number", hint="give the last seq you have")
    return int(given)
